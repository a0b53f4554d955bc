"""Sandboxes as an attacker sees them: nothing gets out, nothing stays behind, and a result never lies."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl import sandbox
from asyncrl.sandbox import SandboxError, SandboxRequest, SandboxResult
from asyncrl.workers.worker import FrameReader, framed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ORDINARY = 4321


def why_not() -> str:
    try:
        sandbox.run(["true"])
    except SandboxError as error:
        return str(error)
    return ""


REASON = why_not()
sandboxed = pytest.mark.skipif(bool(REASON), reason=REASON)


def python(code: str, **given: Any) -> SandboxResult:
    return sandbox.run([*given.pop("before", ()), "python3", "program.py"], {"program.py": code}, **given)


def environment() -> dict[str, str]:
    """The same modules for an interpreter that any user may run."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def living() -> list[psutil.Process]:
    """Processes that this one has started, without zombies."""
    with_zombies = psutil.Process().children(recursive=True)
    return [each for each in with_zombies if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = living()
    yield
    deadline = time.monotonic() + 30
    while left := [each for each in living() if each not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert " /sys tmpfs" not in Path("/proc/self/mounts").read_text()


def attacked(mode: str, folder: Path, interpreter: str, **user: Any) -> Any:
    """What an attacker could do in a sandbox of a process with a secret variable, a server and a private folder."""
    private = folder / "private" / "key"
    private.parent.mkdir()
    private.write_text("MARK")
    if user:
        for path in (folder, private.parent, private):
            os.chown(path, ORDINARY, ORDINARY)
    env = {**environment(), "SECRET_KEY": "MARK"}
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "100"], **user) as other:
        argv = [interpreter, "-B", str(HERE / "caller.py"), mode]
        argv += [str(other.pid), str(server.getsockname()[1]), str(private)]
        try:
            ended = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=120, **user)
            assert ended.returncode == 0, ended.stderr
            assert other.poll() is None
        finally:
            other.kill()
    return json.loads(ended.stdout)


@sandboxed
@pytest.mark.parametrize("mode", ["plain", "isolated"])
def test_an_attacker_reaches_nothing(tmp_path: Path, mode: str) -> None:
    assert attacked(mode, tmp_path, sys.executable) == {"done": [], "code": 0, "errors": ""}


@sandboxed
@pytest.mark.parametrize("mode", ["plain", "isolated"])
def test_an_attacker_reaches_nothing_from_the_sandbox_of_an_ordinary_user(mode: str) -> None:
    interpreter = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin")
    if os.geteuid() != 0 or interpreter is None:
        pytest.skip("needs root, which becomes another user, and an interpreter that this user may run")
    with tempfile.TemporaryDirectory() as folder:
        user = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
        assert attacked(mode, Path(folder), interpreter, **user) == {"done": [], "code": 0, "errors": ""}


@sandboxed
def test_an_isolated_program_of_an_agent_has_sandboxes(tmp_path: Path) -> None:
    code = "from asyncrl import sandbox; print(sandbox.run(['sh', '-c', 'echo inside']).stdout)"
    setup = {"argv": [sys.executable, "-c", code], "env": environment(), "files": {}}
    ours, theirs = socket.socketpair()
    argv = [sys.executable, "-m", "asyncrl.workers.keeper", str(theirs.fileno()), str(tmp_path)]
    with ours, subprocess.Popen(argv, pass_fds=[theirs.fileno()], start_new_session=True, stdout=subprocess.DEVNULL):
        theirs.close()
        ours.sendall(framed(json.dumps(setup).encode()))
        reader, bodies = FrameReader(1 << 20), []
        while not bodies:
            bodies += reader.feed(ours.recv(1 << 16))
    reported = json.loads(bodies[0])
    assert (reported["code"], reported["last_line"]) == (0, "inside"), reported


@sandboxed
def test_a_program_gets_its_files_and_returns_outputs() -> None:
    code = """
import sys
print(open("data/a.txt").read(), sys.stdin.read())
open("made", "wb").write(b"\\xff")
sys.exit(3)
"""
    given = {"program.py": code, "data/a.txt": "hello"}
    result = sandbox.run(["python3", "program.py"], given, stdin="in", outputs=["made", "data/a.txt", "absent"])
    assert (result.exit_code, result.stdout, result.ok) == (3, "hello in\n", False)
    assert result.outputs == {"made": b"\xff", "data/a.txt": b"hello"}
    assert sandbox.run(["true"]).ok
    assert sandbox.run(["env"], env={"A": "1"}).stdout.count("A=1\n") == 1


