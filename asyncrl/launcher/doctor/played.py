"""The report on one episode of the user's agent, as lines and as an object. Pure.

A call of the policy after the first *forks* if its context does not begin with the tokens of an earlier answer.
``Cause``, in rollouter/episode/conversation.py, lists the reasons.

Invariant: the report fails exactly if a run would get no trajectory from the agent, or would refuse one of its
requests. Anything that only costs tokens, or does not do what the agent expects, is a warning.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.observe.group_log import FORKS

CAUSES = {
    "root": "begins the conversation",
    "extend": "extends the tokens of an answer",
    **FORKS,
}
REMEDIES = {
    "fork:root": "send the same tools with each call",
    "fork:branch": "right for a sub-agent; else send the whole conversation with each call",
    "fork:edited": "only append messages",
    "fork:assistant": "send answers back unchanged: text, and the ids of calls",
    "fork:history": 'set chat.history = "sampled", if the model is served so',
    "fork:cut": "raise rollout.max_tokens, or the agent's own max_tokens",
}


@dataclass(frozen=True, kw_only=True)
class PlayedTurn:
    """One call of the policy that was answered."""

    cause: str
    """A Cause: how its context relates to earlier calls."""
    goes_on: bool
    """Whether its context begins with the context and all tokens of an earlier answer."""
    context_tokens: int
    new_tokens: int
    """Context tokens behind the longest prefix that it shares with an earlier call."""
    sampled_tokens: int
    calls: list[str]
    trained: bool

    @property
    def forked(self) -> bool:
        """Whether it is not the first call, and its context continues no earlier answer."""
        return self.cause.startswith("fork:") and not self.goes_on

    @property
    def relation(self) -> str:
        """How the call relates to the calls before it."""
        if self.cause.startswith("fork:") and self.goes_on:
            return f"{CAUSES['extend']}, though {CAUSES[self.cause]}"
        return ("fork: " if self.forked else "") + CAUSES[self.cause]


@dataclass(frozen=True, kw_only=True)
class Played:
    """One attempt at one task."""

    failure: str
    """Why the attempt gave no trajectory; empty if it gave one."""
    outcome: str
    """Why it ended: ``stop`` by itself; ``turns``, ``length`` or ``time`` by a limit."""
    reward: float | None
    """Reward of the trajectory; None if the agent gave none, or after a failure."""
    turn_rewards: int
    """Number of rewards that the agent gave to single turns."""
    turns: list[PlayedTurn]
    sequences: list[int]
    """Number of tokens of each trained sequence, with its context."""
    cost_factor: float
    """Tokens that the engine computes, divided by those of a conversation without forks."""
    dialects: dict[str, int]
    """Requests by path; empty if the agent is Python code that calls its client."""
    streamed: int
    retries: int
    """Requests that repeat an earlier one."""
    ignored: list[str]
    """Fields of requests that a run ignores."""
    relaxed: list[str]
    """Fields of requests that a run does not enforce."""
    refused: dict[str, str]
    """By field that a run refuses, the error that the agent got."""
    hidden_tools: list[str] = field(default_factory=list)
    """Names of the agent's tools that the chat template does not show to the model."""
    seconds: dict[str, float]
    """Seconds to ``first call``, ``last answer`` and ``end``, each from the one before."""
    printed: str

    @property
    def works(self) -> bool:
        """Whether a run can train on the agent."""
        return not self.failure and not self.refused

    @property
    def forks(self) -> dict[str, int]:
        """Number of forked calls by cause."""
        return dict(Counter(turn.cause for turn in self.turns if turn.forked))

    def as_object(self) -> dict[str, Any]:
        """The attempt as an object, for programs."""
        return asdict(self) | {"works": self.works, "forks": self.forks}

    def lines(self, *, scored: bool) -> list[str]:
        """Format the attempt: its calls, facts, problems and the verdict. ``scored``: the run has a reward function."""
        lines = [*self._calls(), "", *self._facts(), ""]
        problems = [*self._failures(), *self._warnings(scored)]
        if self.failure and self.printed.strip():
            problems += ["last output of the agent:", *(f"  | {line}" for line in self.printed.splitlines()[-10:])]
        verdict = "a run can train on this agent" if self.works else "a run cannot train on this agent as it is"
        return [*lines, *problems, verdict]

    def _calls(self) -> list[str]:
        if not self.turns:
            return ["no call of the policy was answered"]
        lines = ["call  context    new  sampled"]
        for number, turn in enumerate(self.turns):
            row = f"{number:4} {turn.context_tokens:8} {turn.new_tokens:6} {turn.sampled_tokens:8}"
            tools = f"; calls {', '.join(turn.calls)}" if turn.calls else ""
            untrained = "; not trained" if not turn.trained else ""
            lines.append(f"{row}  {turn.relation}{tools}{untrained}")
        return lines

    def _facts(self) -> list[str]:
        forked = sum(turn.forked for turn in self.turns)
        paths = [f"{path} ({count})" for path, count in self.dialects.items()] or ["the client of asyncrl"]
        requests = f"asked over {', '.join(paths)}"
        if self.dialects:
            requests += f", {self.streamed} of them streamed; {self.retries} retries"
        labels = {
            "first call": "to the first call",
            "last answer": "to the last answer",
            "end": "from there to its end",
        }
        spans = [f"{self.seconds[name]:.1f} s {words}" for name, words in labels.items() if name in self.seconds]
        reward = "none" if self.reward is None else f"{self.reward:g}"
        return [
            f"{len(self.turns)} calls, {forked} forked: the engine computes {self.cost_factor:.2f} times the tokens of "
            f"a conversation without forks, the learner {sum(self.sequences)} in {len(self.sequences)} sequences",
            requests,
            f"outcome {self.outcome}, reward {reward}, {self.turn_rewards} rewards of turns",
            *([", ".join(spans)] if spans else []),
        ]

    def _failures(self) -> list[str]:
        failed = [f"fail  {self.failure}"] if self.failure else []
        return failed + [f"fail  refused (400): {text}" for text in self.refused.values()]

    def _warnings(self, scored: bool) -> list[str]:
        warnings = []
        for cause, count in self.forks.items():
            remedy = f"; {REMEDIES[cause]}" if cause in REMEDIES else ""
            warnings.append(f"{count} forked: {CAUSES[cause]}{remedy}")
        if self.hidden_tools:
            warnings.append(
                f"the chat template does not show the model these tools: {', '.join(self.hidden_tools)}; describe them "
                "in a system message, or train a model whose template shows tools (asyncrl-doctor --chat)"
            )
        if self.ignored:
            warnings.append(f"ignored: {', '.join(self.ignored)}: the run's own sampling applies")
        if self.relaxed:
            warnings.append(
                f"relaxed: {', '.join(self.relaxed)}: answers may break it, and the agent must cope with that"
            )
        if self.outcome != "stop":
            warnings.append(f"a limit ended it ({self.outcome}), and it would be scored as truncated")
        if self.reward is None and not self.failure and not scored:
            warnings.append("it gave no reward; a run needs a function that scores it (reward.function)")
        return [f"warn  {text}" for text in warnings]
