"""Words of rank 0 to all other ranks, one after the other, through the store of their rendezvous.

Message n of a line for rank r is the key ``LINE/r/n``. A rank waits for its next key for as long as it takes, in waits
of IDLE_WAIT_S that are renewed; no collective runs meanwhile. The wait ends at once when the key is set, when rank 0 is
gone (the connection breaks), or when ``interrupt`` sets the key itself.

It keeps: each word is heard once, in order, however late; the store keeps no word that was heard.

Fails with ActorFailed when rank 0 is gone while its next word is awaited.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]

from asyncrl.errors import ActorFailed

IDLE_WAIT_S = 300.0
"""One wait of a rank for the next word."""


class StoreLine:
    """One end of a line, used by one thread but for ``interrupt``."""

    def __init__(self, name: str, rank: int, world_size: int, *, client: TCPStore, interrupter: TCPStore) -> None:
        """``name`` tells the word that is awaited; while this end waits it keeps ``client`` to itself."""
        self._name, self._rank, self._world_size = name, rank, world_size
        self._client, self._interrupter = client, interrupter
        self._count = 0
        self._interrupted = threading.Event()

    def tell(self, body: bytes) -> None:
        """Rank 0: say a word to every other rank."""
        self._count += 1
        for rank in range(1, self._world_size):
            self._client.set(self._key(rank, self._count), body)  # type: ignore[arg-type]

    def next(self) -> bytes | None:
        """Ranks above 0: the next word of rank 0, or None once interrupted. Raises ActorFailed when rank 0 is gone."""
        self._count += 1
        key = self._key(self._rank, self._count)
        while not self._interrupted.is_set():
            try:
                self._client.wait([key], timedelta(seconds=IDLE_WAIT_S))
                body = bytes(self._client.get(key))
                # The reader deletes it, and may come late: rank 0 does not wait for the others in every word.
                self._client.delete_key(key)
                return body or None
            except DistStoreError:
                # Nothing was said yet: the wait is renewed.
                continue
            except DistNetworkError as error:
                raise ActorFailed(
                    "learner/0", f"gone while learner/{self._rank} awaited its next {self._name}"
                ) from error
        return None

    def interrupt(self) -> None:
        """From any thread: end ``next``, at once if it waits."""
        self._interrupted.set()
        # Only if rank 0 has not set it: a word that was said is heard.
        for count in (self._count, self._count + 1):
            self._interrupter.compare_set(self._key(self._rank, count), "", "")

    def _key(self, rank: int, count: int) -> str:
        return f"{self._name}/{rank}/{count}"
