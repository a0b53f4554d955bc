"""Checks of tokenizer, chat template, prompts and conversations, which are read and tokenized as in the run.

A *set* is the training prompts (``data``), one source of their mixture (``data.source.NAME``), or the prompts of one
evaluation (``eval.NAME.data``). Conversations are the rows of ``sft.data``.

A tokenizer may bring its own code, and libraries that read rows import slowly or crash on a broken file. So a process
of its own loads both (process.py) under a deadline. It answers with findings, and with sample rows on which the reward
function is tried. A chat template is a program too and may hang. So a thread checks it under a deadline, and the
process ends without waiting for the thread.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.training import PromptsConfig
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.core.formatting import printable
from asyncrl.data.rows import RawRow
from asyncrl.dataloader.left_out import BadRow, TooFewUsable, remarks
from asyncrl.dataloader.prompts import PromptSet, check_row, collect, follows, open_source, unpack
from asyncrl.launcher.checks.findings import Finding, KnownPrompts, fail, ok, warn
from asyncrl.launcher.checks.model import window_of
from asyncrl.launcher.checks.process import NoAnswer, call
from asyncrl.launcher.checks.scoring_models import check_scoring_models
from asyncrl.text.chat.probe import ChatReport
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.chat.template import PromptEncoder
from asyncrl.text.sft.conversations import load_conversations
from asyncrl.text.stops import resolve_stops
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of

READ = "asyncrl.launcher.checks.inputs:read_inputs"
READ_S = 45.0
"""Deadline of the process (s); importing transformers, for a tokenizer that needs it, takes most of it."""
SETS_S = 5.0
"""Longest time for all sets (s), enough to read and tokenize two hundred thousand short rows."""
TOKENIZED_AT_ONCE = 100
"""Prompts that are tokenized between two looks at the clock."""
CHEAP_ROWS = 10_000
"""Synthetic sets of so few rows need no process of their own."""
SAMPLES = 3
"""Rows of each training set on which the reward function is tried; each evaluation adds one."""
LOOKED_AT = 1000
"""Rows at the start of a set in which ``first_rows`` looks for usable ones."""
SHOWN_START, SHOWN_END = 300, 120
"""Characters at the start and at the end of a prompt that a finding shows."""
MODEL = "model.path"
STOPS = "rollout.stop_token_ids"
MORE = "asyncrl-doctor --chat CONFIG shows the details"
MEND = "correct the template, or take another model"
CONVERSATIONS = "sft.data"


class Sample(msgspec.Struct, frozen=True):
    """A row as a reward function gets it. ``key`` is the configuration key of its set, ``place`` is FILE:LINE."""

    key: str
    place: str
    prompt: str
    row: dict[str, Any]
    source: str = ""
    """Name of its source in a mixture."""


class Inputs(msgspec.Struct, frozen=True):
    """Findings, and sample rows for the reward function."""

    findings: list[Finding] = []
    samples: list[Sample] = []


async def check_inputs(
    config: Config,
    *,
    with_rows: bool = True,
    for_learner: bool = False,
    known: KnownPrompts | None = None,
    limit_s: float = READ_S,
) -> Inputs:
    """Check the tokenizer and, if the run plays episodes, the chat template. Never raises.

    ``with_rows`` adds each set of prompts, for the host of the dataloader. A finding then fails if training prompts
    without a mixture differ from ``known``, those of the run that is resumed. ``for_learner`` adds the conversations
    and the scoring models, for the learner's rank 0. A process of its own runs the checks, unless they need only
    asyncrl's own code and few rows. The process is killed after ``limit_s`` (with episodes, plus chat.check_timeout_s).
    That gives a warning, because the run itself waits longer.
    """
    sets = config.prompt_sets if with_rows else {}
    synthetic = all(data.source == "synthetic" and data.size <= CHEAP_ROWS for data in sets.values())
    if not for_learner and config.model.path is None and synthetic:
        return read_inputs(config, with_rows=with_rows, for_learner=False, known=known)
    keys = [MODEL] * (config.model.path is not None) + list(sets)
    keys += [CONVERSATIONS] * (for_learner and config.sft.data is not None)
    key = ", ".join(keys)
    if config.episode.kind != "single":
        limit_s += config.chat.check_timeout_s
    try:
        return await call(
            READ, Inputs, limit_s, config=config, with_rows=with_rows, for_learner=for_learner, known=known
        )
    except TimeoutError:
        text = f"the tokenizer and the rows were not read within {limit_s:g} s"
        fix = "copy these files to a faster disk; the run itself waits longer for them"
        return Inputs([warn("data", text, fix, key=key)])
    except NoAnswer as error:
        fix = "see what is wrong with these files, or the package that reads them"
        return Inputs([fail("data", f"the process that reads them ended: {error}", fix, key=key)])


def read_inputs(
    config: Config, *, with_rows: bool, for_learner: bool = False, known: KnownPrompts | None = None
) -> Inputs:
    """Run the checks of ``check_inputs`` in this process; that function explains the arguments."""
    findings, samples, tokenizer = list[Finding](), list[Sample](), None
    # The check of the model reports a folder that is missing.
    if config.model.path is None or Path(config.model.path).is_dir():
        finding, tokenizer = _check_tokenizer(config)
        findings.append(finding)
        if tokenizer is not None and config.episode.kind != "single":
            findings.append(check_chat(config, tokenizer))
    sets = config.prompt_sets if with_rows else {}
    checked: list[list[Finding]] = []
    end = time.monotonic() + SETS_S
    # Each set gets an equal share of the time left; the training prompts come last and get the rest.
    for key, data in reversed(sets.items()):
        seconds = max(0.0, end - time.monotonic()) / (len(sets) - len(checked))
        checked.append(_check_set(key, data, tokenizer, seconds, known if key == "data" else None, config))
    for (key, data), set_findings in zip(sets.items(), reversed(checked), strict=True):
        findings += set_findings
        with contextlib.suppress(DataError):
            rows = islice(first_rows(config, data, tokenizer), SAMPLES if key in config.training_sets else 1)
            samples += [Sample(key, row.place, row.text, row.row, row.source) for row in rows]
    if for_learner and tokenizer is not None:
        if config.sft.data is not None:
            findings += check_conversations(config, tokenizer, SETS_S)
        findings += check_scoring_models(config, tokenizer)
    return Inputs(findings, samples)


class FirstRow(msgspec.Struct, frozen=True):
    """A usable row at the start of a set."""

    place: str
    """FILE:LINE."""
    text: str
    """The prompt as the model gets it. If it cannot be encoded: the row's own text, empty for a list of messages."""
    row: dict[str, Any]
    ids: np.ndarray | None
    """Tokens of the prompt, int32 [P]; None if it cannot be tokenized."""
    source: str = ""
    """Name of its source in a mixture."""


