"""Groups that the learner takes: each group once, each prompt one outcome, and a snapshot for a successor."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_group import make_group

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.groups.intake import FLAT, FRACTION_FROM, MASKED, Intake, IntakeState
from asyncrl.messages.dataloader import Outcome, Rejected
from asyncrl.messages.groups import Group
from asyncrl.messages.ledger import KINDS, GroupResult, Ledger

LEARNER = LearnerConfig(groups_per_step=2, max_filtered_ratio=2.0, max_quarantined_fraction=0.2)


def group(index: int, *, rewards: tuple[float, ...] = (0.0, 1.0), failure: str | None = None) -> Group:
    made = make_group(f"0-{index}", samples=len(rewards))
    lease = msgspec.structs.replace(made.lease, epoch=0, index=index)
    if failure is not None:
        return Group(lease=lease, trajectories=[], failure=failure)
    for trajectory, reward in zip(made.trajectories, rewards, strict=True):
        trajectory.reward = reward
    return Group(lease=lease, trajectories=made.trajectories)


def reported(intake: Intake) -> list[Outcome]:
    report = intake.outcomes.next_report()
    return [] if report is None else report.outcomes


def test_a_group_is_taken_once_and_has_one_outcome():
    """I1: a group that is delivered again, at any time, is a duplicate."""
    intake = Intake(LEARNER)
    assert [intake.deliver(group(i)) for i in (3, 1, 3)] == ["buffered", "buffered", "duplicate"]
    lossy = msgspec.structs.replace(group(4, rewards=(1.0, 1.0)), dropped=2, failed_attempts=7)
    failed = msgspec.structs.replace(group(5, failure="its reward hangs"), failed_attempts=3)
    assert [intake.deliver(each) for each in (lossy, failed)] == ["filtered", "quarantined"]
    # The dataloader leases no prompt that it rejects, and rejects one that was leased only after a loss.
    for uid in ("0-1", "0-6", "0-6"):
        intake.reject(Rejected(uid, "it kills"))
    for uid in ("0-1", "0-7", "0-7"):
        intake.reject(Rejected(uid, "too long", "left_out"))
    assert sorted(intake.claims) == ["0-1", "0-3"]
    groups, filtered = intake.begin_step()
    assert ([g.lease.uid for g in groups], [g.lease.uid for g in filtered]) == (["0-1", "0-3"], ["0-4"])
    assert sorted(intake.claims) == ["0-1", "0-3"]
    assert all(intake.deliver(group(i)) == "duplicate" for i in (1, 3, 4, 5, 6))
    assert intake.end_step() == [3] * 6
    assert intake.claims == []
    kinds = {1: "trained", 3: "trained", 4: "filtered", 5: "quarantined", 6: "quarantined", 7: "left_out"}
    problems = reported(intake)
    assert len(problems) == 6 and {o.uid: o.kind for o in problems} == {f"0-{i}": kind for i, kind in kinds.items()}
    assert all(intake.deliver(group(i)) == "duplicate" for i in (1, 3, 4, 5, 6, 7))
    assert [(q.uid, q.reason) for q in intake.quarantined] == [("0-5", "its reward hangs"), ("0-6", "it kills")]
    assert [each.uid for each in intake.left_out] == ["0-7"]
    assert (intake.dropped_trajectories, intake.failed_attempts) == (2, 10)


def test_a_signal_that_names_no_reward_ends_the_run():
    intake = Intake(LearnerConfig(signal="accuracy"))
    intake.deliver(group(0, rewards=(1.0, 0.0)))
    assert 'learner.signal: is "accuracy", but the rewards of group 0-0 have no components' in (intake.problem() or "")
    intake, misspelt = Intake(LearnerConfig(signal="accuracy")), group(1)
    misspelt.trajectories[0].components = {"length": 1.0, "acuracy": 0.0}
    intake.deliver(misspelt)
    assert "but the rewards of group 0-1 have components acuracy, length" in (intake.problem() or "")


def test_groups_of_earlier_updates_of_a_step_stay_trained():
    intake = Intake(LearnerConfig(groups_per_step=3))
    for i in range(3):
        intake.deliver(group(i))
    intake.begin_step()
    intake.spoil_step(["0-1"], "not finite", trained=["0-0"])
    intake.end_step()
    assert intake.buffer.uids == ["0-2"]
    assert sorted(reported(intake), key=lambda o: o.uid) == [Outcome("0-0", "trained"), Outcome("0-1", "quarantined")]


def test_prompts_left_out_by_data_rules_count_neither_as_failures_nor_as_no_signal():
    intake = Intake(LearnerConfig(groups_per_step=1, max_filtered_ratio=1.0, max_quarantined_fraction=0.1))
    for index in range(100):
        intake.reject(Rejected(f"0-{index}", "too long", "left_out"))
    assert intake.problem() is None
    assert intake.ledger.count("left_out") == 100
    for index in range(100, 200):
        intake.deliver(group(index, failure="it hangs" if index < 111 else None))
        if index >= 111:
            intake.begin_step()
            intake.end_step()
    problems = "11 of 100 prompts were quarantined, over learner.max_quarantined_fraction = 0.1"
    assert problems in (intake.problem() or "")


def test_quarantines_of_a_restored_ledger_end_the_run_with_the_key_to_raise():
    """An earlier release counted prompts that are too long as quarantined."""
    ledger = Ledger()
    for index in range(1000):
        ledger.record("quarantined" if index < 110 else "trained", 0, index)
    restored = IntakeState(ledger.state, [], [])
    intake = Intake(LearnerConfig(max_quarantined_fraction=0.1), restored)
    assert intake.problem() == (
        "110 of 1000 prompts were quarantined, over learner.max_quarantined_fraction = 0.1. quarantine.jsonl has all "
        "of them with their reasons. To continue all the same, raise learner.max_quarantined_fraction, and resume"
    )
    raised = Intake(LearnerConfig(max_quarantined_fraction=0.12), restored)
    assert raised.problem() is None


def test_groups_filtered_before_an_empty_step_count_in_the_next_step():
    intake = Intake(LearnerConfig(groups_per_step=2))
    intake.deliver(group(0, rewards=(1.0, 1.0)))
    for i in (1, 2):
        intake.deliver(group(i))
    assert [each.lease.uid for each in intake.begin_step()[1]] == ["0-0"]
    intake.spoil_step(["0-1"], "not finite")
    intake.deliver(group(3, rewards=(0.0, 0.0)))
    intake.deliver(group(4))
    assert [each.lease.uid for each in intake.begin_step()[1]] == ["0-0", "0-3"]


def test_the_groups_of_a_step_without_a_token_are_filtered_and_count_until_the_next_step():
    intake = Intake(LearnerConfig(groups_per_step=2, max_filtered_ratio=2.0))
    intake.deliver(group(0, rewards=(1.0, 1.0)))
    intake.deliver(group(1, failure="it loops"))
    for first in (2, 4):
        for index in (first, first + 1):
            assert intake.problem() is None
            intake.deliver(group(index))
        intake.begin_step()
        intake.filter_step()
        assert intake.claims == []
    kinds = {1: "quarantined"} | dict.fromkeys((0, 2, 3, 4, 5), "filtered")
    assert {outcome.uid: outcome.kind for outcome in reported(intake)} == {f"0-{i}": k for i, k in kinds.items()}
    assert {kind: intake.ledger.count(kind) for kind in KINDS} == {
        "trained": 0,
        "filtered": 5,
        "quarantined": 1,
        "left_out": 0,
        "rested": 0,
    }
    assert intake.deliver(group(4)) == "duplicate"
    words = "none of the last 6 groups could be trained: 4 had no trajectory to train"
    assert words in (intake.problem() or "")
    for index in (6, 7):
        intake.deliver(group(index))
    _, filtered = intake.begin_step()
    intake.end_step()
    assert [each.lease.index for each in filtered] == [0, 2, 3, 4, 5]
    assert intake.problem() is None


@given(
    deliveries=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["good", "flat", "bad"])), max_size=40),
    steps=st.integers(0, 3),
)
def test_i1_a_successor_continues_from_a_snapshot_like_its_predecessor(deliveries, steps):
    made = {"good": {}, "flat": {"rewards": (1.0, 1.0)}, "bad": {"failure": "bad"}}
    intake = Intake(LEARNER)
    for index, kind in deliveries:
        intake.deliver(group(index, **made[kind]))
    for _ in range(steps):
        if len(intake.buffer) >= LEARNER.groups_per_step:
            intake.begin_step()
            intake.end_step()
    state = intake.state()
    successor = Intake(LEARNER, state)
    for index in range(13):
        assert successor.has(f"0-{index}") == intake.has(f"0-{index}")
        assert successor.ledger.is_open(0, index) == intake.ledger.is_open(0, index)
    assert successor.claims == intake.claims
    assert successor.state() == state
    assert reported(successor) == []


def test_a_run_without_signal_ends_with_the_reason():
    intake = Intake(LEARNER)
    for index, fields in enumerate(
        [{"rewards": (8.0, 8.0)}] * 2 + [{"failure": "it loops"}] * 2 + [{"rewards": (6.0, 6.0)}]
    ):
        assert intake.problem() is None
        intake.deliver(group(index, **fields))
    assert intake.problem() == (
        "no signal: none of the last 5 groups could be trained: 3 had equal rewards in themselves (reward 8 (4 times), "
        "6 (2 times)); 2 failed and were quarantined, the last one because: it loops. To do: see reward.function: take "
        "prompts that the model answers now well, now badly, a reward with more steps between, or a larger "
        "rollout.samples_per_prompt; mend what failed (quarantine.jsonl has each with its reason)"
    )
    alike, learned = Intake(LEARNER), Intake(LEARNER)
    for index in range(5):
        alike.deliver(group(index, rewards=(1.0, 1.0)))
    assert "To do: see in reward.function why every response gets the same reward" in (alike.problem() or "")
    for index in range(4):
        learned.deliver(group(index, rewards=(0.0, 1.0)))
    learned.begin_step()
    learned.end_step()
    for index in range(4, 9):
        learned.deliver(group(index, rewards=(1.0, 1.0)))
    assert "if 1 is the best reward, the model has learned these prompts, so take harder ones" in (
        learned.problem() or ""
    )


@pytest.mark.parametrize("failing", ["whole", "in part"])
@pytest.mark.parametrize(("every", "ends"), [(4, True), (10, False)])
def test_too_many_failures_end_the_run(failing, every, ends):
    """Whole groups, or two trajectories of four in each: more than may be are bad, or just not so many."""
    limit = 0.2 if failing == "whole" else 0.1
    intake, problems = Intake(LEARNER.model_copy(update={"max_quarantined_fraction": limit})), []
    for index in range(2 * FRACTION_FROM):
        made = group(index, rewards=(0.0, 1.0, 0.0, 1.0))
        if index % every == 0 and failing == "whole":
            made = group(index, failure="bad prompt")
        elif index % every == 0:
            made = msgspec.structs.replace(made, trajectories=made.trajectories[:2], dropped=2)
        intake.deliver(made)
        if len(intake.buffer) >= 2:
            intake.begin_step()
            intake.end_step()
        problems.append(intake.problem())
    assert not any(problems[: FRACTION_FROM - 1])
    assert bool(problems[-1]) == ends
    words = ["max_quarantined_fraction = 0.2; the last one because: bad prompt", "trajectories failed and were dropped"]
    assert not ends or words[failing != "whole"] in problems[-1]


def test_the_text_of_the_first_groups_that_are_filtered_after_each_step_is_kept():
    """It shows why a run has no signal before its first step, and costs as much at each step as that of the trained."""
    intake = Intake(LEARNER, samples=2)
    for index in range(4):
        intake.deliver(group(index, rewards=(1.0, 1.0)))
    kept, intake.filtered_samples = intake.filtered_samples, []
    assert [(each.group.lease.uid, each.reason) for each in kept] == [("0-0", FLAT), ("0-1", FLAT)]
    for index in (4, 5):
        intake.deliver(group(index))
    intake.begin_step()
    intake.end_step()
    for index in (6, 7):
        intake.deliver(group(index))
    intake.begin_step()
    intake.filter_step()
    intake.deliver(group(8, rewards=(1.0, 1.0)))
    assert [(each.group.lease.uid, each.reason) for each in intake.filtered_samples] == [
        ("0-6", MASKED),
        ("0-7", MASKED),
    ]


def test_a_curriculum_gets_the_rewards_of_each_group_and_its_rests() -> None:
    intake = Intake(LearnerConfig(groups_per_step=1), sources=["a", "b"], keeps_results=True)
    intake.deliver(group(0, rewards=(0.0, 1.0)))
    intake.deliver(group(1, rewards=(1.0, 1.0)))
    intake.deliver(group(2, failure="it loops"))
    intake.reject(Rejected("1-3", "rests", "rested"))
    intake.begin_step()
    intake.end_step()
    assert {each.uid: (each.kind, each.rewards) for each in reported(intake)} == {
        "0-1": ("filtered", (1.0, 0.0)),
        "0-2": ("quarantined", None),
        "1-3": ("rested", None),
        "0-0": ("trained", (0.5, 1.0)),
    }
    assert intake.ledger.results(0, 0) == [GroupResult(0, 0.5, 1.0)]
    counts = intake.counts()
    assert (counts["ledger/rested"], counts["source/a/trained"], counts["source/a/filtered"]) == (1, 1, 1)
    assert (counts["source/b/rested"], counts["source/b/trained"]) == (1, 0)
    assert intake.problem() is None
    again = Intake(LearnerConfig(), intake.state(), sources=["a", "b"])
    assert again.counts()["source/a/trained"] == 1 and again.ledger.state == intake.ledger.state
    assert not any(name.startswith("source/") for name in Intake(LearnerConfig()).counts())
