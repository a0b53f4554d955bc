"""The launcher's output: lines, one live line, notices, the pace, the summary."""

import io
import json
import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.launcher.common.agent_messages import (
    MetricsEvent,
    NoticeEvent,
    ReadyEvent,
    RestartEvent,
    StateEvent,
    WarningEvent,
)
from asyncrl.launcher.terminal.metrics_words import describe_eval, describe_step
from asyncrl.launcher.terminal.progress import (
    CLEAR_LINE,
    NOTICE_S,
    PACE_STEPS,
    RunPace,
    ShownNotices,
    TerminalProgress,
    clock_words,
)
from asyncrl.launcher.terminal.summary import summarise
from asyncrl.observe.metrics_line import is_voided, read_metrics


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
TRAIN = {"kind": "train"}


@pytest.fixture
def show():
    """Shows events at its ``now``, and has what was shown as ``out`` and ``err``."""
    made = SimpleNamespace(now=0.0, text=io.StringIO(), errors=io.StringIO())
    made.progress = TerminalProgress(made.text, 10, made.errors, now=lambda: made.now)
    made.show, made.step = made.progress.show, lambda **line: made.show(MetricsEvent(line=TRAIN | line))
    made.dies = lambda name: made.show(RestartEvent(name=name, reason="killed by SIGKILL", after_s=0.5))
    made.out = lambda having="": [line for line in made.text.getvalue().splitlines() if having in line]
    made.err = lambda: made.errors.getvalue().splitlines()
    return made


# --- lines ---


def test_steps_and_evaluations_are_described_in_one_line():
    assert describe_step(LINE, 10) == "step 3/10  version 2  reward 0.500  staleness 0.75  1.2k tokens/s  1.0 s"
    assert describe_step({"step": 3, "reward/mean": None}, 10) == "step 3/10"
    for versions, said in (
        ({"weights/version": 3, "eval/gsm/version_min": 2}, "versions 2 to 3  eval/gsm 0.250"),
        ({"weights/version": 3, "eval/gsm/version_min": 3}, "version 3  eval/gsm 0.250"),
        ({}, "step 4  eval/gsm 0.250"),
    ):
        line = {"kind": "eval", "step": 4, "eval/gsm/mean": 0.25, "eval/gsm/prompts": 8} | versions
        assert describe_eval(line) == said
    more = {"eval/gsm/pass_at/10": 0.5, "eval/gsm/pass_at/2": 0.3, "eval/gsm/pass_at/1": 0.2, "eval/gsm/pass_at_k": 0.5}
    more |= {"eval/gsm/length_mean": 34.2, "eval/gsm/truncated_fraction": 0.875, "eval/gsm/component/mean": 0.9}
    expected = "eval/gsm 0.250  pass@1 0.200  pass@10 0.500  34 tokens  cut 88%  mean 0.900"
    assert describe_eval(line | more) == f"step 4  {expected}"


def test_a_step_line_shows_a_high_share_of_cut_responses():
    assert "cut" not in describe_step(LINE | {"rollout/truncated_fraction": 0.49}, 10)
    assert "reward 0.500  cut 88%" in describe_step(LINE | {"rollout/truncated_fraction": 0.875}, 10)
    assert "1.0 s  GPU wait 250 ms" in describe_step(LINE | {"time/take_gpu_s": 0.25}, 10)
    assert "GPU" not in describe_step(LINE | {"time/take_gpu_s": 0.0}, 10)


def test_plain_lines(show):
    names = [f"rollouter/{i}" for i in range(8)]
    for left in range(8, -1, -1):
        show.show(StateEvent(phase="starting", waiting_for=names[:left]))
    warm = {"kind": "warm", "step": 0, "sft/warm_steps": 3, "sft/warm_steps_of": 20, "loss/sft": 1.5}
    for event in (
        StateEvent(phase="running"),
        MetricsEvent(line=warm | {"sft/tokens": 1200, "sft/epochs": 0.25, "time/train_s": 1.0}),
        StateEvent(phase="running"),
        MetricsEvent(line=LINE),
        RestartEvent(name="rollouter/1", reason="killed by SIGKILL"),
        WarningEvent(text="watchdog: reward/0 has not been heard of for 61 s (it was ready)"),
        MetricsEvent(line={"kind": "eval", "step": 3, "eval/math/mean": 0.25}),
        StateEvent(phase="draining"),
    ):
        show.show(event)
    show.progress.end()
    assert show.out() == [
        "starting: waiting for rollouter/0, rollouter/1, rollouter/2, rollouter/3 and 4 more",
        "starting: waiting for rollouter/0, rollouter/1, rollouter/2, rollouter/3",
        "starting: waiting for rollouter/0, rollouter/1",
        "starting: waiting for rollouter/0",
        "starting",
        "running",
        "warm step 3/20  loss 1.500  1.2k tokens  epoch 0.25  1.0 s",
        describe_step(LINE, 10, "elapsed 0:00"),
        "step 3  eval/math 0.250",
        "draining: ending the actors in order",
    ]
    assert show.err() == [
        "rollouter/1 died (killed by SIGKILL) and is started again",
        "watchdog: reward/0 has not been heard of for 61 s (it was ready)",
    ]