def first_rows(
    config: Config, data: PromptsConfig, tokenizer: Tokenizer | None, *, strict: bool = False
) -> Iterator[FirstRow]:
    """Yield the usable ones of the first LOOKED_AT rows of a set, in order.

    Raises DataError if the set cannot be read. If the chat template cannot be used, ``strict`` raises ConfigError; else
    rows have no tokens. A single prompt that cannot be encoded has none either.
    """
    encoder = PromptEncoder(tokenizer, data, config) if tokenizer is not None else None
    for row in islice(open_source(data)[1], LOOKED_AT):
        try:
            checked = check_row(row, data)
        except BadRow:
            continue
        ids, text = None, checked.prompt if isinstance(checked.prompt, str) else ""
        if encoder is not None:
            try:
                tokens, text = encoder(checked.prompt, checked.tools)
                ids = np.array(tokens, np.int32)
            except ValueError as error:
                if strict and isinstance(error, ConfigError):
                    raise
        yield FirstRow(f"{row.path}:{row.line}", text, unpack(checked.packed), ids, data.source_name)


def _check_tokenizer(config: Config) -> tuple[Finding, Tokenizer | None]:
    """Load the tokenizer and resolve the stop tokens. Returns the tokenizer too, if it loads."""
    model = config.model
    try:
        tokenizer = tokenizer_of(config)
    except ConfigError as error:
        text = "; ".join(problem.removeprefix(f"{MODEL}: ") for problem in error.problems)
        fix = "copy all files of the tokenizer into the model's folder"
        return fail("tokenizer", text, fix, key=MODEL), None
    try:
        stops = resolve_stops(config.rollout, tokenizer)
    except ConfigError as error:
        text = "; ".join(problem.removeprefix(f"{STOPS}: ") for problem in error.problems)
        return fail("tokenizer", text, "take ids of the model's own tokens", key=STOPS), tokenizer
    if model.path is None:
        return ok("tokenizer", "none: text is taken as bytes", key=MODEL), tokenizer
    if not tokenizer.eos_ids and not stops.token_ids:
        text = f"the tokenizer of {model.path} has no end-of-sequence token: responses end at rollout.max_tokens"
        fix = "name eos_token_id in config.json or generation_config.json, or set rollout.stop_token_ids"
        return warn("tokenizer", text, fix, key=MODEL), tokenizer
    return ok("tokenizer", f"that of {model.path} can be read", key=MODEL), tokenizer


