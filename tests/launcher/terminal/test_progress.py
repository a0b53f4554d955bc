"""Lines that the launcher shows."""

import io
import json

import pytest

from asyncrl.launcher.terminal.progress import CLEAR_LINE, Progress, describe_eval, describe_step
from asyncrl.launcher.terminal.summary import summarise
from asyncrl.launcher.terms.spec import (
    MetricsEvent,
    MovingEvent,
    NoticeEvent,
    ReadyEvent,
    RestartEvent,
    StacksEvent,
    StateEvent,
    StuckEvent,
)
from asyncrl.telemetry.metrics_line import is_voided, read_metrics


class Terminal(io.StringIO):
    def isatty(self):
        return True


LINE = {
    "kind": "train",
    "step": 3,
    "weights/version": 2,
    "reward/mean": 0.5,
    "staleness/token_mean": 0.75,
    "rollout/tokens_per_s": 1234.5,
    "time/step_s": 1.0,
}

KINDS = ("train", "update", "eval")
TRAIN = {"kind": "train"}


def test_a_step_in_a_few_words():
    assert describe_step(LINE, 10) == "step 3/10  version 2  reward 0.500  staleness 0.75  1.2k tokens/s  1.0 s"
    assert describe_step({"step": 3, "reward/mean": None}, 10) == "step 3/10"


def test_warm_steps_are_told_as_they_go():
    progress = Progress(out := io.StringIO(), 10)
    line = {"kind": "warm", "step": 0, "sft/warm_steps": 3, "sft/warm_steps_of": 20, "loss/sft": 1.5}
    progress.show(StateEvent(phase="running"))
    progress.show(MetricsEvent(line=line | {"sft/tokens": 1200, "sft/epochs": 0.25, "time/train_s": 1.0}))
    progress.show(StateEvent(phase="running"))
    progress.show(MetricsEvent(line={"kind": "warm", "step": 0}))
    warm = "warm step 3/20  loss 1.500  1.2k tokens  epoch 0.25  1.0 s"
    assert out.getvalue().splitlines() == ["running", warm, "warm step ?"]
    assert progress.step == 0


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"weights/version": 3, "eval/gsm/version_min": 2}, "versions 2 to 3  eval/gsm 0.250"),
        ({"weights/version": 3, "eval/gsm/version_min": 3}, "version 3  eval/gsm 0.250"),
        ({}, "step 4  eval/gsm 0.250"),
    ],
)
def test_an_evaluation_is_told_by_the_versions_that_it_sampled(versions, said):
    line = {"kind": "eval", "step": 4, "eval/gsm/mean": 0.25, "eval/gsm/prompts": 8} | versions
    assert describe_eval(line) == said


@pytest.mark.parametrize(
    ("heard", "first", "told"),
    [
        (3, 3, "from the checkpoint of step 2; step 3 is trained again"),
        (9, 6, "from the checkpoint of step 5; steps 6 to 9 are trained again"),
        (9, 10, "from the checkpoint of step 9; no step is trained again"),
        (3, 1, "from the initial weights; steps 1 to 3 are trained again"),
    ],
)
def test_a_learners_next_step_tells_how_long_it_took_and_what_it_goes_on_from(heard, first, told):
    out, now = io.StringIO(), [100.0]
    progress = Progress(out, steps=10, now=lambda: now[0])
    progress.show(MetricsEvent(line=LINE | {"start": 1, "step": heard}))
    progress.show(RestartEvent(name="learner/1", reason="killed by SIGKILL", after_s=0.5))
    now[0] = 103.0
    progress.show(RestartEvent(name="learner/0", reason="killed by SIGKILL", after_s=0.5))
    progress.show(MetricsEvent(line=LINE | {"start": 1, "step": heard}))
    assert "goes on" not in out.getvalue()
    now[0] = 106.0
    for step in (first, first + 1):
        progress.show(MetricsEvent(line=LINE | {"start": 2, "step": step}))
    said = [line for line in out.getvalue().splitlines() if "goes on" in line]
    assert said == [f"training goes on: step {first} 6.5 s after learner/1 died, {told}"]


