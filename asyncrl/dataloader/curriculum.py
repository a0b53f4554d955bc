"""The curriculum: which prompts rest in an epoch, by the rewards of their earlier groups. Pure.

A group has no signal if its rewards are equal (within learner.signal_tolerance), as those of solved and of hopeless
prompts are. A group whose mean reward is at least ``solved`` counts as one without a signal, too. After such a group
its prompt rests for ``rest`` epochs. If the next group has no signal either, the prompt rests twice as long as before,
up to ``longest`` epochs. A group with a signal ends the row.

Invariant: the decision depends on the results in the ledger and on the epoch alone, so a resumed run decides alike.

A user's function decides in place of the rule. It runs in the dataloader, once for each prompt of an epoch, so it must
be quick. Fails with ConfigError if the function cannot be used, raises an error or does not return a truth value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.config import Config
from asyncrl.config.training import CurriculumConfig
from asyncrl.core.errors import ConfigError
from asyncrl.messages.ledger import GroupResult
from asyncrl.workers.user_code import Keys, NotCallable, accepted, describe, load

Rests = Callable[[Sequence[GroupResult], int], bool]
"""Whether a prompt with these results, the oldest first, rests in this epoch of its source."""
KEYS = Keys("data.curriculum.function", "data.curriculum.options")


def find_curriculum(config: Config) -> Rests | None:
    """Return the rule of a run; None without a curriculum. Raises ConfigError if the user's function cannot be used."""
    curriculum, tolerance = config.data.curriculum, config.learner.signal_tolerance
    if not curriculum.is_on:
        return None
    if curriculum.function is None:
        return lambda results, epoch: epoch <= rests_until(results, curriculum, tolerance)
    return _of_user(curriculum.function, curriculum.options)


def rests_until(results: Sequence[GroupResult], curriculum: CurriculumConfig, tolerance: float) -> int:
    """Return the last epoch in which a prompt with these results rests; -1 if it does not rest."""
    if not results or not _is_flat(results[-1], curriculum, tolerance):
        return -1
    length, last = curriculum.rest, results[-1]
    if len(results) > 1 and _is_flat(results[-2], curriculum, tolerance):
        # The rest before this group: the epochs between the two.
        length = max(length, 2 * (last.epoch - results[-2].epoch - 1))
    return last.epoch + min(length, curriculum.longest)


def _is_flat(result: GroupResult, curriculum: CurriculumConfig, tolerance: float) -> bool:
    """Whether a group counts as one without a signal."""
    is_solved = curriculum.solved is not None and result.mean >= curriculum.solved
    return result.spread <= tolerance or is_solved


def _of_user(spec: str, options: dict[str, Any]) -> Rests:
    """Wrap the user's function: it gets ``results`` as (epoch, mean, spread) and the ``epoch``, and returns whether the
    prompt is sampled. Raises ConfigError, and so does a call that fails.
    """
    try:
        function = load(spec, KEYS.code)
        passed = accepted(spec, function, ("results", "epoch"), options, KEYS)
    except NotCallable as error:
        raise ConfigError(error.problems) from error

    def rests(results: Sequence[GroupResult], epoch: int) -> bool:
        given = options | {"epoch": epoch, "results": [(each.epoch, each.mean, each.spread) for each in results]}
        try:
            sampled = function(**{name: given[name] for name in passed})
            if sampled not in (True, False):
                raise TypeError(f"it returned {sampled!r}, and must return whether the prompt is sampled")
        except Exception as error:
            raise ConfigError([f"{KEYS.code}: {spec} failed: {describe(error)}"]) from error
        return not sampled

    return rests


def problems_of(config: Config) -> list[str]:
    """Try the curriculum on made-up results. Returns the reasons why it cannot be used; empty if it works."""
    try:
        rests = find_curriculum(config)
        if rests is not None:
            rests([], 0)
            rests([GroupResult(0, 0.0, 0.0), GroupResult(2, 0.5, 1.0)], 3)
    except ConfigError as error:
        return error.problems
    return []
