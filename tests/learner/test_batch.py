from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import make_config, make_group, make_trajectory, random_groups

from asyncrl.learner.batch import build_step, check_group, has_signal
from asyncrl.messages.groups import VersionSpan


def _two_rows():
    first = make_trajectory(
        [10, 11, 12],
        reward=1.0,
        logprobs=np.array([-0.1, 0.0, -0.3], dtype=np.float32),
        loss_mask=np.array([1, 0, 1], dtype=np.uint8),
        spans=[VersionSpan(3, 0, 1), VersionSpan(4, 1, 3, True)],
    )
    second = make_trajectory([20], reward=0.0, version=5)
    return make_group(0, [1, 2], [first, second])


def test_a_micro_batch_predicts_each_loss_token_from_the_position_before_it() -> None:
    plan = build_step([_two_rows()], version=5, config=make_config(advantage="dr_grpo"), world_size=1, packed=True)
    [[batch]] = plan.ranks
    assert batch.input_ids.tolist() == [1, 2, 10, 11, 1, 2]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.sequences.tolist() == [0, 1]
    assert batch.predict.tolist() == [1, 3, 5]
    assert batch.targets.tolist() == [10, 12, 20]
    assert batch.behaviour.tolist() == pytest.approx([-0.1, -0.3, -1.0])
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert batch.staleness.tolist() == [2, -1, 0]
    assert plan.denominator == 3.0
    assert plan.temperature == 0.8
    assert plan.tokens == 6
    assert [(s.uid, s.sample) for s in plan.sequences] == [("0-0", 0), ("0-0", 1)]


@given(
    seed=st.integers(0, 50),
    world_size=st.integers(1, 3),
    budget=st.integers(1, 200),
    packed=st.booleans(),
    aggregation=st.sampled_from(["token", "sequence", "constant"]),
)
@settings(max_examples=50, deadline=None)
def test_the_step_does_not_depend_on_how_it_is_cut(seed, world_size, budget, packed, aggregation) -> None:
    """Each loss token appears once, with the same weight, advantage and behaviour, whatever the cut."""
    groups = random_groups(seed, 4)

    def tokens(config, world_size, packed):
        plan = build_step(groups, version=2, config=config, world_size=world_size, packed=packed)
        found = []
        for batch in (batch for rank in plan.ranks for batch in rank):
            ends = np.cumsum(batch.lengths)
            member = np.searchsorted(ends, batch.predict, side="right")
            inside = batch.predict - (ends - batch.lengths)[member]
            rows = zip(
                batch.sequences[member].tolist(),
                inside.tolist(),
                batch.targets.tolist(),
                batch.behaviour.tolist(),
                batch.advantages.tolist(),
                batch.weights.tolist(),
                strict=True,
            )
            found += [row for row in rows if row[0] >= 0]
            assert (batch.weights[batch.sequences[member] < 0] == 0).all()
        return sorted(found), plan.denominator, plan.metrics

    base = tokens(make_config(budget=10_000, aggregation=aggregation), 1, True)
    assert tokens(make_config(budget=budget, aggregation=aggregation), world_size, packed) == base
    count = sum(int(t.loss_mask.sum()) for g in groups for t in g.trajectories)
    assert len(base[0]) == count
    assert base[1] == {"token": count, "sequence": 12, "constant": 12 * 32}[aggregation]


def test_a_masked_trajectory_counts_in_the_baseline_and_in_nothing_else() -> None:
    cut = make_trajectory([7, 8, 9], reward=1.0, finish_reason="length")
    whole = make_trajectory([7, 8], reward=0.0)
    group = make_group(0, [1], [cut, whole])
    plan = build_step(
        [group],
        version=0,
        config=make_config(truncated="mask", advantage="dr_grpo"),
        world_size=1,
        packed=True,
    )
    [[batch]] = plan.ranks
    assert batch.advantages.tolist() == [-0.5, -0.5]
    assert plan.denominator == 2.0
    assert [s.sample for s in plan.sequences] == [1]
    assert plan.metrics["rollout/truncated_fraction"] == 0.5


def test_a_step_with_nothing_to_train_is_all_filler() -> None:
    cut = [make_trajectory([7], reward=float(i), finish_reason="length") for i in range(2)]
    plan = build_step(
        [make_group(0, [1], cut)], version=0, config=make_config(truncated="mask"), world_size=2, packed=True
    )
    assert [len(rank) for rank in plan.ranks] == [1, 1]
    assert all(batch.weights.tolist() == [0.0] for rank in plan.ranks for batch in rank)
    assert plan.denominator == 1.0