def test_a_start_shows_each_stage_of_the_last_actors(show):
    many = [f"rollouter/{i} (engine)" for i in range(8)]
    for names in (many, many[:2], ["rollouter/0 (engine)", "learner/0 (model)"], ["learner/0 (checkpoint)"]):
        for _ in range(2):
            show.show(StateEvent(phase="starting", waiting_for=names))
    show.show(StateEvent(phase="starting", waiting_for=["learner/0"]))
    assert show.out() == [
        "starting: waiting for rollouter/0 (engine), rollouter/1 (engine), rollouter/2 (engine), rollouter/3 (engine) "
        "and 4 more",
        "starting: waiting for rollouter/0 (engine), rollouter/1 (engine)",
        "starting: waiting for learner/0 (checkpoint)",
        "starting: waiting for learner/0",
    ]


def test_a_step_line_shows_untrained_groups_when_their_count_changes(show):
    for step, counts in enumerate([(0, 0, 3, 0), (3, 0, 3, 0), (3, 1, 3, 0), (3, 1, 9, 0), (3, 1, 9, 2)], 1):
        names = ("ledger/filtered", "ledger/quarantined", "rollout/failed_attempts", "ledger/left_out")
        show.step(step=step, **dict(zip(names, counts, strict=True)))
    assert [line.rpartition(":00  ")[2] for line in show.out()] == [
        "failed attempts 3 (+3)",
        "filtered 3 (+3)",
        "quarantined 1 (+1)",
        "failed attempts 9 (+6)",
        "left out 2 (+2)",
    ]


@pytest.mark.parametrize(
    ("heard", "first", "reported"),
    [
        (3, 3, "from the checkpoint of step 2; step 3 is trained again"),
        (9, 6, "from the checkpoint of step 5; steps 6 to 9 are trained again"),
        (9, 10, "from the checkpoint of step 9; no step is trained again"),
        (3, 1, "from the initial weights; steps 1 to 3 are trained again"),
    ],
)
def test_the_first_step_after_a_restart_of_the_learner_shows_its_time_and_start(show, heard, first, reported):
    show.now = 100.0
    show.step(start=1, step=heard)
    show.dies("learner/1")
    show.now = 103.0
    show.dies("learner/0")
    show.step(start=1, step=heard)
    assert show.out("continues") == []
    show.now = 106.0
    for step in (first, first + 1):
        show.step(start=2, step=step)
    assert show.out("continues") == [f"training continues: step {first} 6.5 s after learner/1 died, {reported}"]


def test_the_return_of_an_actor_is_printed_once(show):
    show.show(StateEvent(phase="running", controller=7))
    # A new controller reports every actor that was ever restarted.
    show.show(ReadyEvent(name="rollouter/0"))
    for name in ("rollouter/1", "controller/0"):
        show.dies(name)
    show.now = 2.0
    for controller in (7, 9):
        show.show(StateEvent(phase="running", controller=controller))
    for _ in range(2):
        show.show(ReadyEvent(name="rollouter/1"))
    reported = [f"{name} is ready again, 2.5 s after it died" for name in ("controller/0", "rollouter/1")]
    assert show.out("ready") == reported


AWAY = {"b (agent/2)": ["rollouter/1", "rollouter/2"]}
ONLY_C = {"c (agent/3)": ["reward/0"]}
MORE = AWAY | ONLY_C
LOST_B = "host b (agent/2) is lost: nothing is heard of it; dead with it: rollouter/1, rollouter/2"
LOST_C = "host c (agent/3) is lost: nothing is heard of it; dead with it: reward/0"
BACK_B = "host b (agent/2) is back; fenced, and started again there: rollouter/1, rollouter/2"
LEFT_B = "host b (agent/2) leaves the run, which continues without: rollouter/1, rollouter/2"


