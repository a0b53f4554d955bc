"""Text of tokens while they are being sampled, piece by piece. Pure.

Invariant: the pieces together are the beginning of the text of all tokens, and end before a character that may still
lack some of its bytes. A piece costs as much as the tokens since the last one that ended with a whole character, and
those of the one before it, which are its context: the text of a token may depend on what stands in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class GrowingText:
    """The text that ``decode`` makes of tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context = 0
        """The first token that is decoded."""
        self._read = 0
        """The first token behind the last one that ended with a whole character."""
        self._told = 0
        """Characters behind that one which are told."""

    def more(self, tokens: Sequence[int]) -> str:
        """The text that is new with ``tokens``, all there are by now."""
        before = len(self._decode(tokens[self._context : self._read])) + self._told
        text = self._decode(tokens[self._context :])
        whole = text.rstrip(_INCOMPLETE)
        new = whole[before:]
        if len(whole) == len(text):
            self._context, self._read, self._told = self._read, len(tokens), 0
        else:
            self._told += len(new)
        return new
