"""Answers of the server to its page: steps, groups, trajectories, tokens, and the places of a text. No sockets.

``Answers.answer`` takes a name and the parameters of the URL, and returns an object for JSON. Invariant: the limits
MOST_* and LONGEST_* below bound an answer, except that a search takes all hits of a file. An answer says how many
groups, messages and characters it leaves out. Its text holds no control character except newlines and tabs
(core/formatting.py), so that the page shows a hostile rollout as text. Nothing in the run changes.

Fails with BadRequest for a parameter, and with NotFound for what the run does not hold. A file that cannot be read
raises OSError.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from asyncrl.core.formatting import printable
from asyncrl.observe.metrics_line import Line, number_in
from asyncrl.observe.sample_text import message_parts, title_of
from asyncrl.observe.samples import (
    TRAINED,
    SampleChoice,
    SampleGroup,
    SampleSequence,
    SampleTrajectory,
    TokenGroup,
    TokenTrajectory,
    groups_in,
    sample_files,
)
from asyncrl.view.steps import StepIndex, trained_version

MOST_STEPS = 500
MOST_GROUPS = 200
MOST_RESPONSES = 256
MOST_MESSAGES = 1000
MOST_COMPONENTS = 64
LONGEST_TEXT = 100_000
"""Most characters of one text: half of them its beginning, half its end."""
LONGEST_TRAJECTORY = 4_000_000
"""Most characters of a conversation."""
MOST_TOKENS = 2000
"""Tokens in an answer; the page asks for the next ones."""
MOST_SPANS = 500
MOST_HITS = 50
LONGEST_QUERY = 1000
SEARCH_S = 2.0
"""Seconds after which a search returns, with the place at which the next one continues."""
EXCERPT = 80
"""Characters before and after a hit."""

UNKNOWN = (None, None, None)
"""Log-prob, learner's log-prob and entropy of a token that has none."""

Parameters = Mapping[str, str]
Decode = Callable[[int], str]
Answer = dict[str, Any]


class BadRequest(Exception):
    """A parameter is missing or invalid."""


class NotFound(Exception):
    """The run does not hold it."""


