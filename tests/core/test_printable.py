"""Text of a run for a terminal: nothing that it would obey, and as many cells as were meant."""

import io
import json
import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from top.pictures import Run

from asyncrl.cli import top as command
from asyncrl.core.formatting import json_in_ascii, printable, say
from asyncrl.launcher.common.agent_messages import StateEvent, WarningEvent
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.monitor import Event
from asyncrl.observe.recording import Recorder
from asyncrl.top.detail import detail
from asyncrl.top.draw import lines
from asyncrl.top.draw import text as styled
from asyncrl.top.view import SnapshotView

EVIL = "\x1b]0;PWNED\x07\x1b[2J\x9b2J\x85\x7f\u202emoc\u2066\u2028\ufeff"
WRITTEN = st.text(st.sampled_from("ab 字é\u0301👍\u200d\ufe0f\x1b\x07\x9b\u202e\u2069\t\n\ud800…─"), max_size=40)


def controls(text, keep="\n"):
    """Characters that a terminal would obey or hide."""
    return [each for each in text if unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp") and each not in keep]


@given(WRITTEN | st.text())
def test_printable_text_has_no_control_characters_and_keeps_visible_ones(text):
    assert not controls(printable(text), keep="")
    assert not controls(printable(text, keep="\n"))
    assert printable(printable(text)) == printable(text)
    seen = "".join(each for each in text if not controls(each, keep="") and each.isprintable())
    assert printable(seen) == seen


def test_an_escape_shows_its_code_point():
    assert printable("a\x1b[2J\x9b\u202e\n\U000e0041\ud800") == r"a\x1b[2J\x9b\u202e\n\U000e0041\ud800"
    assert printable("a\u3000b\u00a0c 字") == "a\u3000b\u00a0c 字"


@given(st.text(st.characters(codec="utf-8")))
def test_json_has_the_same_text_in_ascii(text):
    written = json_in_ascii(msgspec.json.encode({"text": text}).decode())
    assert written.isascii() and written.isprintable()
    assert json.loads(written) == {"text": text}


def test_a_character_that_an_encoding_lacks_is_replaced():
    held = io.BytesIO()
    stream = io.TextIOWrapper(held, encoding="ascii")
    say("reward → 字 \x1b", stream)
    stream.flush()
    assert held.getvalue() == b"reward -> \\u5b57 \\x1b\n"


@given(WRITTEN, st.integers(1, 30))
def test_a_line_takes_exactly_the_given_cells(text, width):
    (line,) = lines(styled(text, "dim") + styled("tail"), width)
    assert line.cell_len == cell_len(line.plain) == width
    assert not controls(line.plain, keep="")


@pytest.fixture
def run_dir(tmp_path):
    """A run in which everything that is text is evil."""
    snapshot = Run(rollouters=2).at(40.0)
    view = msgspec.structs.replace(snapshot.run, name=EVIL, reason=EVIL, stalled=EVIL, lost_hosts=[EVIL])
    actors = [msgspec.structs.replace(actor, host=EVIL, state=EVIL, awaiting=EVIL) for actor in snapshot.actors]
    events = [Event(number=1, wall=snapshot.wall, level=EVIL, actor=EVIL, text=EVIL)]
    evil = msgspec.structs.replace(snapshot, run=view, actors=actors, events=events)
    made = tmp_path / "trial"
    made.mkdir()
    (made / "config.json").write_text("{}")
    Recorder(made, 1, 1 << 20).record(evil.wall, msgspec.msgpack.encode(evil))
    logs = made / "logs" / "attempt_1"
    logs.mkdir(parents=True)
    stamp = {"timestamp": "2025-10-09T08:53:20Z", "uid": "0-7"}
    entries = [
        {"actor": "reward/0", "event": "printed", "text": f"{EVIL}\nforged"},
        {"actor": f"reward/1{EVIL}", "event": EVIL, "error": EVIL},
    ]
    text = "".join(json.dumps(line | stamp, ensure_ascii=False) + "\n" for line in entries)
    (logs / "reward-0.log").write_text(text + EVIL + "\n")
    return made


@pytest.mark.parametrize("words", [("--replay", "--once"), ("--replay", "--json"), ("--explain", "0-7")])
def test_control_characters_in_data_of_a_run_are_escaped(run_dir, capsys, words):
    assert command.main([str(run_dir), *words]) == 0
    out, err = capsys.readouterr()
    assert "PWNED" in out and not controls(out) and not controls(err)
    assert not any(line.startswith("forged") for line in out.splitlines())


@pytest.mark.parametrize("words", [(EVIL, "--replay"), ("h:80", "--keys", EVIL), ("--once", EVIL, EVIL)])
def test_control_characters_in_error_messages_are_escaped(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = command.main(list(words))
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code in (1, 2) and not out
    assert "PWNED" in err and not controls(err)


def test_control_characters_in_the_details_of_an_actor_are_escaped(run_dir):
    from asyncrl.top.replay import open_replay

    replay = open_replay(run_dir, lives=False)
    view = SnapshotView(replay.history())
    log = (run_dir / "logs" / "attempt_1" / "reward-0.log").read_text().split("\n")
    for line in lines(detail(view, "reward/0", log), 100):
        assert not controls(line.plain, keep="") and line.cell_len <= 100


@pytest.mark.parametrize("live", [False, True])
def test_control_characters_in_the_output_of_a_launcher_are_escaped(live):
    class Terminal(io.StringIO):
        def isatty(self):
            return live

    out, err = Terminal(), io.StringIO()
    progress = TerminalProgress(out, 4, err)
    progress.show(StateEvent(phase="starting", waiting_for=[EVIL], controller=1, lost_hosts={EVIL: [EVIL]}, leaving=[]))
    progress.show(WarningEvent(text=EVIL))
    progress.say(EVIL)
    shown = out.getvalue().replace("\r\x1b[2K", "")
    assert "PWNED" in shown and not controls(shown) and not controls(err.getvalue())
