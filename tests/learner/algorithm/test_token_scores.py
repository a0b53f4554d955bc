"""The scores of recorded tokens: picked by the ranks, sorted by sequence, and of the first groups alone."""

import numpy as np
import pytest
from learner.learner_cases import (
    build_step,
    changed,
    make_config,
    make_group,
    make_sequence,
    make_trajectory,
    random_groups,
)

from asyncrl.learner.algorithm.batch import SequenceId
from asyncrl.learner.algorithm.token_scores import by_sequence, count_recorded, recorded_targets


def numbered(groups):
    """The groups, with the numbers of their trajectories."""
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            trajectory.sample = number
    return groups


def picked(plan, group):
    """What a row group would pick: log-probs and advantages in place of the learner's log-probs and entropies."""
    parts = [np.empty((2, 0), np.float32)]
    for update in plan.updates:
        chosen, _ = recorded_targets(update.ranks[group], len(update.recorded))
        columns = [
            np.concatenate([getattr(b, name) for b in update.ranks[group]]) for name in ("behaviour", "advantages")
        ]
        parts.append(np.stack(columns)[:, chosen])
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("recorded", [0, 3, 100])
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(("ranks", "packed"), [(1, True), (1, False), (3, True)])
def test_each_token_of_the_first_groups_gets_its_value(recorded, updates, ranks, packed):
    for seed in range(3):
        groups = numbered(random_groups(seed, 4))
        config = make_config(ranks=ranks, budget=40, groups_per_step=4, updates_per_batch=updates)
        config = changed(config, run={"samples_per_step": recorded})
        plan = build_step(groups, version=0, config=config, world_size=ranks, packed=packed, shared=packed)
        values = [picked(plan, group) for group in range(ranks)]
        assert [part.shape[1] for part in values] == count_recorded(plan)
        scores = by_sequence(plan, values)
        expected = {
            SequenceId(group.lease.uid, trajectory.sample, number): sequence.logprobs
            for group in groups[:recorded]
            for trajectory in group.trajectories
            for number, sequence in enumerate(trajectory.sequences)
            if len(sequence.logprobs)
        }
        assert scores.keys() == expected.keys()
        for name, found in scores.items():
            assert np.array_equal(found.logprobs, expected[name])
            assert len(found.entropies) == len(found.logprobs) and not np.isnan(found.entropies).any()


def test_a_token_without_a_loss_and_a_sequence_that_is_not_computed_have_no_value():
    late = make_sequence([1, 2, 3, 4], roles="sscs", versions=[0, 9, 9, 9])
    equal = [make_trajectory(sequences=[make_sequence([5, 6])], reward=1.0) for _ in range(2)]
    others = [make_trajectory(sequences=[late], reward=reward) for reward in (1.0, 0.0)]
    groups = numbered([make_group(0, [1], others), make_group(1, [1], equal)])
    config = changed(make_config(), staleness={"max": 2, "late": "mask"})
    plan = build_step(groups, version=9, config=config, world_size=1, packed=True, skip_zero_advantages=True)
    scores = by_sequence(plan, [picked(plan, 0)])
    assert {name.uid for name in scores} == {groups[0].lease.uid}
    for found in scores.values():
        assert np.isnan(found.logprobs).tolist() == [True, False, False]