class Answers:
    """Answers about one run, or about two that are compared."""

    def __init__(self, runs: Sequence[Path], decoders: Sequence[Decode | None] = ()) -> None:
        self._runs = runs
        self._decoders = decoders or [None] * len(runs)
        """By run: the text of a token; None if its tokenizer is not here."""
        self._steps = [StepIndex(run) for run in runs]
        self._last: tuple[list[tuple[Path, int, int]], list[TokenGroup]] = ([], [])
        """The files of the step that was read last, each with its size and time, and their groups."""
        self._answers: dict[str, Callable[[Parameters], Answer]] = {
            "runs": self._all_runs,
            "steps": self._page_of_steps,
            "groups": self._groups,
            "trajectory": self._trajectory,
            "tokens": self._tokens,
            "search": self._search,
            "same": self._same,
        }

    def answer(self, name: str, parameters: Parameters) -> Answer:
        """Answer ``name`` (runs, steps, groups, trajectory, tokens, search, same). Raises BadRequest or NotFound."""
        if name not in self._answers:
            raise NotFound(f"{printable(name[:80])}: there is no such page")
        return self._answers[name](parameters)

    def newest_step(self, run: int = 0) -> int:
        """The newest step with recorded trained groups. Raises NotFound without any."""
        for path in sample_files(self._runs[run], SampleChoice(kind=TRAINED)):
            if groups := groups_in(path, SampleGroup):
                return groups[0].step or 0
        raise NotFound(f"{self._runs[run]}: no groups are recorded")

    # --- steps and groups ---

    def _all_runs(self, parameters: Parameters) -> Answer:
        return {"runs": [printable(run.resolve().name) for run in self._runs]}

    def _page_of_steps(self, parameters: Parameters) -> Answer:
        """The ``count`` steps up to step ``until``, which is included (by default the newest), the newest first.

        In the answer ``before`` is the number of earlier steps, ``count`` that of all steps.
        """
        index = self._steps[self.run_of(parameters)]
        index.refresh()
        count = min(_number(parameters, "count", 100), MOST_STEPS)
        end = index.place(_number(parameters, "until", 1 << 60) + 1)
        # The line before the first gives the first its differences.
        first = max(0, end - count)
        lines = index.lines(first - 1, end)
        shown = [_step(line, before) for before, line in zip([None, *lines], lines, strict=False)]
        return {"steps": shown[::-1][: end - first], "before": first, "count": index.count()}

    def _groups(self, parameters: Parameters) -> Answer:
        """The recorded groups of a step; ``left_out`` is the number of groups beyond MOST_GROUPS."""
        run, step = self.run_of(parameters), _number(parameters, "step")
        version = self._trained_version(run, step)
        groups = self._groups_of(run, step)
        shown = [
            {
                "title": printable(title_of(group)),
                "kind": printable(group.kind),
                "uid": printable(group.uid),
                "reason": printable(group.reason[:EXCERPT]),
                "prompt": _excerpt(group.prompt),
                "trajectories": [_summary(each, group, version) for each in group.trajectories[:MOST_RESPONSES]],
            }
            for group in groups[:MOST_GROUPS]
        ]
        return {"step": step, "groups": shown, "left_out": max(0, len(groups) - MOST_GROUPS)}

    def _trajectory(self, parameters: Parameters) -> Answer:
        """One trajectory: its texts up to the limits, the samples of its group, and the spans of its sequences."""
        run, step = self.run_of(parameters), _number(parameters, "step")
        group, trajectory = self._find(run, step, parameters)
        room = LONGEST_TRAJECTORY
        messages = []
        for message in map(message_parts, trajectory.messages[:MOST_MESSAGES]):
            parts = [{"kind": part.kind, "title": part.title, "text": _text(part.text)} for part in message.parts]
            room -= sum(len(part["text"]) for part in parts)
            if room < 0:
                break
            messages.append({"role": message.role, "name": message.name, "parts": parts})
        return {
            **_summary(trajectory, group, self._trained_version(run, step)),
            "run": printable(self._runs[run].resolve().name),
            "step": step,
            "title": printable(title_of(group)),
            "version": group.version,
            "prompt": _text(group.prompt),
            "text": _text(trajectory.text),
            "judgement": _text(trajectory.judgement),
            "messages": messages,
            "left_out": len(trajectory.messages) - len(messages),
            "samples": [each.sample for each in group.trajectories[:MOST_RESPONSES]],
            "sequences": [
                {
                    "tokens": len(each.tokens),
                    "spans": [_span(span) for span in each.spans[:MOST_SPANS]],
                    "scored": bool(each.trainer_logprobs),
                }
                for each in trajectory.sequences[:MOST_RESPONSES]
            ],
        }

    # --- tokens ---

    def _tokens(self, parameters: Parameters) -> Answer:
        """MOST_TOKENS tokens of a sequence from ``start`` on, each [id, text, ...] with the rest of ``_token_rows``."""
        run = self.run_of(parameters)
        _, trajectory = self._find(run, _number(parameters, "step"), parameters)
        at, start = _number(parameters, "sequence", 0), _number(parameters, "start", 0)
        if at >= len(trajectory.sequences):
            raise NotFound(f"the trajectory has {len(trajectory.sequences)} sequences with tokens")
        rows = _token_rows(trajectory.sequences[at])
        shown = [
            [token, _text_of(token, self._decoders[run]), *facts] for token, *facts in rows[start : start + MOST_TOKENS]
        ]
        return {"tokens": shown, "start": start, "count": len(rows)}

    # --- search ---

    def _search(self, parameters: Parameters) -> Answer:
        """The prompts and trajectories whose text holds ``q``, in any case of letters, the newest first."""
        query = parameters.get("q", "")
        if not 0 < len(query) <= LONGEST_QUERY:
            raise BadRequest(f"q: a text of 1 to {LONGEST_QUERY} characters")
        pattern = re.compile(re.escape(query), re.IGNORECASE)

        def hits(group: SampleGroup) -> Iterator[Answer]:
            if match := pattern.search(group.prompt):
                yield {"sample": None, **_around(match)}
            for each in group.trajectories:
                if match := next(filter(None, map(pattern.search, _texts(each))), None):
                    yield {"sample": each.sample, **_around(match)}

        return self._scan(parameters, hits)

    def _same(self, parameters: Parameters) -> Answer:
        """The groups of the run ``other`` with the prompt of one group of ``run``, the newest first."""
        run, step, uid = self.run_of(parameters), _number(parameters, "step"), parameters.get("uid", "")
        group = self._find_group(run, step, uid)

        # Here ``other`` is a group of that run.
        def hits(other: SampleGroup) -> Iterator[Answer]:
            if other.prompt == group.prompt:
                yield {"sample": None, "title": printable(title_of(other))}

        return self._scan({**parameters, "run": parameters.get("other", "0")}, hits)

    def _scan(self, parameters: Parameters, hits: Callable[[SampleGroup], Iterator[Answer]]) -> Answer:
        """Collect hits in samples/, the newest file first. The parameter ``after`` names the first file to read.

        The limits SEARCH_S and MOST_HITS are checked before each further file, so one file may exceed them. In the
        answer ``next`` is the first file that was not read, which the next request gives as ``after``; None at the end.
        """
        run, after = self.run_of(parameters), parameters.get("after", "")
        paths = sample_files(self._runs[run], SampleChoice())
        names = [path.name for path in paths]
        begin = names.index(after) if after in names else 0
        until = time.monotonic() + SEARCH_S
        found: list[Answer] = []
        for path in paths[begin:]:
            # The file ``after`` is read in any case, so that each request makes progress.
            if (len(found) >= MOST_HITS or time.monotonic() > until) and path.name != after:
                return {"hits": found, "next": path.name}
            for group in groups_in(path, SampleGroup):
                place = {
                    "run": run,
                    "step": group.step or 0,
                    "uid": printable(group.uid),
                    "kind": printable(group.kind),
                }
                found += [place | hit for hit in hits(group)]
        return {"hits": found, "next": None}

    # --- finding ---

    def run_of(self, parameters: Parameters) -> int:
        """The number of the run that ``run`` names; 0 by default. Raises BadRequest or NotFound."""
        run = _number(parameters, "run", 0)
        if run >= len(self._runs):
            raise NotFound(f"run {run}: asyncrl-view shows {len(self._runs)}")
        return run

    def _trained_version(self, run: int, step: int) -> int | None:
        self._steps[run].refresh()
        line = self._steps[run].line(step)
        return None if line is None else trained_version(line)

    def _groups_of(self, run: int, step: int) -> list[TokenGroup]:
        """Read the groups of a step. A reader asks about one step several times, so the last one is kept."""
        paths = sample_files(self._runs[run], SampleChoice(step=step))
        state = [(path, stat.st_size, stat.st_mtime_ns) for path in paths for stat in (path.stat(),)]
        known, groups = self._last
        if known != state:
            groups = [group for path in paths for group in groups_in(path, TokenGroup)]
            self._last = state, groups
        return groups

    def _find_group(self, run: int, step: int, uid: str) -> TokenGroup:
        found = next((group for group in self._groups_of(run, step) if printable(group.uid) == uid), None)
        if found is None:
            raise NotFound(f"step {step} has no recorded group {printable(uid[:EXCERPT])}")
        return found

    def _find(self, run: int, step: int, parameters: Parameters) -> tuple[TokenGroup, TokenTrajectory]:
        """Find the group ``uid`` of a step, and its trajectory ``sample``; by default its first one."""
        group = self._find_group(run, step, parameters.get("uid", ""))
        sample = _number(parameters, "sample", -1)
        if sample < 0 and group.trajectories:
            return group, group.trajectories[0]
        found = next((each for each in group.trajectories if each.sample == sample), None)
        if found is None:
            raise NotFound(f"the group has no trajectory {sample}")
        return group, found