def test_metrics_of_a_step() -> None:
    trained = make_group(
        0,
        [1],
        [
            make_trajectory(
                [1, 2, 3, 4],
                reward=1.0,
                spans=[VersionSpan(2, 0, 3), VersionSpan(4, 3, 4)],
                resumes=1,
                components={"format": 0.5},
            ),
            make_trajectory([1, 2], reward=0.0, version=4, finish_reason="length", components={"format": 1.5}),
        ],
    )
    zeros = make_group(1, [1], [make_trajectory([1], reward=0.0, version=4) for _ in range(2)])
    best = make_group(2, [1], [make_trajectory([1], reward=1.0, version=4) for _ in range(2)])
    config = make_config()
    plan = build_step([trained], filtered=[zeros, best], version=4, config=config, world_size=1, packed=True)
    assert plan.metrics == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": 0.5,
            "reward/trained_mean": 0.5,
            "reward/all_zero_fraction": 1 / 3,
            "reward/all_max_fraction": 1 / 3,
            "reward/component/format": 1.0,
            "rollout/length_mean": 10 / 6,
            "rollout/length_p95": np.percentile([4, 2, 1, 1, 1, 1], 95),
            "rollout/truncated_fraction": 1 / 6,
            "rollout/mixed_version_fraction": 1 / 6,
            "rollout/resumed_trajectories": 1.0,
            "staleness/token_mean": 6 / 6,
            "staleness/token_max": 2.0,
            # The first sampled token is 2 versions old and the limit is 1.
            "staleness/late_groups": 1.0,
        }
    )


def test_lateness_is_that_of_the_first_sampled_token() -> None:
    prompted = make_trajectory(
        [1, 2],
        loss_mask=np.array([0, 1], dtype=np.uint8),
        spans=[VersionSpan(0, 0, 1), VersionSpan(3, 1, 2)],
    )
    group = make_group(0, [1], [prompted, make_trajectory([1], version=3, reward=1.0)])
    plan = build_step([group], version=3, config=make_config(), world_size=1, packed=True)
    assert plan.metrics["staleness/late_groups"] == 0.0
    assert plan.metrics["staleness/token_max"] == 0.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"logprobs": np.array([-1.0, float("nan")], dtype=np.float32)}, "log-prob"),
        ({"logprobs": np.array([-1.0, float("-inf")], dtype=np.float32)}, "log-prob"),
        ({"logprobs": np.array([-1.0, 0.5], dtype=np.float32)}, "log-prob"),
        ({"logprobs": np.array([-1.0], dtype=np.float32)}, "1 log-probs"),
        ({"loss_mask": np.ones(3, dtype=np.uint8)}, "3 mask entries"),
        ({"spans": [VersionSpan(0, 0, 1)]}, "spans"),
        ({"spans": [VersionSpan(0, 0, 1), VersionSpan(1, 0, 2)]}, "spans"),
        ({"spans": []}, "spans"),
        ({"reward": None}, "reward"),
        ({"reward": float("nan")}, "reward"),
    ],
)
def test_a_broken_group_is_named_before_it_is_trained(change, problem) -> None:
    good = make_trajectory([1, 2], reward=1.0)
    fields = {"reward": 0.0} | change
    group = make_group(7, [1], [good, make_trajectory([1, 2], **fields)])
    found = check_group(group)
    assert found is not None
    assert problem in found
    assert "sample 1" in found
    with pytest.raises(ValueError, match="0-7"):
        build_step([group], version=0, config=make_config(), world_size=1, packed=True)


def test_a_whole_group_is_checked() -> None:
    group = make_group(0, [1], [make_trajectory([1]), make_trajectory([2])])
    assert check_group(group) is None
    assert "at least 2" in str(check_group(make_group(0, [1], [make_trajectory([1])])))
    assert "empty" in str(check_group(make_group(0, [], group.trajectories)))
    assert "no tokens" in str(check_group(make_group(0, [1], [make_trajectory([]), make_trajectory([1])])))


def test_signal() -> None:
    def group(*rewards: float):
        return make_group(0, [1], [make_trajectory([1], reward=r) for r in rewards])

    assert not has_signal(group(0.5, 0.5), 1e-6)
    assert not has_signal(group(0.5, 0.5 + 1e-7), 1e-6)
    assert has_signal(group(0.5, 0.5, 0.6), 1e-6)


def test_planning_does_not_import_torch() -> None:
    code = (
        "import sys, asyncrl.learner.backend, asyncrl.learner.sim, asyncrl.learner.batch;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
