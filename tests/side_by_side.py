"""Two ports side by side, the first of them held."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def held_and_free(host: str) -> Iterator[int]:
    """The first of the two."""
    for _ in range(200):
        with socket.create_server((host, 0)) as holder:
            port: int = holder.getsockname()[1]
            with socket.socket() as other:
                try:
                    other.bind((host, port + 1))
                except OSError:
                    continue
            yield port
            return
    raise AssertionError("no two free ports side by side")
