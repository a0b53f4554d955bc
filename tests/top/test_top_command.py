"""The command asyncrl-top over recordings: printed, in a real terminal, and with nothing to see."""

import fcntl
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys

import msgspec
import pytest
from credentials import create_credentials
from recordings import record
from terminals import Terminal
from top.pictures import WALL, Run, starting

from asyncrl.cli import top as command
from asyncrl.messages.monitor import Snapshot
from asyncrl.rpc.wire.keys import VIEWER

TOP = (sys.executable, "-m", "asyncrl.cli.top")
WIDE = {"rollouters": 64, "hosts": 4}
REPLAY = ("--replay", "--once")


@pytest.fixture
def ended(tmp_path):
    """The folder of a run that has ended, with a recording of 60 s."""
    run_dir = tmp_path / "runs" / "trial"
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    record(
        run_dir, *(Run(phase="done" if second == 100 else "running", **WIDE).at(second) for second in range(40, 101))
    )
    return run_dir


def test_help_and_printing_load_no_terminal_and_help_loads_nothing():
    def loaded(words):
        code = f"""
import sys
from asyncrl.cli import top
try:
    top.main({words!r})
except SystemExit:
    pass
print([name for name in ("textual", "rich", "torch", "zmq", "msgspec", "numpy") if name in sys.modules])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()[-1]

    assert loaded(["--help"]) == "[]"
    assert "textual" not in loaded(["nowhere", "--once"])


def test_a_recording_is_printed_as_text_and_as_json(ended, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["trial", "--replay"]) == 0
    shown = capsys.readouterr().out
    assert "step 50/100" in shown and "done: all steps are trained" in shown
    assert "r/63" in shown and "\x1b" not in shown, "without a terminal it prints"
    assert command.main([str(ended), "--replay", "--json"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out, type=Snapshot)
    assert shown == Run(phase="done", **WIDE).at(100), "--json prints the newest snapshot"
    ascii_alone = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*TOP, "trial", *REPLAY], env=ascii_alone, capture_output=True, timeout=120, check=True)
    assert b"step 50/100" in done.stdout and done.stdout.isascii(), "other characters are printed as escapes"


def test_a_command_without_a_run_to_show_prints_the_reason_and_the_next_command(ended, tmp_path, complains):
    cases = [
        ((), tmp_path, 2, "no run lives under runs; to see the last one again: asyncrl-top runs/trial --replay"),
        (("trial",), tmp_path, 2, "the run has ended; to see it again: asyncrl-top runs/trial --replay"),
        ((), ended, 2, "no run lives under"),
        (("nowhere",), tmp_path, 2, "nowhere: no such run folder"),
        ((ended.parent,), "/", 2, "this is not the folder of a run"),
        (("localhost:1",), "/", 2, "to attach by address, name the folder that holds the keys"),
        (("nowhere", "--replay"), tmp_path, 2, "no such folder"),
        (("trial", "--once", "--json"), tmp_path, 2, "exclude each other"),
        (("trial", "--replay", "--report", "x.html"), tmp_path, 2, "not allowed with"),
        (("trial", "--report", "x.html", "--json"), tmp_path, 2, "--report and --json exclude each other"),
        (("trial", "--explain", "p-1", "--keys", "keys"), tmp_path, 2, "--explain and --keys exclude each other"),
        (("trial", "--fast"), tmp_path, 2, "unrecognized arguments: --fast"),
    ]
    for words, cwd, code, text in cases:
        complains(words, cwd, code, text)
    torn = sorted((ended / "monitor").glob("snapshots-*"))
    for segment in torn:
        segment.write_bytes(b"\xc1")
    reported = f"nothing readable is recorded there; damaged: {', '.join(segment.name for segment in torn)}"
    complains(("trial", "--replay"), tmp_path, 2, reported)
    shutil.rmtree(ended / "monitor")
    complains(("trial", "--replay"), tmp_path, 2, "nothing readable is recorded there; monitor.record_bytes was 0")


@pytest.fixture
def complains(monkeypatch, capsys):
    """The command says that on standard error, and nothing else, and ends with that code."""

    def check(words, cwd, code, text):
        monkeypatch.chdir(cwd)
        try:
            found = command.main(list(map(str, words)))
        except SystemExit as ended:
            found = ended.code
        out, err = capsys.readouterr()
        assert (found, text in " ".join(err.split())) == (code, True), (words, err)
        assert not out

    return check


def test_an_unreachable_address_prints_the_reason_and_the_place_to_look(tmp_path, complains, monkeypatch):
    def lookup(host, *words):
        if host.endswith(".invalid"):
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *words)

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    keys = tmp_path / "keys"
    create_credentials(keys, "a1b2c3", [VIEWER], curve=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        where = "it is at another address, see RUN/private/controller.json on its head"
        cases = [
            (
                (nobody, "--keys", keys),
                1,
                f"{nobody}: nothing listens there (Connection refused); that run has ended, or",
            ),
            ((nobody, "--keys", keys), 1, where),
            (("no-such-host.invalid:80", "--keys", keys), 1, "the host no-such-host.invalid is unknown here"),
            (("localhost:99999", "--keys", keys), 2, "neither a run folder nor HOST:PORT"),
            ((nobody, "--keys", tmp_path), 2, "no viewer's keys there"),
            ((nobody, "--keys", tmp_path), 2, "copy RUN/private from the head"),
        ]
        for words, code, text in cases:
            complains((*words, "--once"), "/", code, text)


def test_the_readable_part_of_a_damaged_recording_is_shown_but_not_as_running(tmp_path, complains, capsys):
    """Also as a host that lost its power leaves it: the last bytes are zeros."""
    record(tmp_path, *(Run(steps=1000).at(float(second)) for second in range(40, 102)))
    path = next((tmp_path / "monitor").iterdir())
    whole = path.read_bytes()
    few, many = 300, len(whole) // 62 * 3
    cuts = [
        whole[: len(whole) * 3 // 4],
        whole + b"\xc1" * 40,
        *(whole[:-zeros] + bytes(zeros) for zeros in (few, many)),
    ]
    for damaged in cuts:
        path.write_bytes(damaged)
        assert command.main([str(tmp_path), *REPLAY]) == 0
        shown = capsys.readouterr().out
        assert "failed: nothing is known after this, when it was running" in " ".join(shown.split())
        head = shown.splitlines()[0]
        assert "step " in head and "failed" in head and "ETA –" in head
    path.write_bytes(msgspec.msgpack.encode([WALL, b"no snapshot"]))
    complains((tmp_path, "--replay"), "/", 2, "the snapshots there are damaged, or of another version of asyncrl")


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"phase": "done", "exit_code": 130, "reason": "stopped by the launcher"},
            "stopped: by the launcher",
        ),
        (
            {"phase": "done", "exit_code": 75, "reason": "preempted with a checkpoint of version 40"},
            "preempted: with a checkpoint of version 40",
        ),
        ({"phase": "failed", "exit_code": 1, "reason": "learner/0: out of memory"}, "failed: learner/0: out of memory"),
        ({}, "failed: nothing is known after this, when it was running: it was killed, stopped at once"),
    ],
)
def test_a_replay_ends_with_the_result_of_an_ended_run(tmp_path, facts, said, capsys):
    record(tmp_path, Run().at(40.0), Run(**facts).at(41.0))
    assert command.main([str(tmp_path), *REPLAY]) == 0
    shown = capsys.readouterr().out
    head = shown.splitlines()[0]
    assert said in " ".join(shown.split())
    assert said.partition(":")[0] in head and "done" not in head and "running" not in head
    (tmp_path / "private").mkdir()
    with (tmp_path / "private" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command.main([str(tmp_path), *REPLAY]) == 0
    assert ("running" in capsys.readouterr().out.splitlines()[0]) == (not facts)


def test_the_private_folder_of_another_user_is_named(ended, tmp_path, monkeypatch, capsys):
    def refuse(_run):
        raise PermissionError(13, "Permission denied", str(ended / "private"))

    monkeypatch.setattr(command, "live_run_place", refuse)
    assert command.main(["trial"]) == 1
    assert "permission denied; only the user who started a run may watch it" in capsys.readouterr().err


needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is missing")


@needs_tmux
def test_a_replay_in_a_real_terminal_that_changes_its_size(tmp_path):
    run_dir = tmp_path / "trial"
    run_dir.mkdir()
    record(run_dir, starting(), *(Run(rollouters=64, hosts=1).at(float(second)) for second in range(2, 61)))
    with Terminal(80, 24, [*TOP, str(run_dir), "--replay"], cwd=tmp_path, env={"TZ": "UTC"}) as terminal:
        terminal.until("1 rollouters  2 learner")
        terminal.resize(40, 10)
        terminal.until("needs 60×16")
        terminal.resize(200, 50)
        terminal.until("╭─ 6 ledger")
        # However far it has played by now: a step stops it, at its end too, and then it goes back to its beginning.
        terminal.press("Left", *(["<"] * 21))
        terminal.until("  0 s of 59 s")
        terminal.until("no step is trained so far")
        terminal.press(*([">"] * 10))
        terminal.until("30 s of 59 s")
        # No pane stays at another moment.
        terminal.until_gone("no step is trained so far")
        assert "r/0" in terminal.until("trained tokens/s")
        terminal.press_at_once("/", "r", "/", "6", "3", "Enter")
        assert "r/62" not in terminal.until("filter: r/63")
        terminal.press("?")
        terminal.until("the bottleneck")
        terminal.press("Escape")
        terminal.until_gone("the bottleneck")
        terminal.press("q")
        terminal.ended()


COLOUR = re.compile(r"\x1b\[(?:[\d;]*;)?(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")


@needs_tmux
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "vt100"}], ids=["NO_COLOR", "vt100"])
def test_states_without_colour_differ_by_their_glyphs(ended, tmp_path, environment):
    with Terminal(80, 24, [*TOP, str(ended), "--replay"], cwd=tmp_path, env=environment) as terminal:
        text = terminal.until("86% generating")
        assert "▓" in text and "░" in text, "states differ by their glyphs"
        # The cursor is seen, once its table has been drawn.
        assert not COLOUR.search(terminal.until("\x1b[7m", escaped=True))


@needs_tmux
def test_a_dumb_terminal_gets_a_page(ended, tmp_path):
    words = shlex.join([*TOP, str(ended), "--replay"])
    shell = ["sh", "-c", f"{words} > page; echo reported; {words} | tail -1; sleep 60"]
    with Terminal(80, 24, shell, cwd=tmp_path, env={"TERM": "dumb", "TZ": "UTC"}) as terminal:
        terminal.until("the run has begun")
        assert "\x1b" not in (tmp_path / "page").read_text()


@pytest.mark.parametrize("words", [REPLAY, ("--report", "out.html"), ("--explain", "0-7")])
def test_an_unreadable_recording_of_another_user_is_an_error(ended, tmp_path, monkeypatch, capsys, forbid, words):
    closed = ended / ("logs" if words[0] == "--explain" else "monitor")
    closed.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    forbid(closed)
    assert command.main([str(ended), *words]) == 1
    out, err = capsys.readouterr()
    assert not out and err.startswith(f"asyncrl-top: {closed}: ") and "permission denied" in err.lower()
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_reader_that_closes_the_pipe_early_causes_no_error(ended, unbuffered):
    """As head, which goes while it is written: here before."""
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    argv = [*TOP, str(ended), *REPLAY]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, timeout=120, env=environment, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("closed", ["<&-", "<&- 2>&-"])
def test_a_closed_input_prints_the_same_page_as_once(ended, closed):
    def printed(words):
        return subprocess.run(words, shell=True, capture_output=True, timeout=120, check=True).stdout

    words = shlex.join([*TOP, str(ended), "--replay"])
    assert printed(f"{words} {closed}") == printed(f"{words} --once")


def test_a_full_disk_is_reported_once(ended):
    code = """
