"""Rewards that the configuration makes or changes: by the length of a response, and past the timeout.

Pure. Only ``truncated = "penalty"`` changes a reward here; under ``"mask"`` the learner leaves the truncated
response out of its loss, and under ``"score"`` nothing is done at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.config.training import OverlongPenalty
from asyncrl.messages.reward import PENALTY_COMPONENT, TIMED_OUT_COMPONENT, Completion, Score, Scores


def overlong_penalty(tokens: int, *, max_tokens: int, margin_tokens: int, scale: float) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-scale, 0].

    With the length |y| = ``tokens``, L_max = ``max_tokens`` and L_cache = ``margin_tokens``::

        0                                        |y| <= L_max - L_cache
        scale * ((L_max - L_cache) - |y|) / L_cache    up to L_max
        -scale                                   beyond

    A response cut at ``max_tokens`` so gets the whole penalty.
    """
    over = tokens - (max_tokens - margin_tokens)
    return -scale * min(max(over / margin_tokens, 0.0), 1.0)


def shaped(
    reward: float, components: dict[str, float], tokens: int, *, max_tokens: int, overlong: OverlongPenalty
) -> tuple[float, dict[str, float]]:
    """The reward with its penalty, which is also shown as a component of its own, zeros included."""
    penalty = overlong_penalty(
        tokens, max_tokens=max_tokens, margin_tokens=overlong.margin_tokens, scale=overlong.scale
    )
    return reward + penalty, {**components, PENALTY_COMPONENT: penalty}


def all_shaped(
    rewards: Sequence[float],
    components: Sequence[dict[str, float]],
    completions: Sequence[Completion],
    *,
    max_tokens: int,
    overlong: OverlongPenalty,
) -> tuple[list[float], list[dict[str, float]]]:
    """Rewards as of ``shaped``, for each of several completions."""
    pairs = [
        shaped(reward, of_it, completion.tokens, max_tokens=max_tokens, overlong=overlong)
        for reward, of_it, completion in zip(rewards, components, completions, strict=True)
    ]
    return [reward for reward, _ in pairs], [of_it for _, of_it in pairs]


def timed_out_scores(request: Score, reward: float, run_s: float) -> Scores:
    """Scores of responses whose scoring ran over its time: ``reward`` as it is, without shaping, and named."""
    count = len(request.completions)
    return Scores(rewards=[reward] * count, components=[{TIMED_OUT_COMPONENT: reward}] * count, run_s=run_s)
