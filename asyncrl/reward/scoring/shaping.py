"""Rewards that the configuration makes or changes: by the length of a response, and after a timeout. Pure.

Here only ``truncated = "penalty"`` changes a reward. Under ``"mask"`` the learner masks a truncated response; under
``"score"`` nothing changes.
"""

from __future__ import annotations

from asyncrl.config.training import RewardConfig
from asyncrl.messages.reward import PENALTY_COMPONENT, TIMED_OUT_COMPONENT, Score, Scores


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


def shaped(scores: Scores, request: Score, config: RewardConfig, max_tokens: int) -> Scores:
    """The scores with their penalties, which are also shown as components of their own, zeros included.

    An eval set has its own limit of length and is judged by the plain reward.
    """
    if config.truncated != "penalty" or "@" in request.uid:
        return scores
    margin_tokens, scale = config.overlong.margin_tokens, config.overlong.scale
    penalties = [
        overlong_penalty(completion.tokens, max_tokens=max_tokens, margin_tokens=margin_tokens, scale=scale)
        for completion in request.completions
    ]
    return Scores(
        rewards=[reward + penalty for reward, penalty in zip(scores.rewards, penalties, strict=True)],
        components=[
            {**parts, PENALTY_COMPONENT: penalty} for parts, penalty in zip(scores.components, penalties, strict=True)
        ],
        run_s=scores.run_s,
    )


def timed_out_scores(request: Score, reward: float, run_s: float) -> Scores:
    """Scores of responses whose scoring ran over its time: ``reward`` as it is, without shaping, and named."""
    count = len(request.completions)
    return Scores(rewards=[reward] * count, components=[{TIMED_OUT_COMPONENT: reward}] * count, run_s=run_s)
