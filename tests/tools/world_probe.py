"""Run by test_chaos_world.py in a machine of its own: tries each fault of the machine, and prints its effect on this
process, or on those on its hosts (``several``).
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.chaos.world import World, enter


def room(path):
    """Whether a file can be written."""
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
    world = World(folder, 16, several=False)
    said = {"alone": world.alone, "pid": os.getpid(), "missing": world.missing, "left": [world.left()]}
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
                if "reset" in world.missing:
                    client.close()
                else:
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


CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], 7002), timeout=1):
    pass
"""
SERVE = """
import socket, sys
listener = socket.create_server((sys.argv[1], 7002))
print("listening", flush=True)
while True:
    listener.accept()
"""


def several(folder):
    """Answers if there can be several hosts."""
    world = World(folder, 16)
    said = {"names": world.hosts.names, "missing": world.missing, "left": [world.left()]}
    cluster = world.hosts.cluster
    if cluster is not None:
        head, a = cluster.head, cluster["a"]
        said["processes"] = [len(world.processes())]
        pipe = subprocess.PIPE
        serving = a.popen([sys.executable, "-c", SERVE, a.address], stdout=pipe, text=True)
        assert serving.stdout.readline() == "listening\n"
        said["processes"].append(sum("listener" in " ".join(process.cmdline()) for process in world.processes()))
        reach = [sys.executable, "-c", CONNECT, a.address]
        for action in (None, world.cut, world.mend):
            if action is not None:
                action()
            # The kernel takes a moment to find a neighbour again.
            until = time.monotonic() + (30.0 if action == world.mend else 0.0)
            while True:
                connected = [host.run(reach, check=False).returncode == 0 for host in (head, a)]
                if all(connected) or time.monotonic() >= until:
                    break
            said.setdefault("connects", []).append(connected)
        a.path("/dev/shm/forgotten").write_text("")
        a.path("/tmp/forgotten").write_text("")
        for name in ("logs", "private-1"):
            a.path(world.runs / "live" / name).mkdir(parents=True)
            a.path(world.runs / "live" / name / "file").write_text("")
        (world.temporary / "forgotten").write_text("")
        said["left"].append(sorted(world.left()))
        serving.kill()
        serving.wait()
        serving.stdout.close()
    world.close()
    print(json.dumps(said))


if __name__ == "__main__":
    enter("world_probe", sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        {"one": main, "several": several}[sys.argv[1]](Path(name))
