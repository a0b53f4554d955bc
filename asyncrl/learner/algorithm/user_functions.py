"""The loss and the advantage of a run: a built-in function by its name, or the user's own as MODULE:FUNCTION.

The learner looks up both functions at each start. Before the run the launcher tries all but the defaults on made-up
tokens in a separate process (``problems_of``), since the user's code may do anything when it is imported.

Fails with ConfigError, which names the key, for a function that does not exist or does not take its options. A user's
function itself raises ConfigError when a call fails or returns something of the wrong form (``CheckedLoss``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.algorithm import advantages
from asyncrl.learner.algorithm.advantages import Advantage, ScoredGroup
from asyncrl.messages.reward import LONGEST_NAME, MOST_NAMES
from asyncrl.workers.user_code import Keys, NotCallable, accepted, describe, did_you_mean, find_place, load

if TYPE_CHECKING:
    # The sim backend trains nothing, and does not import torch.
    from asyncrl.learner.algorithm.losses import Loss, Objective, TokenBatch, TokenLosses, Traits


def find_function(
    key: str, spec: str, ours: Mapping[str, Callable[..., Any]], given: str, options: Mapping[str, Any]
) -> partial[Any]:
    """Look up the function that ``spec`` names, and bind its options. Raises ConfigError.

    ``spec`` is the value of the configuration key ``key``, ``options`` that of KEY_options. ``ours`` are the built-in
    functions. ``given`` is the keyword argument with which the learner calls the function.
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
    """Look up the advantage of a run. Raises ConfigError, and so does the advantage when a call fails."""
    function = find_function(
        "learner.advantage", config.advantage, advantages.BUILT_IN, "groups", config.advantage_options
    )
    return advantages.checked(config.advantage, function)


def find_loss(config: LearnerConfig) -> tuple[Loss, Traits]:
    """Look up the loss of a run and its traits. Raises ConfigError, and so does a user's loss when a call fails."""
    from asyncrl.learner.algorithm import losses

    function = find_function("learner.loss", config.loss, losses.BUILT_IN, "batch", config.loss_options)
    loss = CheckedLoss(config.loss, function) if ":" in config.loss else function
    return loss, getattr(function.func, "traits", losses.Traits())


def make_objective(config: LearnerConfig) -> Objective:
    """The objective of a run. Raises ConfigError."""
    from asyncrl.learner.algorithm.losses import Objective

    return Objective(config, *find_loss(config))


class CheckedLoss:
    """Wraps a user's loss, so that its errors and results of the wrong form raise ConfigError."""

    def __init__(self, name: str, function: Callable[..., TokenLosses]) -> None:
        self._name, self._function = name, function
        self._names: frozenset[str] | None = None
        """Names of the sums in the first call. They must not change: sums are added up over batches and ranks."""

    def __call__(self, batch: TokenBatch) -> TokenLosses:
        """Call the loss. Raises ConfigError if it fails, or returns a wrong shape or wrong names of sums.

        The names must be few, short and the same for every batch. The returned sums have no gradient.
        """
        try:
            values, sums = self._function(batch=batch)
        except Exception as error:
            raise self._error(f"failed: {describe(error)}") from error
        if not hasattr(values, "shape") or not isinstance(sums, Mapping):
            returned = f"{type(values).__name__} and {type(sums).__name__}"
            raise self._error(f"returned {returned}; return a tensor with a loss for each token, and a mapping of sums")
        if values.shape != batch.logprobs.shape:
            returned = f"{tuple(values.shape)} for {len(batch.logprobs)} tokens"
            raise self._error(f"returned losses of shape {returned}; it must be one for each")
        if len(sums) > MOST_NAMES or any(len(str(name)) > LONGEST_NAME for name in sums):
            returned = f"{len(sums)} sums, the longest name has {max(len(str(name)) for name in sums)} characters"
            allowed = f"{MOST_NAMES} names of {LONGEST_NAME} characters are allowed: each becomes a metric"
            place = find_place(self._name)
            raise self._error(f"{f'({place}) ' if place else ''}returned {returned}; {allowed}")
        for name, value in sums.items():
            if getattr(value, "shape", None) != ():
                raise self._error(f"returned {name!r}, which is not a tensor of one number")
        names = frozenset(sums)
        self._names = names if self._names is None else self._names
        if names != self._names:
            returned = f"{sorted(self._names)} with one batch and {sorted(names)} with another"
            raise self._error(f"returned the sums {returned}; names must be the same")
        return values, {name: value.detach() for name, value in sums.items()}

    def _error(self, problem: str) -> ConfigError:
        return ConfigError([f"learner.loss: {self._name} {problem}"])


LENGTHS = (3, 2)
"""Tokens of the two sequences in the made-up batch on which the loss is tried."""


def problems_of(config: LearnerConfig, samples: int) -> list[str]:
    """Try the advantage and the loss on made-up data. Returns the reasons why one cannot be used; empty if both work.

    ``samples`` is the number of trajectories in a group.
    """
    return [*_advantage_problems(config, samples), *_loss_problems(config)]


class _AnyComponent(dict[str, np.ndarray]):
    """Components of made-up rewards. Every name exists, since those of the user's reward function are not known."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._samples = samples

    def __missing__(self, name: str) -> np.ndarray:
        return np.linspace(0.0, 1.0, self._samples)

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _advantage_problems(config: LearnerConfig, samples: int) -> list[str]:
    """Call the advantage on two made-up groups. Returns the problems."""
    groups = [
        ScoredGroup(
            uid=f"trial-{number}",
            rewards=np.arange(samples) % (2.0 + number),
            past=[np.zeros(1 + index % 2) for index in range(samples)],
            lengths=2 + np.arange(samples) % 8,
            components=_AnyComponent(samples),
        )
        for number in range(2)
    ]
    try:
        find_advantage(config)(groups)
    except ConfigError as error:
        return error.problems
    return []


def _loss_problems(config: LearnerConfig) -> list[str]:
    """Compute the objective of a made-up batch and its gradient. Returns the problems."""
    import torch

    from asyncrl.learner.algorithm.losses import TokenBatch

    count = sum(LENGTHS)
    logprobs = torch.linspace(-3.0, -0.1, count, requires_grad=True)
    # All differ, so that no ratio of two of them is 1.
    behaviour, proximal, reference, teacher = (logprobs.detach() - 0.05 * n for n in range(1, 5))
    batch = TokenBatch(
        logprobs=logprobs,
        entropies=torch.linspace(0.1, 1.0, count, requires_grad=True),
        behaviour=behaviour,
        proximal=proximal,
        advantages=torch.linspace(-1.0, 1.0, count),
        weights=torch.ones(count),
        segments=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        sequences=len(LENGTHS),
        staleness=torch.zeros(count, dtype=torch.int32),
        reference=reference,
        teacher=teacher,
    )
    try:
        objective, _ = make_objective(config)(batch, float(count))
    except ConfigError as error:
        return error.problems
    except Exception as error:
        # A built-in loss with an option of a wrong type, for example.
        key = "learner.loss_options" if config.loss_options else "learner.loss"
        return [f"{key}: {config.loss} failed: {describe(error)}"]
    try:
        torch.autograd.backward(objective)
    except Exception as error:
        return [f"learner.loss: {config.loss} has no gradient: {describe(error)}"]
    if logprobs.grad is None or not torch.isfinite(logprobs.grad).all():
        return [f"learner.loss: {config.loss} has no finite gradient by the log-probs of its batch"]
    return []
