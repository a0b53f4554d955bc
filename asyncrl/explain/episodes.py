"""Events of an episode, in words: its calls of the policy, its turns, its rewards and its end; see story_words.py.

Calls are numbered as they came, turns as they were answered, both from 0, as ChatReply.node has it. Fails as
story_words.py does. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl.text.numbers import duration, fixed

STAGES_SAID = 4
FORKS = {
    "root": "forks: it has other tools or template options",
    "branch": "forks: its messages go on from no answer",
    "edited": "forks: what comes before an answer was changed",
    "assistant": "forks: it holds an answer that was not sampled here",
    "history": "forks: the chat template renders an earlier answer in another way",
    "cut": "forks: an answer was cut, and the chat template cannot go on from that",
    "no-extension": "forks: the chat template cannot go on from the answer",
}
"""Words for forks, by the causes of rollouter/episode/conversation.py."""


def _began(attempt: int, host: str) -> str:
    return f"episode began at {host}" + (f", attempt {attempt + 1}" if attempt else "")


def _asked(call: int, version: int, waited: float, cause: str, parent: int | None, tokens: int, new: int) -> str:
    kind, _, fork = cause.partition(":")
    why = FORKS.get(fork, fork) if kind == "fork" else "the first" if parent is None else f"goes on from turn {parent}"
    context = f"{tokens} tokens of context, {new} of them new"
    return f"call {call} ({why}): {context}; generation began at version {version} after {duration(waited)}"


def _answered(
    call: int, turn: int, tokens: int, reason: str, spans: list[list[int]], tools: list[str], malformed: int
) -> str:
    said = f"call {call} gave turn {turn}: {sampled(tokens, reason, spans)}"
    if tools:
        said += f"; it calls {', '.join(tools)}"
    return said + (f"; {malformed} calls of tools cannot be read" if malformed else "")


def _refused(call: int, reason: str) -> str:
    return f"call {call} was refused: {reason}"


def _credited(turn: int, value: float) -> str:
    return f"turn {turn} is worth {fixed(value, 3)}"


def _ended(outcome: str, turns: int, reward: float | None, stages: Mapping[str, float]) -> str:
    worth = "" if reward is None else f", reward {fixed(reward, 3)}"
    longest = sorted(stages.items(), key=lambda stage: -stage[1])[:STAGES_SAID]
    where = ", ".join(f"{stage} {duration(seconds)}" for stage, seconds in longest)
    return f"episode ended ({outcome}) with {turns} turns{worth}" + (f"; {where}" if where else "")


def sampled(tokens: int, reason: str, spans: list[list[int]]) -> str:
    """Tokens of an answer, the reason of its end, and the number of them that each version sampled, in words."""
    by_version = ", ".join(f"{end - start} at version {version}" for version, start, end in spans)
    return f"{tokens} tokens ({reason}): {by_version}"


EPISODE_SAYS: dict[str, Callable[..., str]] = {
    "episode": _began,
    "asked": _asked,
    "answered": _answered,
    "refused": _refused,
    "turn reward": _credited,
    "ended": _ended,
}
"""Words by the events of rollouter/serving/group_events.py."""