@pytest.mark.parametrize(
    ("states", "reported"),
    [
        ([(7, AWAY), (7, MORE), (7, MORE), (7, ONLY_C)], [LOST_B, LOST_C, BACK_B]),
        # A successor of the controller knows of none at first, which does not say that they are back.
        ([(7, AWAY), (9, {}), (9, {})], [LOST_B]),
        ([(7, AWAY), (9, {}), (9, AWAY), (9, {})], [LOST_B, LOST_B, BACK_B]),
        # One that leaves is not said to be back.
        ([(7, MORE), (7, ONLY_C, *AWAY["b (agent/2)"], "agent/2")], [LOST_B, LOST_C, LEFT_B]),
    ],
)
def test_the_loss_and_return_of_a_host_are_printed_once(states, reported):
    both = io.StringIO()
    progress = TerminalProgress(both, 10, both)
    for controller, lost, *leaving in states:
        progress.show(StateEvent(phase="running", lost_hosts=lost, controller=controller, leaving=leaving))
    assert [line for line in both.getvalue().splitlines() if line != "running"] == reported


# --- the live line ---


def test_a_terminal_has_one_live_line_below_the_permanent_lines():
    both = Terminal()
    progress = TerminalProgress(both, 10, both, now=lambda: 0.0)
    progress.show(StateEvent(phase="running"))
    progress.show(MetricsEvent(line=LINE))
    progress.say("something that stays")
    progress.show(WarningEvent(text="watchdog: it is silent"))
    progress.end()
    *shown, end = both.getvalue().split(CLEAR_LINE)
    live = shown[2]
    assert describe_step(LINE, 10, "elapsed 0:00").startswith(live)
    stays = [f"something that stays\n{live}", "watchdog: it is silent\n", live]
    assert (shown, end) == (["", "running", live, *stays], "")


@pytest.mark.parametrize("by", ["a later state", "the end of the run"])
def test_the_live_line_shows_the_current_wait_of_the_run(by):
    out, err = Terminal(), io.StringIO()
    progress = TerminalProgress(out, 10, err, now=lambda: 0.0)
    progress.show(MetricsEvent(line=TRAIN | {"step": 3}))
    said = {"actor": "learner/0", "key": "publish", "text": "the disk is full"}
    progress.show(StateEvent(phase="running", waits=["room on /disk"]))
    progress.show(NoticeEvent(**said, meanwhile="Free some"))
    for step, rest in ((3, ""), (4, "  left 0:00")):
        progress.show(MetricsEvent(line=TRAIN | {"step": step}))
        shown = out.getvalue().split(CLEAR_LINE)
        assert shown[-1] == f"waiting for room on /disk  step {step}/10  elapsed 0:00{rest}"
    progress.show(StateEvent(phase="running" if by == "a later state" else "draining"))
    assert "waiting" not in out.getvalue().split(CLEAR_LINE)[-1]
    assert err.getvalue().splitlines()[0] == "learner/0: the disk is full. Free some"


def test_a_late_notice_of_a_dead_actor_does_not_change_the_live_line():
    """The agent reports the restart at once; the notice takes the longer way, through the controller."""
    out = Terminal()
    progress = TerminalProgress(out, 10, io.StringIO(), now=lambda: 0.0)
    progress.show(RestartEvent(name="learner/0", reason="exit code 1", incarnation=3))
    said = {"actor": "learner/0", "key": "publish", "text": "the disk is full"}
    progress.show(NoticeEvent(**said, incarnation=3))
    progress.show(MetricsEvent(line=LINE))
    assert "waiting" not in out.getvalue().split(CLEAR_LINE)[-1]
    before = "learner/0 (before it was started again): the disk is full"
    assert progress.notices.summary() == [before]
    progress.show(NoticeEvent(**said, incarnation=4))
    progress.show(NoticeEvent(**said, incarnation=3))
    assert progress.notices.summary() == ["learner/0: the disk is full"]


# --- notices ---


def test_a_notice_is_printed_again_for_a_new_text_or_actor_and_without_advice_for_a_count(show):
    for at, notice in (
        (0.0, {"text": "f raised", "meanwhile": "Mend it", "of": "3 calls"}),
        (0.0, {"actor": "reward/1", "text": "f raised"}),
        (NOTICE_S / 2, {"text": "worse"}),
        (NOTICE_S, {"text": "worst"}),
        (2 * NOTICE_S, {"text": "worst", "count": 177, "of": "279 calls"}),
    ):
        show.now = at
        show.show(NoticeEvent(**{"actor": "reward/0", "key": "k", "count": 1} | notice))
    last = "reward/0: worst (177 of 279 calls)"
    assert show.err() == ["reward/0: f raised. Mend it", "reward/1: f raised", "reward/0: worst", last]
    assert show.out() == [] and show.progress.notices.summary() == [last, "reward/1: f raised"]


