"""What the learner records of the tokens of the first groups: its own log-probs and entropies, on any ranks."""

import numpy as np
import pytest
import torch
from learner.learner_cases import changed, exact_model, exact_scores, make_config, plan_of, random_groups

from asyncrl.learner.algorithm.batch import SequenceId

RECORDED = 2


def _scores(backend, config):
    groups = random_groups(0, 4)
    plan = plan_of(backend, config, 0)
    # Trajectories of random groups all have number 0: name them apart.
    for update in plan.updates:
        update.sequences[:] = [SequenceId(each.uid, at, 0) for at, each in enumerate(update.sequences)]
    assert backend.token_scores == {}
    backend.train(plan)
    scores = backend.token_scores
    assert len(scores) == sum(len(update.recorded) for update in plan.updates)
    uids = {group.lease.uid for group in groups[:RECORDED]}
    assert {name.uid for name in scores} == uids
    return [(each.logprobs, each.entropies) for _, each in sorted(scores.items(), key=lambda item: item[0].sample)]


@pytest.mark.parametrize(
    "learner", [{}, {"ranks": 2}, {"ranks": 2, "context_parallel": 2}, {"ranks": 2, "replicas": 2}]
)
def test_scores_are_those_of_the_model_before_its_update(folder, run_well, learner):
    config = changed(make_config(folder, budget=20, groups_per_step=4, **learner), run={"samples_per_step": RECORDED})
    found = run_well(config, _scores)
    model = exact_model(folder)
    sequences = [
        (group, sequence)
        for group in random_groups(0, 4)[:RECORDED]
        for trajectory in group.trajectories
        for sequence in trajectory.sequences
        if len(sequence.logprobs)
    ]
    assert len(found) == len(sequences)
    with torch.no_grad():
        for (logprobs, entropies), place in zip(found, sequences, strict=True):
            exact_logprobs, exact_entropies = exact_scores(model, *place)
            np.testing.assert_allclose(logprobs, exact_logprobs, atol=1e-4)
            np.testing.assert_allclose(entropies, exact_entropies, atol=1e-4)


def _of_two_updates(backend, config):
    plan = plan_of(backend, config, 0)
    backend.train(plan)
    of_first = dict(backend.token_scores)
    backend.train(plan)
    return [len(update.recorded) for update in plan.updates], len(of_first), len(backend.token_scores)


def test_scores_are_of_all_updates_of_a_step(folder, run_well):
    config = make_config(folder, ranks=2, groups_per_step=4, updates_per_batch=2)
    config = changed(config, run={"samples_per_step": 3})
    recorded, of_first, of_second = run_well(config, _of_two_updates)
    assert min(recorded) > 0 and of_first == of_second > 0