@sandboxed
def test_further_folders_are_read_only_and_the_rest_of_theirs_is_hidden(tmp_path: Path) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / "data").write_text("hello")
    (tmp_path / "hidden").write_text("secret")
    shown = str(tmp_path / "shown")
    result = sandbox.run(["sh", "-c", f"cat {shown}/data; ls {tmp_path}; touch {shown}/x"], read_only=[shown])
    assert (result.exit_code, result.stdout) == (1, "hello" + "shown\n")
    assert os.listdir(shown) == ["data"]


@sandboxed
def test_a_program_that_is_not_there_is_a_result() -> None:
    assert sandbox.run(["nosuch"]).exit_code == 127
    assert sandbox.run(["sh", "-c", "kill -SEGV $$"]).exit_code == 128 + 11


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", "", ".", "a\0b"])
def test_paths_out_of_the_work_folder_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path below the work folder"):
        SandboxRequest(argv=["true"], files={path: "x"})
    with pytest.raises(ValueError, match="not a path below the work folder"):
        SandboxRequest(argv=["true"], outputs=[path])


def test_a_command_line_in_one_text_is_refused() -> None:
    with pytest.raises(ValueError, match="argv must be a list"):
        sandbox.run("ls -l")


@sandboxed
def test_links_and_special_files_are_no_outputs() -> None:
    code = """
import os
os.symlink("/etc/passwd", "link")
os.symlink("/etc", "folder")
os.symlink("real", "inside")
os.mkdir("real")
open("real/passwd", "w").write("x")
os.mkfifo("pipe")
with open("sparse", "w") as file:
    file.truncate(1 << 20)
"""
    names = ["link", "folder/passwd", "inside/passwd", "pipe", "real", "real/passwd", "sparse"]
    result = python(code, outputs=names, disk_bytes=1 << 20)
    assert (result.exit_code, result.stderr) == (0, "")
    # Together they may be as large as the disk, so the sparse file is one byte too many.
    assert result.outputs == {"real/passwd": b"x"}


@sandboxed
def test_time_ends_the_program_and_what_it_started() -> None:
    code = """
import os, signal, time
for number in range(1, 32):
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
else:
    print("started", flush=True)
time.sleep(1000)
"""
    # On a busy machine the program may not have started within a second.
    for timeout in (1.0, 4.0, 16.0):
        result = python(code, timeout=timeout)
        if result.stdout:
            break
    assert (result.timed_out, result.ok, result.exit_code, result.stdout) == (True, False, 137, "started\n")
    assert 1.0 <= result.duration < 30.0


@sandboxed
def test_a_daemon_ends_with_the_program() -> None:
    began = time.monotonic()
    result = sandbox.run(["sh", "-c", "setsid sleep 1000 & setsid sleep 1000 >/dev/null 2>&1 & echo done"])
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert time.monotonic() - began < 60


@sandboxed
def test_processes_are_limited() -> None:
    code = """
import os, time
made = 0
try:
    while made < 500:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except BlockingIOError:
    print("refused after", made)
"""
    result = python(code, processes=20)
    assert result.stdout.startswith("refused after ")
    assert 15 <= int(result.stdout.split()[-1]) <= 24


@sandboxed
def test_a_fork_bomb_ends() -> None:
    result = sandbox.run(["sh", "-c", "f() { f | f & }; f; sleep 1000"], timeout=1.5, processes=64)
    assert result.timed_out or result.exit_code


@sandboxed
def test_memory_of_one_process_is_limited() -> None:
    assert "MemoryError" in python("x = b'1' * (1 << 30)", memory_bytes=200 << 20).stderr


@sandboxed
def test_memory_of_all_processes_is_limited_together() -> None:
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        break
x = b"1" * (120 << 20)
time.sleep(1000)
"""
    result = python(code, memory_bytes=300 << 20, timeout=30.0)
    assert (result.memory_exceeded, result.timed_out, result.ok) == (True, False, False)


@sandboxed
def test_output_is_cut_in_its_middle() -> None:
    result = python("import sys; print('first'); sys.stdout.write('x' * 50_000_000); print('last')", output_bytes=1000)
    mark = f"\n[... {len('first') + 50_000_000 + len('last') + 2 - 1000} bytes are left out ...]\n"
    assert result.ok
    assert result.stdout == "first\n" + "x" * 494 + mark + "x" * 495 + "last\n"


@sandboxed
def test_the_disk_is_limited_in_bytes_and_files() -> None:
    code = """