def test_counts_of_a_restarted_actor_begin_at_zero():
    notices = ShownNotices()
    first, second = ({"actor": "reward/0", "key": "k", "text": "bad", "incarnation": number} for number in (1, 2))
    assert notices.take(NoticeEvent(**first, count=64), 0.0) == "reward/0: bad (64 times)"
    assert notices.take(NoticeEvent(**second, count=1), NOTICE_S) == ""
    assert notices.take(NoticeEvent(**second, count=2), 2 * NOTICE_S) == "reward/0: bad (2 times)"


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 3)), min_size=1))
def test_counts_are_printed_at_intervals_and_the_summary_has_the_last(events):
    notices, now, count, shown_at = ShownNotices(), 0.0, 0, []
    for wait, more in events:
        now, count = now + wait, count + more
        if notices.take(NoticeEvent(actor="reward/0", key="k", text="bad", count=count), now):
            shown_at.append(now)
    assert all(b - a >= NOTICE_S for a, b in zip(shown_at, shown_at[1:], strict=False))
    assert shown_at[0] == events[0][0]
    assert notices.summary() == [f"reward/0: bad ({count} times)" if count > 1 else "reward/0: bad"]


# --- the pace ---


@pytest.mark.parametrize(
    ("heard", "now", "reported"),
    [
        # The start took a minute, which counts in no step.
        ([(1, 60.0)], 65.0, "elapsed 1:05"),
        ([(1, 60.0), (3, 64.0)], 64.0, "elapsed 1:04  left 3:14"),
        # Back to a checkpoint: the mean starts again.
        ([(1, 0.0), (2, 50.0), (1, 60.0), (2, 61.0)], 61.0, "elapsed 1:01  left 1:38"),
        ([(99, 60.0), (100, 62.0)], 62.0, "elapsed 1:02"),
        # Only the last steps count.
        ([(1, 0.0), *((2 + step, 500.0 + step) for step in range(PACE_STEPS + 1))], 520.0, "elapsed 8:40  left 1:18"),
    ],
)
def test_the_step_line_shows_elapsed_and_remaining_time(heard, now, reported):
    pace = RunPace(100, 0.0)
    for step, at in heard:
        pace.heard(step, at)
    assert pace.describe(now) == reported


def test_durations_are_printed_with_units():
    words = {59.6: "1:00", 3599: "59:59", 3600: "1:00:00", 86399: "23:59:59", 90000: "1 d 01:00"}
    assert {seconds: clock_words(seconds) for seconds in words} == words


# --- the summary ---


@pytest.fixture
def summary(tmp_path):
    """Rows by their first words, in order, of a run folder with an export."""
    (tmp_path / "config.json").touch()
    for name in ("logs", "export", "monitor"):
        (tmp_path / name).mkdir()

    def summarised(lines, **options):
        rows = summarise(lines, tmp_path, tmp_path / "logs", **{"steps": 4} | options)
        return dict(map(str.strip, row.split("  ", 1)) for row in rows)

    return summarised


def test_the_summary(summary, tmp_path):
    lines = [
        {"kind": "eval", "step": 0, "eval/math/mean": 0.25, "eval/math/length_mean": 9},
        {"kind": "train", "step": 1, "reward/mean": 0.1},
        {"kind": "train", "step": 2, "reward/mean": 0.4},
        {"kind": "eval", "step": 2, "eval/math/mean": 0.75},
    ]
    assert list(summary(lines).items()) == [
        ("steps", "2 of 4"),
        ("reward", "0.100 → 0.400 (mean of step 1 and of step 2)"),
        ("eval/math", "0.250 → 0.750"),
        ("run folder", str(tmp_path)),
        ("model", str(tmp_path / "export")),
        ("logs", str(tmp_path / "logs")),
        ("replay", f"asyncrl-top {tmp_path} --replay, or --report FILE.html"),
    ]
    # Steps of an attempt with a larger learner.steps, which the resume dropped.
    more = [{"kind": "train", "step": 5, "reward/mean": 9.0}, {"kind": "eval", "step": 5, "eval/math/mean": 0.9}]
    assert summary(lines + more) == summary(lines)
    # The model of an earlier attempt.
    os.utime(tmp_path / "export", (0, 0))
    assert "model" not in summary(lines)