def _check_set(
    key: str,
    data: PromptsConfig,
    tokenizer: Tokenizer | None,
    seconds: float,
    known: KnownPrompts | None,
    config: Config,
) -> list[Finding]:
    """Read and tokenize a set as the dataloader does, for about ``seconds`` at most; return the findings.

    If the time ends first, the finding says how far the check came. Without a tokenizer, rows are only read. If
    ``known`` is given and the whole set was read in time, its fingerprint must be that of ``known``. A set that was
    read whole and has warnings gets no finding "ok" on its rows.
    """
    end = time.monotonic() + seconds
    try:
        name, rows = open_source(data)
        # Half of the time is for reading, the rest for tokenizing.
        reading = _Reading(rows, end - seconds / 2)
        try:
            dataset = collect(name, reading, data)
            if tokenizer is None:
                return [ok("data", f"{name}: {in_rows(len(dataset.rows))} can be read", key=key)]
            prompts = PromptSet(dataset, data, tokenizer, config)
            is_whole = prompts.tokenize(TOKENIZED_AT_ONCE)
            while not is_whole and time.monotonic() < end:
                is_whole = prompts.tokenize(TOKENIZED_AT_ONCE)
        except TooFewUsable as error:
            # Rows that were not read may be usable.
            judged = warn if reading.is_cut else fail
            text = f"{error.detail}; not read beyond {reading.place}" if reading.is_cut else error.detail
            return [judged("data", _with_keys_of(key, text), _with_keys_of(key, error.fix), key=key)]
    except DataError as error:
        fix = _with_keys_of(key, error.fix) or f"correct {key}.path, or put the data there on this host"
        return [fail("data", _with_keys_of(key, error.detail), fix, key=key)]
    except ConfigError as error:
        # The chat template is missing or cannot be used.
        text = "; ".join(problem.removeprefix("data.template: ") for problem in error.problems)
        fix = "take a model that has one, or put chat_template.jinja into its folder"
        return [fail("data", text, fix, key=f"{key}.template")]
    warnings = [warn("data", remark.detail, remark.fix, key=key) for remark in remarks(prompts, key)]
    is_plain = data.template == "plain" and config.model.path is not None
    ignores_template = is_plain and tokenizer.template_text(with_tools=False) is not None
    shown = _first_prompt(key, prompts, ignores_template=ignores_template)
    text = f"{name}: {in_rows(len(prompts))} can be read; the longest prompt has {prompts.longest[0]} tokens"
    if reading.is_cut or not is_whole:
        until = f"read up to {reading.place} and tokenized up to {prompts.place}"
        text += f"; {until} in {seconds:.2g} s, and the run reads the rest"
    elif known is not None and not _is_known(prompts, known, data):
        return [*warnings, _changed_prompts(key, name, len(prompts), known)]
    elif warnings:
        return [*warnings, *shown]
    return [*warnings, ok("data", text, key=key), *shown]


def _first_prompt(key: str, prompts: PromptSet, *, ignores_template: bool) -> list[Finding]:
    """Return a finding that shows a person the first prompt that fits, as the model gets it; else no finding."""
    for index in range(len(prompts)):
        if index not in prompts.oversize:
            ids, text, _ = prompts.prompt(index)
            detail = f'the first has {len(ids)} tokens: "{_in_one_line(text)}"'
            if ignores_template:
                detail += f'; the chat template of the model is not used: {key}.template = "plain"'
            return [ok("prompt", detail, key=key)]
    return []


def _in_one_line(text: str) -> str:
    """Print a prompt in one line. A long one loses its middle: the end shows how the model is asked to answer."""
    if len(text) > SHOWN_START + SHOWN_END:
        left_out = len(text) - SHOWN_START - SHOWN_END
        return f"{printable(text[:SHOWN_START])} [... {left_out:,} characters ...] {printable(text[-SHOWN_END:])}"
    return printable(text)


def _is_known(prompts: PromptSet, known: KnownPrompts, data: PromptsConfig) -> bool:
    """Whether these are the prompts of the run that is resumed, or begin with them in a file that grows."""
    if follows(data) and 0 < known.count <= len(prompts):
        return prompts.fingerprint_at(known.count) == known.fingerprint
    return known.fingerprint == prompts.fingerprint


def _changed_prompts(key: str, name: str, count: int, known: KnownPrompts) -> Finding:
    was = f"it had {in_rows(known.count)}" if known.count else "it had others"
    if known.count == count:
        was = "it had as many, but others or in another order"
    text = f"the prompts are not those of the run that is resumed: {name} has {in_rows(count)} now; {was}"
    return fail("data", text, "restore them, or take the new ones with --allow-changed-data", key=key)


def _with_keys_of(key: str, text: str) -> str:
    """Replace the keys of the training prompts in ``text``, such as ``data.path``, by the keys of the set ``key``."""
    return re.sub(
        r"\bdata\.(source|split|path|on_bad_row|prompt_key|tools_key|continue_final_message|system|max_prompt_tokens|"
        r"max_left_out_fraction)\b",
        rf"{key}.\1",
        text,
    )