def _number(parameters: Parameters, name: str, otherwise: int | None = None) -> int:
    """A parameter as a whole number; ``otherwise``, unless None, if it is missing or empty. Raises BadRequest."""
    text = parameters.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise BadRequest(f"{name}: a whole number, not {printable(text[:EXCERPT])!r}")
    return int(text)


def _step(line: Line, before: Line | None) -> Answer:
    """The numbers of a step. Failures are those since the step ``before``."""
    failed = number_in(line, "rollout/failed_attempts")
    if failed is not None and before is not None and before.get("start") == line.get("start"):
        failed -= number_in(before, "rollout/failed_attempts") or 0.0
    return {
        "step": line["step"],
        "reward": number_in(line, "reward/mean"),
        "staleness": number_in(line, "staleness/token_mean"),
        "length": number_in(line, "rollout/length_mean"),
        "failures": failed,
    }


def _summary(trajectory: TokenTrajectory, group: SampleGroup, version: int | None) -> Answer:
    """The numbers by which trajectories are sorted, and the rest of a line in the list.

    Staleness is in versions, of the oldest token of a trained trajectory; surprise is the mean of -log p, in nats, over
    the sampled tokens.
    """
    logprobs = [value for each in trajectory.sequences for value in each.logprobs if value is not None]
    versions = [version for each in trajectory.sequences for version, *_, role in each.spans if role == "sampled"]
    components = list(trajectory.components.items())[:MOST_COMPONENTS]
    return {
        "uid": printable(group.uid),
        "kind": printable(group.kind),
        "sample": trajectory.sample,
        "reward": trajectory.reward,
        "components": {printable(name[:EXCERPT]): value for name, value in components},
        "length": trajectory.length,
        "turns": trajectory.turns,
        "resumes": trajectory.resumes,
        "finish_reason": printable(trajectory.finish_reason[:EXCERPT]),
        "staleness": version - min(versions) if version is not None and versions and group.kind == TRAINED else None,
        "surprise": -sum(logprobs) / len(logprobs) if logprobs else None,
        "excerpt": _excerpt(trajectory.text),
    }


