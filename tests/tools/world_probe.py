"""Run by test_chaos_world.py in a machine of its own: each fault of the machine, and what it does to this process."""

import contextlib
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from tools.chaos.world import World, enter


def room(path):
    """Whether something can be written."""
    try:
        path.write_bytes(b"x" * 100_000)
    except OSError:
        return False
    path.unlink()
    return True


def connects(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.5):
        return True
    return False


def main(folder):
    world = World(folder, 16)
    said = {"alone": world.alone, "pid": os.getpid(), "kinds": world.kinds, "left": [world.left()]}
    if world.alone:
        world.fill()
        world.fill()
        said["room"] = [room(world.runs / "file"), room(folder / "elsewhere")]
        world.free()
        said["room"].append(room(world.runs / "file"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            said["connects"] = [connects(port)]
            world.cut()
            said["connects"].append(connects(port))
            world.mend()
            said["connects"].append(connects(port))
            with socket.create_connection(("127.0.0.1", port)) as client:
                world.reset()
                try:
                    client.settimeout(5)
                    said["reset"] = client.recv(1) == b""
                except OSError as error:
                    said["reset"] = not isinstance(error, TimeoutError)
            said["left"].append(world.left())
            Path("/dev/shm/forgotten").write_text("")
            (world.temporary / "forgotten").write_text("")
            said["left"].append(world.left())
    world.close()
    print(json.dumps(said))


if __name__ == "__main__":
    enter("world_probe", sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
