"""The loss and the advantage of a run: a built-in function by its name, or the user's own as MODULE:FUNCTION.

The mathematics in algorithm/ takes these as arguments, so it neither imports users' code nor reports its errors.

Fails with ConfigError, which names the key, for a function that does not exist, does not take its options, raises an
error or returns something of the wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm.advantage import advantages
from asyncrl.learner.algorithm.advantage.advantages import Advantage, Advantages, ScoredGroup
from asyncrl.messages.reward import LONGEST_NAME, MOST_NAMES
from asyncrl.workers.user_code import Keys, NotCallable, accepted, describe, did_you_mean, find_place, load

if TYPE_CHECKING:
    # The sim backend trains nothing, and does not import torch.
    from asyncrl.learner.algorithm.loss.objective import Objective
    from asyncrl.learner.algorithm.losses import Loss, TokenLosses, Traits
    from asyncrl.learner.algorithm.token_batch import TokenBatch


def find_function(
    key: str, spec: str, ours: Mapping[str, Callable[..., Any]], given: str, options: Mapping[str, Any]
) -> partial[Any]:
    """The function that ``spec``, the value of ``key``, names, with ``options`` (the value of KEY_options) filled in.

    ``ours`` are the built-in ones; ``given`` is the keyword that the function is called with. Raises ConfigError.
    """
    try:
        if ":" in spec:
            function = load(spec, key)
        elif spec in ours:
            function = ours[spec]
        else:
            near = did_you_mean(spec, list(ours))
            known = f"built in are {', '.join(ours)}, and MODULE:FUNCTION names one of your own"
            raise ConfigError([f"{key}: there is no built-in {key.rpartition('.')[2]} {spec!r}{near}; {known}"])
        if given not in accepted(spec, function, [given], dict(options), Keys(key, f"{key}_options")):
            raise ConfigError([f"{key}: {spec} does not take {given!r}, which is what it is called with"])
    except NotCallable as error:
        raise ConfigError(error.problems) from error
    return partial(function, **options)


def find_advantage(config: LearnerConfig) -> Advantage:
    """The advantage of a run; its result has one float64 [turns] for each trajectory. Raises ConfigError, as it does
    when it is called.
    """
    name = config.advantage
    function = find_function("learner.advantage", name, advantages.BUILT_IN, "groups", config.advantage_options)

    def checked(groups: Sequence[ScoredGroup]) -> Advantages:
        try:
            found = function(groups=groups)
            if len(found) != len(groups):
                raise ValueError(f"it returned advantages of {len(found)} groups, of {len(groups)} given")
            return [_by_turn(group, values) for group, values in zip(groups, found, strict=True)]
        except Exception as error:
            raise ConfigError([f"learner.advantage: {name} failed: {describe(error)}"]) from error

    return checked


def _by_turn(group: ScoredGroup, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len(values) != len(group.rewards):
        of = f"for the {len(group.rewards)} trajectories of group {group.uid}"
        raise ValueError(f"it returned {len(values)} advantages {of}")
    found = [np.asarray(value, dtype=np.float64) for value in values]
    for each, turns in zip(found, group.past, strict=True):
        if each.shape not in ((), turns.shape):
            of = f"shape {each.shape} for a trajectory of {len(turns)} turns in group {group.uid}"
            raise ValueError(f"it returned an advantage of {of}; it must be one number, or one for each turn")
    if not np.isfinite(np.concatenate([each.reshape(-1) for each in found])).all():
        raise ValueError(f"it returned an advantage that is not finite for group {group.uid}")
    return [each if each.ndim else np.full(turns.shape, each) for each, turns in zip(found, group.past, strict=True)]


def find_loss(config: LearnerConfig) -> tuple[Loss, Traits]:
    """The loss of a run and its traits. Raises ConfigError, as the loss does when it is called."""
    from asyncrl.learner.algorithm import losses

    function = find_function("learner.loss", config.loss, losses.BUILT_IN, "batch", config.loss_options)
    return _CheckedLoss(config.loss, function), getattr(function.func, "traits", losses.Traits())


def make_objective(config: LearnerConfig) -> Objective:
    """The objective of a run. Raises ConfigError."""
    from asyncrl.learner.algorithm.loss.objective import Objective

    return Objective(config, *find_loss(config))


class _CheckedLoss:
    """A loss whose errors and results of the wrong form are ConfigErrors."""

    def __init__(self, name: str, function: Callable[..., TokenLosses]) -> None:
        self._name, self._function = name, function
        self._names: frozenset[str] | None = None
        """Names of the sums, from the first call on: sums are added up over batches and ranks."""

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        try:
            values, sums = self._function(batch=batch)
        except Exception as error:
            raise self._error(f"failed: {describe(error)}") from error
        if values.shape != batch.logprobs.shape:
            found = f"{tuple(values.shape)} for {len(batch.logprobs)} tokens"
            raise self._error(f"returned losses of shape {found}; it must be one for each")
        if len(sums) > MOST_NAMES or any(len(str(name)) > LONGEST_NAME for name in sums):
            found = f"{len(sums)} sums, the longest name has {max(len(str(name)) for name in sums)} characters"
            allowed = f"{MOST_NAMES} names of {LONGEST_NAME} characters are allowed: each becomes a metric"
            place = find_place(self._name)
            raise self._error(f"{f'({place}) ' if place else ''}returned {found}; {allowed}")
        for name, value in sums.items():
            if getattr(value, "shape", None) != ():
                raise self._error(f"returned {name!r}, which is not a tensor of one number")
        names = frozenset(sums)
        self._names = names if self._names is None else self._names
        if names != self._names:
            found = f"{sorted(self._names)} with one batch and {sorted(names)} with another"
            raise self._error(f"returned the sums {found}; names must be the same")
        return values, {name: value.detach() for name, value in sums.items()}

    def _error(self, problem: str) -> ConfigError:
        return ConfigError([f"learner.loss: {self._name} {problem}"])
