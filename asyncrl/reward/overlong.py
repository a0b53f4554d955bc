"""The penalty of responses that come near their limit of length, under ``reward.truncated = "penalty"``. Pure."""

from __future__ import annotations

from asyncrl.config.training import RewardConfig
from asyncrl.messages.reward import PENALTY_COMPONENT, Score, Scores


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
    """Under ``truncated = "penalty"``, add the overlong penalty of each completion to its reward, and as a component.

    A penalty of 0 is a component too. Under another value the scores stay as they are. The scores of an eval set stay
    too, because it has its own limit of length; its uids contain "@".
    """
    if config.truncated != "penalty" or "@" in request.uid:
        return scores
    overlong = config.overlong
    penalties = [
        overlong_penalty(each.tokens, max_tokens=max_tokens, margin_tokens=overlong.margin_tokens, scale=overlong.scale)
        for each in request.completions
    ]
    rewards = [reward + penalty for reward, penalty in zip(scores.rewards, penalties, strict=True)]
    components = [
        {**parts, PENALTY_COMPONENT: penalty} for parts, penalty in zip(scores.components, penalties, strict=True)
    ]
    return Scores(rewards=rewards, components=components, run_s=scores.run_s)
