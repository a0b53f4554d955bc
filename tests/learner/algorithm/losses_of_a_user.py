"""Functions that a user might name in learner.loss and learner.advantage."""

from __future__ import annotations

from asyncrl.learner.algorithm.losses import traits


@traits(entropy_gradient=True)
def squared(batch, *, scale=1.0):
    return scale * batch.logprobs**2, {"squares": (batch.logprobs.detach() ** 2).sum()}


@traits(reference=True)
def referred(batch):
    return batch.logprobs - batch.reference, {}


def scaleless(batch, *, scale):
    return scale * batch.logprobs, {}


def odd(tokens=None):
    return tokens, {}


def raises(batch):
    raise ZeroDivisionError("a user's fault")


def too_few(batch):
    return batch.logprobs[:1], {}


def counts(batch):
    return batch.logprobs, {"tokens": len(batch.logprobs)}


def alone(batch):
    return list(batch.logprobs), {}


def unsummed(batch):
    return batch.logprobs, {"squares": batch.logprobs.detach() ** 2}


def many_sums(batch):
    return batch.logprobs, {f"sum {n}": batch.logprobs.detach().sum() for n in range(65)}


def sometimes(batch):
    late = {"late": batch.staleness.sum()} if batch.staleness.any() else {}
    return batch.logprobs, {"all": batch.logprobs.sum(), **late}


def first_is_best(groups):
    return [[1.0, *[0.0] * (len(group.rewards) - 1)] for group in groups]


def odd_advantage(groups):
    return {}["a user's fault"]