@pytest.mark.parametrize(
    ("rewards", "row"),
    [
        ([0.5], "0.500 (mean of step 1)"),
        ([None, 0.25, 0.5, 0.75], "0.250 → 0.750 (mean of step 2 and of step 4)"),
        ([0.0, 1.0, *[9.0] * 16, 1.0, 2.0], "0.500 → 1.500 (mean of steps 1 to 2 and of steps 19 to 20)"),
    ],
)
def test_the_reward_at_both_ends_of_a_run(summary, rewards, row):
    lines = [{"kind": "train", "step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    assert summary(lines, steps=20)["reward"] == row


def test_the_summary_shows_untrained_groups_their_file_and_restarted_actors(summary, tmp_path):
    (tmp_path / "quarantine.jsonl").touch()
    quarantined = {"ledger/filtered": 0, "ledger/quarantined": 2}
    lines = [
        {"kind": "train", "step": step, "start": start, "rollout/dropped_trajectories": dropped} | quarantined
        for step, start, dropped in [(1, 1, 3), (2, 1, 5), (3, 2, 1), (4, 2, 2)]
    ]
    rows = summary(lines)
    assert rows["not trained"] == "groups quarantined 2, trajectories dropped 7"
    assert rows["quarantine"].startswith(f"{tmp_path / 'quarantine.jsonl'}; asyncrl-top {tmp_path} --explain UID")
    # Without a step, the last metrics of the learner count.
    names = ("ledger/filtered", "ledger/quarantined", "rollout/failed_attempts", "learner/step")
    progress = TerminalProgress(io.StringIO(), steps=4)
    for name in ("rollouter/1", "learner/0", "rollouter/1"):
        progress.show(RestartEvent(name=name, reason="killed by SIGKILL"))
    assert progress.step == 0
    metrics = dict(zip(names, (28.0, 13.0, 40.0, 0.0), strict=True))
    rows = list(summary([], last_metrics=metrics, restarts=progress.restarts).values())
    reported = "groups filtered 28, groups quarantined 13, failed attempts 40"
    assert rows[:3] == ["0 of 4", reported, "learner/0 1, rollouter/1 2"]


def test_the_summary_shows_trained_groups_and_complete_epochs(summary, tmp_path):
    """Lines of metrics may be lost, and a folder of checkpoints may hold none that is whole."""
    newest = tmp_path / "checkpoints" / "v00000003"
    newest.mkdir(parents=True)
    rows = summary([{"kind": "train", "step": 2}], trained=3)
    assert rows["steps"] == "3 of 4" and "checkpoint" not in rows
    assert summary([], checkpoint=newest)["checkpoint"] == str(newest)


# --- lines of metrics ---


def test_steps_that_a_restored_learner_repeats_count_once_and_a_torn_line_is_skipped(tmp_path):
    """Its first line voids what was written of that step and later ones, evaluations included."""
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    lines = [{"kind": "train", "step": step, "start": 1, "reward/mean": 0.1} for step in range(1, 6)]
    lines.insert(3, {"kind": "eval", "step": 4, "start": 1, "eval/x/mean": 0.2})
    # The evaluation at the step that is being written may come first.
    lines += [{"kind": "eval", "step": 4, "start": 2, "eval/x/mean": 0.9}]
    lines += [{"kind": "train", "step": step, "start": start} for step, start in ((4, 2), (5, 2), (5, 3))]
    # A late line of the old learner counts: it was true then.
    lines += [{"kind": "eval", "step": 5, "start": 1, "eval/x/mean": 0.3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "rew')
    seen = [(line["kind"], line["step"], line["start"]) for line in read_metrics(path)]
    after = [("eval", 4, 2), ("train", 4, 2), ("train", 5, 3), ("eval", 5, 1)]
    assert seen == [*(("train", step, 1) for step in (1, 2, 3)), *after]
    assert [line["step"] for line in read_metrics(path, ("eval",))] == [4, 5]


@pytest.mark.parametrize("kind", ["train", "update", "eval"])
@pytest.mark.parametrize(
    ("step", "start", "by", "voided"),
    [(5, 1, 2, True), (6, 1, 3, True), (4, 1, 2, False), (6, 2, 2, False), (6, 2, 1, False)],
)
def test_a_step_of_a_later_start_voids_repeated_lines(kind, step, start, by, voided):
    assert is_voided({"kind": kind, "step": step, "start": start}, TRAIN | {"step": 5, "start": by}) == voided
    # The evaluation at a step may come before its line.
    if kind != "train":
        assert not is_voided(TRAIN | {"step": 5, "start": 1}, {"kind": kind, "step": 5, "start": 2})
    assert not is_voided({"step": 1}, TRAIN | {"step": 1})