import io, os, sys
from asyncrl.cli import top
class Full(io.RawIOBase):
    def writable(self): return True
    def fileno(self): return 1
    def write(self, data):
        if os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev: return len(data)
        raise OSError(28, "No space left on device")
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Full(), 1 << 20), encoding="utf-8")
sys.exit(top.main(sys.argv[1:]))
"""
    argv = [sys.executable, "-c", code, str(ended), "--replay", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    said = "asyncrl-top: what is printed cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_report_that_cannot_be_written_prints_one_line(ended, tmp_path, complains, monkeypatch):
    cases = {
        "": ". is a folder; name a file in it",
        "/": "/ is a folder; name a file in it",
        "nowhere/x.html": "nowhere/x.html: there is no folder",
        "pipe": "pipe is no regular file, and is left alone",
    }
    os.mkfifo(tmp_path / "pipe")
    for name, said in cases.items():
        complains(("trial", "--report", name), tmp_path, 2, said)

    def refuse(*words, **more):
        raise PermissionError(13, "Permission denied", str(tmp_path / ".0123.new"))

    monkeypatch.setattr(os, "replace", refuse)
    complains(("trial", "--report", "out.html"), tmp_path, 1, "asyncrl-top: out.html: Permission denied")
    assert not [path for path in tmp_path.iterdir() if path.is_file()]
