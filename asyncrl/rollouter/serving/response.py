"""A response in the making, put together from one or more submissions to engines. Pure.

Invariants: tokens, log-probs and version spans always cover the same positions; every token keeps the log-prob and the
version that sampled it, also over aborts, resumes and the death of an engine; never more than ``max_tokens``. A token
is given up only where nobody can say which version sampled it: see ``cut_submission``. Stop tokens are the engine's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.messages.groups import VersionSpan
from asyncrl.stops import Stops

Decode = Callable[[Sequence[int]], str]
MARGIN = 8
"""Characters at the beginning of a window that may differ from those of the whole text: a tokenizer may drop a space
there, join it with punctuation, or see only the last bytes of a character."""


@dataclass(slots=True, kw_only=True)
class Response:
    """Tokens held so far."""

    max_tokens: int
    stops: Stops = field(default_factory=Stops)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    submissions: int = 0
    computed: int = 0
    """Tokens, from the first of its prompt on, that the engine has computed; an engine that has died has none."""
    computed_at: int = -1
    """The version under which the engine computed them."""
    _submission_start: int = 0
    _submission_version: int = -1

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled."""
        return self.max_tokens - len(self.tokens)

    def lost(self, version: int) -> int:
        """Tokens computed under older weights than those of ``version``."""
        return self.computed if self.computed_at < version else 0

    def submitted(self, version: int) -> None:
        """A new submission, begun under ``version``, samples the next tokens."""
        assert self.finish_reason is None
        assert self.remaining > 0
        self.submissions += 1
        self._submission_start = len(self.tokens)
        self._submission_version = version

    def extend(self, tokens: Sequence[int], logprobs: Sequence[float], decode: Decode) -> bool:
        """Take a delta; True when a stop string ends the response within it."""
        assert len(tokens) == len(logprobs)
        before = len(self.tokens)
        room = self.remaining
        self.tokens.extend(tokens[:room])
        self.logprobs.extend(logprobs[:room])
        strings = self.stops.strings
        if not strings:
            return False
        # Over all submissions, so that one that straddles a resume still stops, and no more text than one can reach
        # back over, so that the work does not grow with the response.
        start = self._window(before, decode)
        if not _contains(decode(self.tokens[start:]), strings):
            return False
        # The shortest prefix that holds a stop string; the text grows with the tokens, so it can be bisected.
        low, high = before + 1, len(self.tokens)
        while low < high:
            middle = (low + high) // 2
            if _contains(decode(self.tokens[start:middle]), strings):
                high = middle
            else:
                low = middle + 1
        del self.tokens[low:]
        del self.logprobs[low:]
        self.finish_reason = "stop"
        return True

    def _window(self, end: int, decode: Decode) -> int:
        """The first of so many tokens before ``end`` that no stop string which ends behind it begins before them."""
        wanted = max(map(len, self.stops.strings)) + MARGIN
        count = wanted
        while count < end and len(decode(self.tokens[end - count : end])) < wanted:
            # Tokens may be bytes of a character, or have no text.
            count *= 2
        return max(0, end - count)

    def end_submission(
        self, reason: Literal["stop", "length", "abort"] | None, spans: Sequence[VersionSpan] = ()
    ) -> None:
        """The submission is over: ``spans`` count from its first token.

        Without spans the submission was all under the version it began with.
        """
        start, end = self._submission_start, len(self.tokens)
        if not spans:
            spans = [VersionSpan(self._submission_version, 0, end - start)]
        for span in spans:
            # Spans are of all that was sampled; what a stop string or the limit has cut off is no part of the response.
            first, last = start + span.start, min(start + span.end, end)
            if first >= last:
                continue
            previous = self.spans[-1] if self.spans else None
            if previous and previous.version == span.version and previous.mixed_kv == span.mixed_kv:
                self.spans[-1] = VersionSpan(span.version, previous.start, last, span.mixed_kv)
            else:
                self.spans.append(VersionSpan(span.version, first, last, span.mixed_kv))
        assert (self.spans[-1].end if self.spans else 0) == end, "spans must cover the response"
        if self.finish_reason is None:
            if reason == "stop":
                self.finish_reason = "stop"
            elif reason == "length" or self.remaining <= 0:
                self.finish_reason = "length"

    def cut_submission(self, known: int) -> None:
        """The submission is over without a last word on its versions: the engine died, or the call was given up.

        The first ``known`` tokens of the response are those that were handed over before the weights changed under it,
        all sampled under the version it began with. Those after them, which there are only where the engine goes on
        over a load (on_update = keep), are forgotten: nobody can say whether they were sampled before or after it.
        """
        if known < len(self.tokens):
            self.finish_reason = None
            # They stand at the end of all that was computed.
            self.computed = max(0, self.computed - (len(self.tokens) - known))
            del self.tokens[known:]
            del self.logprobs[known:]
        self.end_submission("abort")


def _contains(text: str, stops: Sequence[str]) -> bool:
    return any(stop in text for stop in stops)
