"""The tokens that engines compute again because the weights have changed. Pure.

An update drops keys and values. Aborted requests are submitted again, prompt and partial response; kept ones are
computed again where they stand; and a call of a conversation finds nothing of the calls before it. Tokens count
that an engine had computed before the update and computes once more. The costs of an engine's death are none of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    """Tokens that an engine holds of a submission."""

    prompt: int
    lost: int
    tokens: int = 0
    """Tokens with keys and values; 0 until the first is sampled."""


class Reprefill:
    """Counter of the tokens that one rollouter's engines compute again."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens computed again, since its start."""
        self._held: dict[str, _Held] = {}

    def submitted(self, id: str, prompt: int, lost: int) -> None:
        """A submission begins with ``prompt`` tokens; the engine computed the first ``lost`` under older weights."""
        assert lost <= prompt
        self._held[id] = _Held(prompt, lost)

    def sampled(self, id: str, tokens: int, cached: int) -> None:
        """The submission has so many ``tokens`` more; of its prompt ``cached`` were in the prefix cache."""
        held = self._held[id]
        if not held.tokens:
            held.tokens = held.prompt
            # Not the prompt that a sibling has brought into the prefix cache under the new weights.
            self.tokens += max(0, held.lost - cached)
        held.tokens += tokens

    def ended(self, id: str) -> None:
        """The submission is over."""
        del self._held[id]

    def dropped(self) -> None:
        """New weights have taken the keys and values of all submissions, which go on."""
        # All of them: an engine does not say what of kept requests its prefix cache still has.
        self.tokens += sum(held.tokens for held in self._held.values())