import errno, os
def filled(step):
    try:
        for number in range(100_000):
            step(number)
    except OSError as error:
        return errno.errorcode[error.errno]
big = lambda number: open(f"{number}", "wb").write(b"x" * (1 << 18))
print(filled(lambda number: open(f"/tmp/{number}", "wb").close()))
for name in os.listdir("/tmp"):
    if name != "work": os.remove(f"/tmp/{name}")
print(filled(big))
print(filled(lambda number: open("/dev/shm/huge", "ab").write(b"x" * (1 << 20))))
"""
    result = python(code, disk_bytes=4 << 20, disk_files=200, timeout=30.0)
    assert result.stdout.split() == ["ENOSPC", "ENOSPC", "ENOSPC"], result


@sandboxed
def test_files_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(SandboxError, match="No space left on device; disk_bytes is 4096"):
        sandbox.run(["true"], {"a": b"x" * 100_000}, disk_bytes=4096)


@sandboxed
def test_the_network_is_shared_only_on_demand() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        assert not python(code).ok
        assert python(code, network=True).ok


@sandboxed
def test_the_standard_library_works() -> None:
    code = """
import multiprocessing, tempfile, pwd, os, threading, ssl
def f(x): return x + 1
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        print(pool.map(f, [1, 2]), pwd.getpwuid(os.getuid()).pw_name)
    tempfile.NamedTemporaryFile().write(b"x")
"""
    result = python(code, timeout=60.0)
    assert (result.stdout, result.stderr) == ("[2, 3] nobody\n", "")


@sandboxed
def test_a_cancelled_run_leaves_nothing() -> None:
    before = living()

    async def play() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await sandbox.run_async(["sh", "-c", "setsid sleep 1000 & sleep 1000"], timeout=500.0)
        assert not [each for each in living() if each not in before]
        results = await asyncio.gather(*(sandbox.run_async(["sh", "-c", f"echo {n}"]) for n in range(6)))
        assert [each.stdout for each in results] == [f"{n}\n" for n in range(6)]

    asyncio.run(play())


@sandboxed
def test_a_killed_caller_leaves_nothing() -> None:
    code = "from asyncrl import sandbox; sandbox.run(['sh', '-c', 'setsid sleep 1234 & sleep 1234'], timeout=500.0)"
    with subprocess.Popen([sys.executable, "-c", code]) as caller:
        sleeping = []
        while len(sleeping) < 2:
            sleeping = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "1234"]]
            time.sleep(0.02)
        caller.kill()
    psutil.wait_procs(sleeping, timeout=30)
    assert not any(each.is_running() for each in sleeping)


def test_without_bubblewrap_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"bubblewrap is not installed.*apt-get install bubblewrap"):
        sandbox.run(["true"])


def test_without_namespaces_the_error_says_so() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or shutil.which("bwrap") is None or REASON:
        pytest.skip("needs unshare and sandboxes")
    code = "from asyncrl import sandbox; sandbox.run(['true'])"
    before = (
        unshare,
        "--user",
        "--map-root-user",
        "sh",
        "-c",
        'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"',
        "sh",
    )
    ended = subprocess.run([*before, sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "SandboxError: the sandbox cannot start: " in ended.stderr
    assert "it needs user namespaces" in ended.stderr


class Remote:
    """A plug-in."""

    def run(self, request: SandboxRequest) -> SandboxResult:
        return SandboxResult(
            exit_code=0,
            stdout=" ".join(request.argv),
            stderr="",
            timed_out=False,
            memory_exceeded=False,
            duration=0.0,
            outputs={},
        )


def test_another_backend_runs_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    assert sandbox.run(["a", "b"], backend="test_sandbox:Remote").stdout == "a b"
    assert asyncio.run(sandbox.run_async(["a"], backend=Remote())).stdout == "a"
    with pytest.raises(ValueError, match="backend: there is no module 'nowhere'"):
        sandbox.run(["a"], backend="nowhere:Remote")