class _Reading:
    """Iterates over the rows of a source until the rows or the time ends (``end``, on the monotonic clock)."""

    def __init__(self, rows: Iterator[RawRow], end: float) -> None:
        self.place = ""
        """FILE:LINE of the last row that was read; empty at first."""
        self.is_cut = False
        """Whether the time ended before the rows."""
        self._rows, self._end = rows, end

    def __iter__(self) -> Iterator[RawRow]:
        for row in self._rows:
            self.place = f"{row.path}:{row.line}"
            yield row
            if time.monotonic() >= self._end:
                self.is_cut = next(self._rows, None) is not None
                return


# --- chat template and conversations ---


def check_chat(config: Config, tokenizer: Tokenizer) -> Finding:
    """Check the chat template in a thread; fail if that takes longer than chat.check_timeout_s."""
    answer: list[Finding] = []
    thread = threading.Thread(target=lambda: answer.append(_check_template(config, tokenizer)), daemon=True)
    thread.start()
    thread.join(config.chat.check_timeout_s)
    if answer:
        return answer[0]
    text = f"the check of the chat template did not end within {config.chat.check_timeout_s:g} s"
    return fail("chat", text, "correct the template, or raise chat.check_timeout_s", key="chat.check_timeout_s")


def _check_template(config: Config, tokenizer: Tokenizer) -> Finding:
    try:
        return judge(make_renderer(config, tokenizer).report)
    except ConfigError as error:
        problem, _, fix = error.problems[0].removeprefix(f"{MODEL}: ").partition("; ")
        return fail("chat", problem, fix or MEND, key=MODEL)
    except Exception as error:
        text = f"the chat template cannot be used: {type(error).__name__}: {error}"
        return fail("chat", text, MEND, key=MODEL)


def judge(report: ChatReport) -> Finding:
    """Fail if the template refuses every conversation; warn if it forks one though chat.history does not ask for that.

    A conversation forks where its next turn cannot extend the sampled tokens, but starts a new sequence.
    """
    if not report.works:
        text = f"the chat template refuses every conversation: {report.cases[0].reason}"
        return fail("chat", text, f"correct the template; {MORE}", key=MODEL)
    forks = [case for case in report.cases if case.verdict == "fork" and not case.by_policy]
    if forks:
        names = ", ".join(case.case for case in forks)
        text = f"each answer starts a new sequence for turns of the kinds {names}: {forks[0].reason}"
        return warn("chat", text, f"take a template that only appends to a conversation; {MORE}", key=MODEL)
    return ok("chat", f"contexts are extended; tool calls are parsed by {report.tool_parser!r}", key=MODEL)


def check_conversations(config: Config, tokenizer: Tokenizer, seconds: float) -> list[Finding]:
    """Read and encode the conversations of sft.data as the learner does, for about ``seconds`` at most.

    Reads nothing and fails if sft.max_tokens is above the context length of the model.
    """
    window, limit = window_of(config), config.sft.max_tokens
    if window is not None and limit is not None and limit > window:
        text = f"is {limit}, and the model has max_position_embeddings = {window}"
        return [fail("data", text, f"lower it to {window}", key="sft.max_tokens")]
    end = time.monotonic() + seconds
    is_cut = False

    def goes_on() -> bool:
        """Whether there is time for another row."""
        nonlocal is_cut
        is_cut = time.monotonic() >= end
        return not is_cut

    try:
        conversations = load_conversations(config, tokenizer, goes_on=goes_on)
    except DataError as error:
        fix = error.fix or f"correct {CONVERSATIONS}, or put the file there on this host"
        return [fail("data", error.detail, fix, key=CONVERSATIONS)]
    except ConfigError as error:
        fix = "take a model whose chat template can be used, or rows of prompt and completion"
        return [fail("data", "; ".join(error.problems), fix, key=CONVERSATIONS)]
    lengths = [len(each.ids) for row in conversations.rows for each in row.sequences]
    text = f"{in_rows(len(conversations.rows))} can be trained; the longest sequence has {max(lengths)} tokens"
    if is_cut:
        text += f"; read up to {conversations.rows[-1].place} in {seconds:.2g} s, and the run reads the rest"
    if conversations.skipped:
        text += f"; {in_rows(conversations.skipped)} left out, the first: {conversations.first_skipped}"
        return [warn("data", text, "correct these rows", key=CONVERSATIONS)]
    return [ok("data", text, key=CONVERSATIONS)]


def in_rows(count: int) -> str:
    """Format a number of rows: "1 row", "2,000 rows"."""
    return "1 row" if count == 1 else f"{count:,} rows"
