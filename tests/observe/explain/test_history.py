"""Histories from real logs: torn, of several attempts, with different clocks, and incomplete."""

import contextlib
import json
from datetime import UTC, datetime

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import UsageError
from asyncrl.observe import logging
from asyncrl.observe.explain.history import explain, read_history, verdict
from asyncrl.observe.group_log import TAKEN, GroupLog

T = 1_760_000_000.0
UID = "0-7"


class Logs:
    """The logs of a run."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        self.attempt = 1

    def write(self, actor, text):
        path = self.run_dir / "logs" / f"attempt_{self.attempt}" / f"{actor.replace('/', '-')}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)

    def line(self, at, actor, event, **facts):
        stamp = datetime.fromtimestamp(T + at, UTC).isoformat().replace("+00:00", "Z")
        self.write(actor, json.dumps({"actor": actor, "event": event, "timestamp": stamp, **facts}) + "\n")

    def leased(self, at, to="rollouter/0", number=1, version=2, attempt=0, uid=UID):
        leases = [[0, 1, 0, False], [number, version, attempt, False]]
        self.line(at, "dataloader/0", "leased", to=to, uids=["0-6", uid], leases=leases)

    def generated(self, at, since, *samples, actor="rollouter/0", lease=1, end="delivered"):
        self.line(at, actor, "generated", uid=UID, lease=lease, since=T + since, end=end, samples=list(samples))

    def taken(self, at, into="buffered", by="rollouter/0"):
        self.line(at, "learner/0", "taken", uid=UID, by=by, into=into)

    def trained(self, at, step=3):
        self.line(at, "learner/0", "trained", uids=["0-1", UID], step=step, version=step - 1)

    def whole(self, skew=0.0, learner=0.0):
        self.leased(0.0)
        events = [
            [0.01, "began", 2],
            [0.5, "aborted", 60],
            [0.6, "resumed", 3],
            [1.0, "finished", 90, "stop", [[2, 0, 60], [3, 60, 90]]],
            [1.1, "scored", 0.5, 0.002],
        ]
        self.generated(1.3 + skew, 0.001 + skew, events)
        self.taken(1.2 + learner)
        self.trained(2.0 + learner)


@pytest.fixture
def logs(tmp_path):
    return Logs(tmp_path)


def whats(run_dir):
    return [happening.what for happening in read_history(run_dir, UID)]


WHOLE = ["leased", "began", "aborted", "resumed", "finished", "scored", "buffered", "delivered", "trained"]


def test_the_history_of_a_group_is_printed_in_order(logs, tmp_path):
    logs.whole()
    assert explain(tmp_path, UID) == (
        f"prompt group {UID}: trained at step 3, on the weights of version 2\n"
        "seconds since 2025-10-09 08:53:20.000000 UTC\n"
        "\n"
        "      +0.000  dataloader/0  leased to rollouter/0 (lease 1, newest version 2)\n"
        "      +0.011  rollouter/0   sample 0: generation began at version 2\n"
        "      +0.501  rollouter/0   sample 0: aborted with 60 tokens\n"
        "      +0.601  rollouter/0   sample 0: resumed at version 3\n"
        "      +1.001  rollouter/0   sample 0: finished with 90 tokens (stop): 60 at version 2, 30 at version 3\n"
        "      +1.101  rollouter/0   sample 0: scored 0.500, which took 2 ms\n"
        "      +1.200  learner/0     taken into the buffer\n"
        "      +1.300  rollouter/0   delivered to the learner\n"
        "      +2.000  learner/0     trained at step 3, on the weights of version 2\n"
    )


def test_the_history_shows_the_turns_of_an_episode(logs, tmp_path):
    logs.leased(0.0)
    events = [
        [0.01, "episode", 0, "episodes/0"],
        [0.2, "asked", 0, 2, 0.1, "root", None, 40, 40],
        [0.3, "aborted", 7, 0],
        [0.4, "resumed", 3, 0],
        [0.5, "answered", 0, 0, 9, "stop", [[2, 0, 7], [3, 7, 9]], ["search", "look"], 0],
        [0.6, "turn reward", 0, 0.25],
        [0.7, "asked", 1, 3, 0.0, "extend", 0, 60, 11],
        [0.8, "answered", 1, 1, 5, "length", [[3, 0, 5]], [], 2],
        [0.9, "failed", "generation: ValueError: no"],
        [1.0, "episode", 1, "episodes/0"],
        [1.1, "asked", 0, 3, 0.02, "fork:edited", 0, 60, 11],
        [1.2, "refused", 1, "the episode is over: it has had its 1 turns (episode.max_turns)"],
        [1.3, "ended", "turns", 1, None, {"tool search": 2.0, "engine": 0.5}],
    ]
    logs.generated(1.4, 0.0, events)
    said = [line.partition("sample 0: ")[2] for line in explain(tmp_path, UID).splitlines() if "sample 0: " in line]
    assert said == [
        "episode began at episodes/0",
        "call 0 (the first): 40 tokens of context, 40 of them new; generation began at version 2 after 100 ms",
        "call 0: aborted with 7 tokens",
        "call 0: resumed at version 3",
        "call 0 gave turn 0: 9 tokens (stop): 7 at version 2, 2 at version 3; it calls search, look",
        "turn 0 is worth 0.250",
        "call 1 (continues turn 0): 60 tokens of context, 11 of them new; generation began at version 3 after 0 s",
        "call 1 gave turn 1: 5 tokens (length): 5 at version 3; 2 calls of tools cannot be read",
        "failed: generation: ValueError: no",
        "episode began at episodes/0, attempt 2",
        "call 0 (forks: a message before an answer of the policy was changed, removed or added): "
        "60 tokens of context, 11 of them new; generation began at version 3 after 20 ms",
        "call 1 was refused: the episode is over: it has had its 1 turns (episode.max_turns)",
        "episode ended (turns) with 1 turns; tool search 2.0 s, engine 500 ms",
    ]


def test_times_are_printed_with_a_unit(logs, tmp_path):
    logs.generated(99.0, 0.0, [[0.1, "scored", 0.5, 0.0004], [5.0, "scored", 0.5, 4.9871], [98.0, "scored", 0.5, 65.2]])
    said = [line.partition("which took ")[2] for line in explain(tmp_path, UID).splitlines() if "scored" in line]
    assert said == ["400 µs", "5.0 s", "1m05s"]


@pytest.mark.parametrize(("skew", "learner"), [(-2.0, 0.0), (0.0, -3.0), (-1.5, -3.5), (0.4, 0.0)])
def test_clocks_that_differ_a_little_do_not_put_effects_before_causes(logs, tmp_path, skew, learner):
    logs.whole(skew, learner)
    found = whats(tmp_path)
    assert sorted(found) == sorted(WHOLE)
    assert found[0] == "leased" and found[-1] == "trained"
    assert found.index("finished") < found.index("buffered")
    assert [what for what in found if what in WHOLE[1:6]] == WHOLE[1:6]


def test_torn_and_foreign_lines_are_skipped(logs, tmp_path):
    logs.write("rollouter/0", '{"actor": "rollouter/0", "event": "generated", "uid": "0-7", "sam\n')
    logs.write("rollouter/0", 'Traceback: "0-7"\n\xff\n')
    logs.line(0.3, "rollouter/0", "generated", uid=UID, lease=9, since=T, end="delivered", samples=[[[0.1, "sang", 3]]])
    for event in ([], ["generation", 0.3]):
        logs.line(0.3, "rollouter/0", "generated", uid=UID, lease=9, since=T, end="delivered", samples=[[event]])
    logs.line(0.3, "dataloader/0", "leased", to="rollouter/0", uids=[UID], leases=[])
    logs.line(0.3, "learner/0", "taken", uid=UID, by="rollouter/7", into="hand")
    logs.line(0.3, "learner/0", "trained", uids="0-7", step=3)
    logs.whole()
    logs.write("learner/0", '{"actor": "learner/0", "event": "trai')
    assert whats(tmp_path) == WHOLE


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_damaged_logs_never_break_the_history(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("run")
    Logs(folder).whole()
    for path in sorted(folder.rglob("*.log")):
        content = path.read_bytes()
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, len(content)))
            content = content[:at] + data.draw(st.binary(max_size=3)) + content[at + data.draw(st.integers(0, 9)) :]
        path.write_bytes(content)
    # If enough is cut out, nothing is known.
    with contextlib.suppress(UsageError):
        assert explain(folder, UID).startswith(f"prompt group {UID}: ")


def test_the_history_shows_a_death_and_the_next_lease(logs, tmp_path):
    # Its reply was lost; of what is said again and again while a group runs the last word counts.
    for at in (0.0, 0.2):
        logs.leased(at, number=4)
    for at in (0.3, 0.4):
        logs.generated(at, 0.001, [[0.1, "began", 2]], lease=4, end="running")
    assert "being generated by rollouter/0" in explain(tmp_path, UID)
    logs.line(0.62, "dataloader/0", "orphaned", uids=[UID], of="rollouter/0")
    logs.line(0.64, "dataloader/0", "settled", uids=[UID], held=False)
    assert verdict(read_history(tmp_path, UID)).startswith("to be generated again")
    logs.leased(0.7, to="rollouter/1", number=1, attempt=1)
    assert "leased to rollouter/1 (lease 1, newest version 2, deaths 1)" in explain(tmp_path, UID)
    assert verdict(read_history(tmp_path, UID)).endswith("nothing is known since")
    logs.generated(1.0, 0.701, [[0.1, "began", 3], [0.2, "finished", 9, "length", [[3, 0, 9]]]], actor="rollouter/1")
    assert whats(tmp_path) == [
        *("leased", "began", "running", "orphaned", "to be leased again"),
        *("leased", "began", "finished", "delivered"),
    ]


def test_a_group_given_up_by_its_rollouter_is_reported_as_given_up(logs, tmp_path):
    logs.leased(0.0)
    events = [[0.1, "began", 2], [0.5, "aborted", 60]]
    logs.generated(0.3, 0.001, events[:1], end="running")
    logs.generated(1.0, 0.001, events, end="given up")
    assert verdict(read_history(tmp_path, UID)) == "given up by rollouter/0; nothing is known since"
    # It was on its way to the learner.
    logs.taken(0.9)
    assert verdict(read_history(tmp_path, UID)) == "in the learner's buffer, not trained so far"
    logs.line(1.2, "dataloader/0", "returned", uids=[UID], by="rollouter/0")
    assert verdict(read_history(tmp_path, UID)) == "to be generated again: returned by rollouter/0"
    logs.leased(1.3, to="rollouter/1", number=2)
    logs.generated(2.0, 1.301, events, actor="rollouter/1", lease=2, end="given up")
    assert verdict(read_history(tmp_path, UID)) == "given up by rollouter/1; nothing is known since"


def test_a_restored_learner_undoes_training_after_its_checkpoint_only(logs, tmp_path):
    logs.line(-5.0, "learner/0", "restored", step=0, uids=[])
    logs.whole()
    logs.line(5.0, "learner/0", "restored", step=3, version=3, uids=[])
    assert whats(tmp_path) == WHOLE
    logs.attempt = 2
    logs.line(9.0, "learner/0", "restored", step=2, version=2, uids=[])
    assert verdict(read_history(tmp_path, UID)).startswith("to be generated again")
    logs.leased(10.0)
    logs.trained(12.0, step=4)
    text = explain(tmp_path, UID)
    assert "attempt 2 of the run:\n" in text
    assert "starts from the checkpoint of step 2: it is not trained any more" in text
    assert text.startswith(f"prompt group {UID}: trained at step 4")
    other = Logs(tmp_path / "other")
    other.leased(0.0)
    other.taken(1.0)
    other.line(9.0, "learner/0", "restored", step=3, version=3, uids=[UID])
    assert whats(other.run_dir) == ["leased", "buffered", "buffered"]
    assert "which holds it in the buffer" in explain(other.run_dir, UID)


def test_the_history_shows_the_reason_of_a_quarantine_and_the_printed_output(logs, tmp_path):
    logs.leased(0.0)
    logs.line(0.4, "reward/0", "printed", uid=UID, text="odd answer")
    logs.generated(
        0.5, 0.1, [[0.1, "began", 2], [0.2, "failed", "scoring: timeout"]], end="delivered as failed: timeout"
    )
    logs.taken(0.6, "quarantined")
    logs.line(0.7, "learner/0", "not trained", uid=UID, reason="scoring failed 3 times: timeout")
    text = explain(tmp_path, UID)
    assert text.startswith(f"prompt group {UID}: quarantined: scoring failed 3 times: timeout\n")
    for piece in ("printed: odd answer", "sample 0: failed: scoring: timeout", "delivered as failed: timeout"):
        assert piece in text


def test_a_prompt_left_out_by_data_rules_is_explained(logs, tmp_path):
    logs.line(0.7, "learner/0", "not trained", uid=UID, reason="over data.max_prompt_tokens", outcome="left out")
    text = explain(tmp_path, UID)
    assert text.startswith(f"prompt group {UID}: left out: over data.max_prompt_tokens\n")


def test_an_unknown_group_is_an_error_with_advice(logs, tmp_path):
    for uid in ("", "../0-7", "a b@0-1"):
        with pytest.raises(UsageError, match="EPOCH-INDEX"):
            explain(tmp_path, uid)
    with pytest.raises(UsageError, match="is it the folder of a run"):
        explain(tmp_path, UID)
    logs.line(0.0, "controller/0", "registered")
    with pytest.raises(UsageError, match=r"log\.level"):
        explain(tmp_path, UID)
    for uid in ("heldout@0-0", "heldout_greedy@50-511", "0-9"):
        logs.leased(0.0, uid=uid)
    for uid, said in (
        (UID, "The first that was is 0-6, the last 0-9"),
        ("heldout@0-7", "The first of heldout that was is heldout@0-0, the last heldout@0-0"),
        ("other@0-7", "Nothing of other was; of training, heldout, heldout_greedy something was"),
    ):
        with pytest.raises(UsageError, match=f"{said}$"):
            explain(tmp_path, uid)
    (tmp_path / "quarantine.jsonl").touch()
    with pytest.raises(UsageError, match=r"the last 0-9; .*/quarantine\.jsonl has the prompts that never were$"):
        explain(tmp_path, UID)


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ("filtered", "filtered: all of its rewards are equal"),
        ("buffered", "in the learner's buffer, not trained so far"),
        ("quarantined", "quarantined"),
        ("evaluation", "with the learner; its round of evaluation is not complete"),
    ],
)
def test_the_learners_log_decides_if_the_rollouter_logs_later(logs, tmp_path, into, said):
    events = [[0.1, "began", 2], [0.3, "finished", 9, "stop", [[2, 0, 9]]], [0.4, "scored", 1.0, 0.002]]
    logs.leased(0.0)
    logs.taken(0.5, into)
    logs.generated(0.501, 0.001, events)
    found = read_history(tmp_path, UID)
    assert found[-1].what == "delivered" and verdict(found) == said
    logs.line(0.6, "dataloader/0", "orphaned", uids=[UID], of="rollouter/0")
    logs.line(0.7, "dataloader/0", "settled", uids=[UID], held=True)
    assert verdict(read_history(tmp_path, UID)) == said
    # Events of an earlier lease do not belong to this one.
    logs.leased(0.8, to="rollouter/1")
    logs.generated(1.5, 0.9, events, actor="rollouter/1")
    assert verdict(read_history(tmp_path, UID)) == "delivered; what the learner did with it is unknown"
    if into == "evaluation":
        logs.line(2.0, "learner/0", "evaluated", uids=[UID], step=5)
        assert verdict(read_history(tmp_path, UID)) == "evaluated, after step 5"


def test_group_events_are_logged_only_at_the_configured_level(monkeypatch):
    written = []
    monkeypatch.setattr(logging, "write_line", written.append)
    group_log = GroupLog("learner/0")
    for level, writes in ((None, False), (10, True), (20, True), (30, False)):
        monkeypatch.setattr(logging, "_level", level)
        written.clear()
        group_log.write(TAKEN, uid=UID, into="buffered")
        assert writes == bool(written)
    monkeypatch.setattr(logging, "_level", 20)
    group_log.write(TAKEN, uid=UID, into="buffered")
    line = json.loads(written[-1])
    assert datetime.fromisoformat(line.pop("timestamp")).tzinfo is not None
    assert line == {"actor": "learner/0", "event": "taken", "level": "info", "uid": UID, "into": "buffered"}