def test_the_return_of_an_actor_is_told_once():
    out, now = io.StringIO(), [0.0]
    progress = Progress(out, steps=10, now=lambda: now[0])
    progress.show(StateEvent(phase="running", controller=7))
    # As of everybody that has ever been started again, when a controller is new.
    progress.show(ReadyEvent(name="rollouter/0"))
    for name in ("rollouter/1", "controller/0"):
        progress.show(RestartEvent(name=name, reason="killed by SIGKILL", after_s=0.5))
    now[0] = 2.0
    progress.show(StateEvent(phase="running", controller=7))
    progress.show(StateEvent(phase="running", controller=9))
    for _ in range(2):
        progress.show(ReadyEvent(name="rollouter/1"))
    assert [line for line in out.getvalue().splitlines() if "ready" in line] == [
        "controller/0 is ready again, 2.5 s after it died",
        "rollouter/1 is ready again, 2.5 s after it died",
    ]


@pytest.mark.parametrize("by", ["a later notice", "the end of its actor", "the end of the run"])
def test_the_line_says_what_the_run_waits_for_as_long_as_it_does(by):
    out, err = Terminal(), io.StringIO()
    progress = Progress(out, 10, err, now=lambda: 0.0)
    progress.show(MetricsEvent(line={"kind": "train", "step": 3}))
    said = {"actor": "learner/0", "key": "publish", "text": "the disk is full"}
    progress.show(NoticeEvent(**said, meanwhile="Free some", waits_for="room on /disk"))
    shown = out.getvalue().split(CLEAR_LINE)
    assert shown[-1] == "waiting for room on /disk  step 3/10  elapsed 0:00"
    progress.show(MetricsEvent(line={"kind": "train", "step": 4}))
    shown = out.getvalue().split(CLEAR_LINE)
    assert shown[-1] == "waiting for room on /disk  step 4/10  elapsed 0:00  left 0:00"
    match by:
        case "a later notice":
            progress.show(NoticeEvent(**said | {"text": "it has room"}))
        case "the end of its actor":
            progress.show(RestartEvent(name="learner/0", reason="killed by SIGKILL"))
        case "the end of the run":
            progress.show(StateEvent(phase="draining"))
    assert "waiting" not in out.getvalue().split(CLEAR_LINE)[-1]
    assert err.getvalue().splitlines()[0] == "learner/0: the disk is full. Free some"


def test_plain_lines():
    out, err = io.StringIO(), io.StringIO()
    progress = Progress(out, 10, err, now=lambda: 0.0)
    names = [f"rollouter/{i}" for i in range(8)]
    for left in range(8, -1, -1):
        progress.show(StateEvent(phase="starting", waiting_for=names[:left]))
    progress.show(StateEvent(phase="running"))
    progress.show(StateEvent(phase="running"))
    progress.show(MetricsEvent(line=LINE))
    progress.show(StateEvent(phase="running"))
    progress.show(RestartEvent(name="rollouter/1", reason="killed by SIGKILL"))
    progress.show(MetricsEvent(line={"kind": "eval", "step": 3, "eval/math/mean": 0.25}))
    progress.show(StateEvent(phase="draining"))
    progress.end()
    assert out.getvalue().splitlines() == [
        "starting: waiting for rollouter/0, rollouter/1, rollouter/2, rollouter/3 and 4 more",
        "starting: waiting for rollouter/0, rollouter/1, rollouter/2, rollouter/3",
        "starting: waiting for rollouter/0, rollouter/1",
        "starting: waiting for rollouter/0",
        "starting",
        "running",
        describe_step(LINE, 10, "elapsed 0:00"),
        "step 3  eval/math 0.250",
        "draining: ending the actors in order",
    ]
    assert err.getvalue() == "rollouter/1 died (killed by SIGKILL) and is started again\n"


