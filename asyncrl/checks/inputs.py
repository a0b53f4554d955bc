"""Tokenizer, chat template, prompts, conversations: each set is read and tokenized as in the run, as far as SETS_S go.

A tokenizer may bring code of its own, and libraries that read rows take long to import or die at a broken file, so this
happens in a process of its own (``python -m asyncrl.checks.inputs``) under a deadline. Its parent gets findings,
and sample rows for the trial of the reward function.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.chat.prompt import PromptEncoder
from asyncrl.checks.chat import CONVERSATIONS, check_chat, check_conversations
from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.checks.process import ask_process
from asyncrl.checks.scoring_models import check_frozen
from asyncrl.config import Config
from asyncrl.config.load import config_from_json, config_to_json
from asyncrl.config.training import DataConfig
from asyncrl.data.jsonl import RawRow
from asyncrl.dataloader.prompts import PromptSet
from asyncrl.dataloader.rows import BadRow, TooFewUsable, check_row, collect, unpack
from asyncrl.dataloader.sources import open_source
from asyncrl.errors import ConfigError, DataError
from asyncrl.stops import resolve_stops
from asyncrl.text.printable import printable
from asyncrl.tokenizer import Tokenizer, tokenizer_of

MODULE = "asyncrl.checks.inputs"
READ_S = 45.0
"""Longest time for all of it; importing transformers, for a tokenizer that only it can read, takes most."""
SETS_S = 5.0
"""Longest time for the rows of all sets; about two hundred thousand short ones take that long."""
TOKENIZED_AT_ONCE = 100
"""Rows between two looks at the time."""
CHEAP_ROWS = 10_000
"""Synthetic rows that take a moment."""
SAMPLES = 3
"""Rows of the training prompts that the reward function is tried on; one of each other set."""
LOOKED_AT = 100
"""Rows among which the samples are looked for."""
SHOWN_START, SHOWN_END = 300, 120
"""Characters at the start and at the end of a prompt that a finding shows."""
MODEL = "model.path"
STOPS = "rollout.stop_token_ids"


class Sample(msgspec.Struct, frozen=True):
    """A row as a reward function gets it. ``place`` is FILE:LINE, ``key`` the set that it is of."""

    key: str
    place: str
    prompt: str
    row: dict[str, Any]


class KnownPrompts(msgspec.Struct, frozen=True):
    """The training prompts that a run was left with."""

    fingerprint: str
    count: int = 0
    """0 where that is not known."""


class Order(msgspec.Struct, frozen=True):
    """The question of the parent: ``with_rows`` where the dataloader will be, ``for_learner`` where rank 0 of the
    learner will be, which reads conversations and loads the models that only score."""

    config: str
    with_rows: bool
    for_learner: bool
    known: KnownPrompts | None = None


class Inputs(msgspec.Struct, frozen=True):
    """The answer to an Order."""

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
    """A finding for the tokenizer, one for the chat template of episodes, ``with_rows`` one for each set of prompts,
    and ``for_learner`` one for the conversations of sft.data and for each model that only scores; it fails where the
    training prompts are not the ``known``. Never raises.
    """
    sets = _sets(config) if with_rows else {}
    if (
        not for_learner
        and config.model.path is None
        and all(data.source == "synthetic" and data.size <= CHEAP_ROWS for data in sets.values())
    ):
        # All of it is our own, and cheap.
        return read_inputs(config, with_rows=with_rows, for_learner=False, known=known)
    keys = ", ".join(
        [MODEL] * (config.model.path is not None)
        + list(sets)
        + [CONVERSATIONS] * (for_learner and config.sft.data is not None)
    )
    if config.episode.kind != "single":
        limit_s += config.chat.check_timeout_s
    order = msgspec.msgpack.encode(Order(config_to_json(config), with_rows, for_learner, known))
    try:
        answer, ended = await ask_process(MODULE, (), order, limit_s)
        return msgspec.msgpack.decode(answer, type=Inputs)
    except TimeoutError:
        told = f"the tokenizer and the rows were not read within {limit_s:g} s"
        fix = "copy these files to a faster disk; the run itself waits longer for them"
        return Inputs([warn("data", told, fix, key=keys)])
    except msgspec.DecodeError:
        fix = "see what is wrong with these files, or the package that reads them"
        return Inputs([fail("data", f"the process that reads them ended: {ended}", fix, key=keys)])


def read_inputs(
    config: Config, *, with_rows: bool, for_learner: bool = False, known: KnownPrompts | None = None
) -> Inputs:
    """The answer of check_inputs, found in this process."""
    findings, samples, tokenizer = list[Finding](), list[Sample](), None
    if config.model.path is None or Path(config.model.path).is_dir():
        # The check of the model tells of one that is not there.
        finding, tokenizer = _check_tokenizer(config)
        findings.append(finding)
        if tokenizer is not None and config.episode.kind != "single":
            findings.append(check_chat(config, tokenizer))
    sets = _sets(config) if with_rows else {}
    checked: list[list[Finding]] = []
    end = time.monotonic() + SETS_S
    # The training prompts last: what the others leave of the time is theirs.
    for key, data in reversed(sets.items()):
        left = max(0.0, end - time.monotonic())
        seconds = left / (len(sets) - len(checked))
        checked.append(_check_set(key, data, tokenizer, seconds, known if key == "data" else None, config))
    for key, data in sets.items():
        # The sets were checked from the last to the first.
        findings += checked.pop()
        samples += _samples(key, data, tokenizer, SAMPLES if key == "data" else 1, config)
    if for_learner and tokenizer is not None:
        if config.sft.data is not None:
            findings += check_conversations(config, tokenizer, SETS_S)
        findings += check_frozen(config, tokenizer)
    return Inputs(findings, samples)


def _sets(config: Config) -> dict[str, DataConfig]:
    return {"data": config.data} | {f"eval.{name}.data": each.data for name, each in config.eval.items()}


def _check_tokenizer(config: Config) -> tuple[Finding, Tokenizer | None]:
    model = config.model
    try:
        tokenizer = tokenizer_of(config)
    except ConfigError as error:
        told = "; ".join(problem.removeprefix(f"{MODEL}: ") for problem in error.problems)
        fix = "copy the tokenizer's files into the model's folder, whole"
        return fail("tokenizer", told, fix, key=MODEL), None
    try:
        stops = resolve_stops(config.rollout, tokenizer)
    except ConfigError as error:
        told = "; ".join(problem.removeprefix(f"{STOPS}: ") for problem in error.problems)
        return fail("tokenizer", told, "take ids of the model's own tokens", key=STOPS), tokenizer
    if model.path is None:
        return ok("tokenizer", "none: text is taken as bytes", key=MODEL), tokenizer
    if not tokenizer.eos_ids and not stops.token_ids:
        told = f"the tokenizer of {model.path} names no end of a sequence: responses end at rollout.max_tokens"
        fix = "name eos_token_id in config.json or generation_config.json, or set rollout.stop_token_ids"
        return warn("tokenizer", told, fix, key=MODEL), tokenizer
    return ok("tokenizer", f"that of {model.path} can be read", key=MODEL), tokenizer


def _check_set(
    key: str,
    data: DataConfig,
    tokenizer: Tokenizer | None,
    seconds: float,
    known: KnownPrompts | None,
    config: Config,
) -> list[Finding]:
    """Read and tokenize a set as the dataloader does, for at most about so long."""
    end = time.monotonic() + seconds
    try:
        name, rows, prompt_key = open_source(data)
        # Half of the time is for reading, the rest for tokenizing.
        reading = _Reading(rows, end - seconds / 2)
        try:
            dataset = collect(
                name,
                reading,
                prompt_key=prompt_key,
                on_bad_row=data.on_bad_row,
                tools_key=data.tools_column,
                continues=data.continue_final_message,
            )
            if tokenizer is None:
                return [ok("data", f"{name}: {_rows(len(dataset.rows))} can be read", key=key)]
            prompts = PromptSet(dataset, data, tokenizer, config)
            is_whole = prompts.tokenize(TOKENIZED_AT_ONCE)
            while not is_whole and time.monotonic() < end:
                is_whole = prompts.tokenize(TOKENIZED_AT_ONCE)
        except TooFewUsable as error:
            judged = warn if reading.is_cut else fail
            told = f"{error.told}; not read beyond {reading.place}" if reading.is_cut else error.told
            return [judged("data", _of_set(key, told), _of_set(key, error.fix), key=key)]
    except DataError as error:
        fix = _of_set(key, error.fix) or f"correct {key}.path, or put the data there on this host"
        return [fail("data", _of_set(key, error.told), fix, key=key)]
    except ConfigError as error:
        # There is no chat template, or none that can be used.
        told = "; ".join(problem.removeprefix("data.template: ") for problem in error.problems)
        fix = "take a model that has one, or put chat_template.jinja into its folder"
        return [fail("data", told, fix, key=f"{key}.template")]
    found = [warn("data", remark.told, remark.fix, key=key) for remark in prompts.remarks(key)]
    is_plain = data.template == "plain" and config.model.path is not None
    ignores_template = is_plain and tokenizer.template_text(with_tools=False) is not None
    shown = _first_prompt(key, prompts, ignores_template=ignores_template)
    told = f"{name}: {_rows(len(prompts))} can be read; the longest prompt has {prompts.longest[0]} tokens"
    if reading.is_cut or not is_whole:
        until = f"read up to {reading.place} and tokenized up to {prompts.place}"
        told += f"; {until} in {seconds:.2g} s, and the run reads the rest"
    elif known is not None and known.fingerprint != prompts.fingerprint:
        return [*found, _changed(key, name, len(prompts), known)]
    elif found:
        return [*found, *shown]
    return [*found, ok("data", told, key=key), *shown]


def _first_prompt(key: str, prompts: PromptSet, *, ignores_template: bool) -> list[Finding]:
    """The first prompt of a set as the model gets it, for a person to look at; none where there is no prompt so far."""
    for index in range(len(prompts)):
        if index not in prompts.oversize:
            ids, text, _ = prompts.prompt(index)
            told = f'the first has {len(ids)} tokens: "{_shown(text)}"'
            if ignores_template:
                told += f'; the chat template of the model is not used: {key}.template = "plain"'
            return [ok("prompt", told, key=key)]
    return []


def _shown(text: str) -> str:
    """A text in one line, without its middle where it is long: the end shows how the model is asked to answer."""
    if len(text) > SHOWN_START + SHOWN_END:
        left_out = len(text) - SHOWN_START - SHOWN_END
        return f"{printable(text[:SHOWN_START])} [... {left_out:,} characters ...] {printable(text[-SHOWN_END:])}"
    return printable(text)


def _changed(key: str, name: str, count: int, known: KnownPrompts) -> Finding:
    was = f"{_rows(known.count)} when the run was left" if known.count else "others when the run was left"
    if known.count == count:
        was = "as many when the run was left, but others, or in another order"
    told = f"the prompts are not those of the run that is resumed: {name} has {_rows(count)} now; it had {was}"
    return fail("data", told, "put them back, or go on with these by --allow-changed-data", key=key)


def _of_set(key: str, text: str) -> str:
    """The text with the keys of the training prompts as those of this set."""
    return re.sub(
        r"\bdata\.(source|split|path|on_bad_row|prompt_key|tools_key|continue_final_message|system|max_prompt_tokens|"
        r"max_left_out_fraction)\b",
        rf"{key}.\1",
        text,
    )


class _Reading:
    """The rows of a source, until a time is over."""

    def __init__(self, rows: Iterator[RawRow], end: float) -> None:
        self.place = ""
        """FILE:LINE of the last row that was read."""
        self.is_cut = False
        """Whether there were more."""
        self._rows, self._end = rows, end

    def __iter__(self) -> Iterator[RawRow]:
        for row in self._rows:
            self.place = f"{row.path}:{row.line}"
            yield row
            if time.monotonic() >= self._end:
                self.is_cut = next(self._rows, None) is not None
                return


def _samples(key: str, data: DataConfig, tokenizer: Tokenizer | None, count: int, config: Config) -> list[Sample]:
    """Up to ``count`` rows from the beginning of the set, also where they cannot be tokenized."""
    samples: list[Sample] = []
    encoder = PromptEncoder(tokenizer, data, config) if tokenizer is not None else None
    with contextlib.suppress(DataError):
        _, rows, prompt_key = open_source(data)
        for row in islice(rows, LOOKED_AT):
            try:
                found = check_row(row, prompt_key, data.tools_column, continues=data.continue_final_message)
            except BadRow:
                continue
            text = found.prompt if isinstance(found.prompt, str) else ""
            if encoder is not None:
                with contextlib.suppress(ValueError):
                    _, text = encoder(found.prompt, found.tools)
            samples.append(Sample(key, f"{row.path}:{row.line}", text, unpack(found.packed)))
            if len(samples) == count:
                break
    return samples


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def main() -> int:
    """Answer the order on standard input."""
    answers = os.dup(1)
    # Nothing that is imported or called may write between the answers.
    os.dup2(2, 1)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    data = msgspec.msgpack.encode(
        read_inputs(
            config_from_json(order.config),
            with_rows=order.with_rows,
            for_learner=order.for_learner,
            known=order.known,
        )
    )
    while data:
        data = data[os.write(answers, data) :]
    sys.stderr.flush()
    # Threads of a library's own must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