def _token_rows(sequence: SampleSequence) -> list[tuple[int, float | None, int, str, float | None, float | None]]:
    """(id, log-prob, version, role, learner's log-prob, entropy) of each token. Context has no numbers, version -1."""
    numbers = zip_longest(sequence.logprobs, sequence.trainer_logprobs, sequence.entropies)
    rows: list[tuple[int, float | None, int, str, float | None, float | None]] = []
    for version, start, end, role in sequence.spans:
        # Contiguous spans begin where the last one ended; others are damaged.
        if start != len(rows):
            break
        for token in sequence.tokens[start : max(end, start)]:
            logprob, by_learner, entropy = next(numbers, UNKNOWN) if role == "sampled" else UNKNOWN
            rows.append((token, logprob, version, printable(role[:EXCERPT]), by_learner, entropy))
    return rows


def _text_of(token: int, decode: Decode | None) -> str | None:
    """The text of a token; None if it is unknown."""
    if decode is None:
        return None
    try:
        return printable(decode(token), keep="\n\t")
    except Exception:
        # Another tokenizer than that of the run, which does not know the id, may raise anything.
        return None


def _span(span: tuple[int, int, int, str]) -> list[Any]:
    version, start, end, role = span
    return [version, start, end, printable(role[:EXCERPT])]


def _texts(trajectory: SampleTrajectory) -> Iterator[str]:
    """The texts of a trajectory in which a search looks."""
    yield from (trajectory.text, trajectory.judgement)
    for message in map(message_parts, trajectory.messages):
        for part in message.parts:
            yield part.title
            yield part.text


def _around(match: re.Match[str]) -> Answer:
    """The text that matches, and up to EXCERPT characters ``before`` and ``after`` it."""
    begin, end = match.span()
    return {
        "before": printable(match.string[max(0, begin - EXCERPT) : begin]),
        "match": printable(match[0]),
        "after": printable(match.string[end : end + EXCERPT]),
    }


def _excerpt(text: str) -> str:
    """The beginning of a text, on one line."""
    return printable(" ".join(text[: 4 * EXCERPT].split())[: 2 * EXCERPT])


def _text(text: str) -> str:
    """A text as the page shows it. Beyond LONGEST_TEXT a note takes the place of its middle."""
    if (left_out := len(text) - LONGEST_TEXT) > 0:
        half = LONGEST_TEXT // 2
        text = f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"
    return printable(text, keep="\n\t")