def test_a_step_line_tells_what_was_not_trained_when_that_moves():
    out = io.StringIO()
    progress = Progress(out, steps=10, now=lambda: 0.0)
    for step, counts in enumerate([(0, 0, 3), (3, 0, 3), (3, 1, 3), (3, 1, 9)], 1):
        told = zip(("ledger/filtered", "ledger/quarantined", "rollout/failed_attempts"), counts, strict=True)
        progress.show(MetricsEvent(line={"kind": "train", "step": step} | dict(told)))
    assert out.getvalue().splitlines() == [
        "step 1/10  elapsed 0:00  failed attempts 3 (+3)",
        "step 2/10  elapsed 0:00  left 0:00  filtered 3 (+3)",
        "step 3/10  elapsed 0:00  left 0:00  quarantined 1 (+1)",
        "step 4/10  elapsed 0:00  left 0:00  failed attempts 9 (+6)",
    ]


def test_notices_go_to_the_error_output_and_stand_in_the_summary():
    out, err, now = io.StringIO(), io.StringIO(), [0.0]
    progress = Progress(out, 10, err, now=lambda: now[0])
    for at, count in [(0.0, 1), (1.0, 5), (20.0, 9), (21.0, 10), (40.0, 11)]:
        now[0] = at
        progress.show(NoticeEvent(actor="reward/0", key="failed", text="KeyError at mine.py:3", count=count))
    assert out.getvalue() == ""
    assert err.getvalue().splitlines() == [
        "reward/0: KeyError at mine.py:3",
        "reward/0: KeyError at mine.py:3 (9 times)",
    ]
    assert progress.notices.summary() == ["reward/0: KeyError at mine.py:3 (11 times)"]


AWAY = {"b (agent/2)": ["rollouter/1", "rollouter/2"]}
MORE = AWAY | {"c (agent/3)": ["reward/0"]}
LOST_B = "host b (agent/2) is lost: nothing is heard of it; dead with it: rollouter/1, rollouter/2"
LOST_C = "host c (agent/3) is lost: nothing is heard of it; dead with it: reward/0"
BACK_B = "host b (agent/2) is back; fenced, and started again there: rollouter/1, rollouter/2"
LEFT_B = "host b (agent/2) leaves the run, which goes on without: rollouter/1, rollouter/2"


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([(7, {}), (7, AWAY), (7, AWAY), (7, {}), (7, {})], [LOST_B, BACK_B]),
        ([(7, AWAY), (7, MORE), (7, {"c (agent/3)": ["reward/0"]})], [LOST_B, LOST_C, BACK_B]),
        # A successor of the controller knows of none at first, which does not say that they are back.
        ([(7, AWAY), (9, {}), (9, {})], [LOST_B]),
        ([(7, AWAY), (9, {}), (9, AWAY), (9, {})], [LOST_B, LOST_B, BACK_B]),
        # One that leaves is not said to be back.
        ([(7, MORE), (7, {"c (agent/3)": ["reward/0"]}, *AWAY["b (agent/2)"], "agent/2")], [LOST_B, LOST_C, LEFT_B]),
    ],
)
def test_a_host_that_is_lost_or_back_is_told_once(states, told):
    out, err, both = io.StringIO(), io.StringIO(), []
    progress = Progress(out, 10, err)
    for controller, lost, *leaving in states:
        progress.show(StateEvent(phase="running", lost_hosts=lost, controller=controller, leaving=leaving))
        for stream in (err, out):
            both += stream.getvalue().splitlines()
            stream.seek(0)
            stream.truncate()
    assert [line for line in both if line != "running"] == told


def test_a_terminal_has_one_live_line():
    out = Terminal()
    progress = Progress(out, steps=10, now=lambda: 0.0)
    progress.show(StateEvent(phase="running"))
    progress.show(MetricsEvent(line=LINE))
    progress.say("something that stays")
    progress.end()
    shown = out.getvalue().split(CLEAR_LINE)
    live = shown[2]
    assert describe_step(LINE, 10, "elapsed 0:00").startswith(live)
    assert shown == ["", "running", live, f"something that stays\n{live}", ""]


def test_a_reader_that_is_gone_ends_nothing(tmp_path):
    class Gone(io.FileIO):
        def write(self, _text):
            raise BrokenPipeError

        def isatty(self):
            return False

    path = tmp_path / "out"
    path.touch()
    with Gone(path, "w") as out:
        Progress(out, steps=1).say("hello")


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "monitor").mkdir()
    return tmp_path


def test_the_summary(run_dir):
    lines = [
        {"kind": "eval", "step": 0, "eval/math/mean": 0.25, "eval/math/length_mean": 9},
        {"kind": "train", "step": 1, "reward/mean": 0.1},
        {"kind": "train", "step": 2, "reward/mean": 0.4},
        {"kind": "eval", "step": 2, "eval/math/mean": 0.75},
    ]
    assert summarise(lines, run_dir, run_dir / "logs", steps=4) == [
        "steps       2 of 4",
        "reward      0.100 → 0.400 (mean of step 1 and of step 2)",
        "eval/math   0.250 → 0.750",
        f"run folder  {run_dir}",
        f"model       {run_dir / 'export'}",
        f"logs        {run_dir / 'logs'}",
        f"replay      asyncrl-top {run_dir} --replay, or --report FILE.html",
    ]


@pytest.mark.parametrize(
    ("rewards", "row"),
    [
        ([0.5], "0.500 (mean of step 1)"),
        ([None, 0.25, 0.5, 0.75], "0.250 → 0.750 (mean of step 2 and of step 4)"),
        ([0.0, 1.0, *[9.0] * 16, 1.0, 2.0], "0.500 → 1.500 (mean of steps 1 to 2 and of steps 19 to 20)"),
    ],
)
def test_the_reward_at_both_ends_of_a_run(run_dir, rewards, row):
    lines = [{"kind": "train", "step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    rows = summarise(lines, run_dir, run_dir / "logs", steps=20)
    assert rows[1] == f"reward      {row}"


def test_the_summary_tells_what_was_not_trained_and_where_that_stands(run_dir):
    (run_dir / "quarantine.jsonl").touch()
    quarantined = {"ledger/filtered": 0, "ledger/quarantined": 2}
    lines = [
        {"kind": "train", "step": step, "start": start, "rollout/dropped_trajectories": dropped} | quarantined
        for step, start, dropped in [(1, 1, 3), (2, 1, 5), (3, 2, 1), (4, 2, 2)]
    ]
    rows = summarise(lines, run_dir, run_dir / "logs", steps=4)
    assert rows[1] == "not trained  groups quarantined 2, trajectories dropped 7"
    told = f"quarantine   {run_dir / 'quarantine.jsonl'}; asyncrl-top {run_dir} --explain UID"
    assert [row for row in rows if row.startswith(told)]


def test_the_summary_of_a_run_without_a_step_tells_what_was_not_trained_and_who_was_started_again(run_dir):
    figures = {
        "ledger/filtered": 28.0,
        "ledger/quarantined": 13.0,
        "rollout/failed_attempts": 40.0,
        "learner/step": 0.0,
    }
    progress = Progress(io.StringIO(), steps=4)
    for name in ("rollouter/1", "learner/0", "rollouter/1"):
        progress.show(RestartEvent(name=name, reason="killed by SIGKILL"))
    rows = summarise([], run_dir, run_dir / "logs", steps=4, figures=figures, restarts=progress.restarts)
    assert [row.split(maxsplit=row.startswith("not ") + 1)[-1] for row in rows[:3]] == [
        "0 of 4",
        "groups filtered 28, groups quarantined 13, failed attempts 40",
        "learner/0 1, rollouter/1 2",
    ]


def test_the_summary_tells_what_was_trained_and_what_is_complete(run_dir):
    """Lines of metrics may be lost, and a folder of checkpoints may hold none that is whole."""
    (run_dir / "checkpoints").mkdir()
    rows = summarise([{"kind": "train", "step": 2}], run_dir, run_dir / "logs", steps=4, trained=3)
    assert rows[0].split(maxsplit=1) == ["steps", "3 of 4"]
    assert not [row for row in rows if row.startswith("checkpoint")]
    newest = run_dir / "checkpoints" / "v00000003"
    newest.mkdir()
    rows = summarise([], run_dir, run_dir / "logs", steps=4, checkpoint=newest)
    assert [row.split(maxsplit=1)[1] for row in rows if row.startswith("checkpoint")] == [str(newest)]


def test_a_torn_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]


def test_what_a_restored_learner_does_again_counts_once(tmp_path):
    """Its first line voids what was written of that step and later ones, evaluations included."""
    lines = [{"kind": "train", "step": step, "start": 1, "reward/mean": 0.1} for step in range(1, 6)]
    lines.insert(3, {"kind": "eval", "step": 4, "start": 1, "eval/x/mean": 0.2})
    # The evaluation at the step that is being written may come first.
    lines += [{"kind": "eval", "step": 4, "start": 2, "eval/x/mean": 0.9}]
    lines += [{"kind": "train", "step": step, "start": 2, "reward/mean": 0.5} for step in (4, 5)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    seen = [(line["kind"], line["step"], line["start"]) for line in read_metrics(path)]
    assert seen == [
        *(("train", step, 1) for step in (1, 2, 3)),
        ("eval", 4, 2),
        ("train", 4, 2),
        ("train", 5, 2),
    ]
    assert [line["step"] for line in read_metrics(path, ("eval",))] == [4]


@pytest.mark.parametrize(
    ("line", "by", "voided"),
    [
        *(({"kind": kind, "step": 5, "start": 1}, TRAIN | {"step": 5, "start": 2}, True) for kind in KINDS),
        *(({"kind": kind, "step": 6, "start": 1}, TRAIN | {"step": 5, "start": 3}, True) for kind in KINDS),
        *(({"kind": kind, "step": 4, "start": 1}, TRAIN | {"step": 5, "start": 2}, False) for kind in KINDS),
        *(({"kind": kind, "step": 6, "start": 2}, TRAIN | {"step": 5, "start": 2}, False) for kind in KINDS),
        *(({"kind": kind, "step": 6, "start": 2}, TRAIN | {"step": 5, "start": 1}, False) for kind in KINDS),
        # The evaluation at a step may be told before its line.
        *((TRAIN | {"step": 5, "start": 1}, {"kind": kind, "step": 5, "start": 2}, False) for kind in KINDS[1:]),
        ({"step": 1}, TRAIN | {"step": 1}, False),
    ],
)
def test_what_a_step_voids(line, by, voided):
    assert is_voided(line, by) == voided


STUCK = [
    StuckEvent(name="reward/0", report="nothing has moved for 301 s, because of reward/0"),
    StacksEvent(name="reward/0", lines=["Thread 1", "  in score"], more=70, log="/logs/agent-0.log"),
    MovingEvent(),
]
TOLD = """watchdog: nothing has moved for 301 s, because of reward/0
stacks of reward/0:
  Thread 1
    in score
  ... 70 more lines in /logs/agent-0.log
watchdog: the run moves again
"""


def test_who_holds_up_the_run_is_told_on_the_error_output_and_the_live_line_makes_way():
    out, err = io.StringIO(), io.StringIO()
    progress = Progress(out, 10, err)
    for event in STUCK:
        progress.show(event)
    assert (out.getvalue(), err.getvalue()) == ("", TOLD)
    both = Terminal()
    progress = Progress(both, 10, both)
    progress.show(MetricsEvent(line=LINE))
    live = both.getvalue()
    progress.show(STUCK[2])
    assert both.getvalue()[len(live) :] == f"{CLEAR_LINE}watchdog: the run moves again\n{live}"
