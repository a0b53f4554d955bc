"""Tokenizer, chat template and prompts: the first rows of each set, read and tokenized as the dataloader does.

A tokenizer may bring code of its own, and libraries that read rows take long to import or die at a broken file, so this
happens in a process of its own (``python -m asyncrl.preflight.inputs``) under a deadline. Its parent gets findings,
and sample rows for whoever tries the reward function.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import Config
from asyncrl.config.load import config_from_json, config_to_json
from asyncrl.config.training import DataConfig
from asyncrl.dataloader.rows import BadRow, RawRow, check_row, unpack
from asyncrl.dataloader.sources import open_source
from asyncrl.errors import ConfigError, DataError
from asyncrl.preflight.chatting import check_chat
from asyncrl.preflight.findings import Finding, fail, ok, warn
from asyncrl.runtime.supervision import describe_exit
from asyncrl.stops import resolve_stops
from asyncrl.tokenizer import Tokenizer, tokenizer_of

ARGV = (sys.executable, "-m", "asyncrl.preflight.inputs")
READ_S = 45.0
"""Longest time for all of it; importing transformers, for a tokenizer that only it can read, takes most."""
END_S = 5.0
SAMPLES = 3
"""Rows of the training prompts that are looked at; one of each other set."""
MODEL = "model.path"
STOPS = "rollout.stop_token_ids"
PROBE = "\u2603\U0001d518\u4e2d z\u0308q"
"""Characters that no vocabulary of words holds."""


class Sample(msgspec.Struct, frozen=True):
    """A row as a reward function gets it. ``place`` is FILE:LINE, ``key`` the set that it is of."""

    key: str
    place: str
    prompt: str
    row: dict[str, Any]


class Order(msgspec.Struct, frozen=True):
    """The question of the parent: ``with_rows`` where the dataloader will be."""

    config: str
    with_rows: bool


class Inputs(msgspec.Struct, frozen=True):
    """The answer."""

    findings: list[Finding] = []
    samples: list[Sample] = []


async def check_inputs(config: Config, *, with_rows: bool = True, limit_s: float = READ_S) -> Inputs:
    """A finding for the tokenizer, one for the chat template of episodes, and, ``with_rows``, for each set of prompts.

    Never fails.
    """
    sets = _sets(config) if with_rows else {}
    if config.model.path is None and all(data.source == "synthetic" for data in sets.values()):
        # All of it is our own, and cheap.
        return read_inputs(config, with_rows=with_rows)
    keys = ", ".join([MODEL] * (config.model.path is not None) + list(sets))
    fix = "copy these files to a faster disk; the run itself waits longer for them"
    if config.episode.kind != "single":
        limit_s += config.chat.check_timeout_s
    order = msgspec.msgpack.encode(Order(config_to_json(config), with_rows))
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(order)
        given.seek(0)
        reading = await asyncio.create_subprocess_exec(
            *ARGV, stdin=given, stdout=asyncio.subprocess.PIPE, stderr=errors, process_group=0
        )
        try:
            assert reading.stdout is not None
            async with asyncio.timeout(limit_s):
                answer = await reading.stdout.read()
                await reading.wait()
        except TimeoutError:
            told = f"the tokenizer and the first rows were not read within {limit_s:g} s"
            return Inputs([warn("data", told, fix, key=keys)])
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(reading.pid, 9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await reading.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip().splitlines()
    try:
        return msgspec.msgpack.decode(answer, type=Inputs)
    except msgspec.DecodeError:
        code = reading.returncode
        told = f"the process that reads them ended: {describe_exit(code if code is not None else -9)}"
        told += "".join(f": {line}" for line in said[-1:])
        return Inputs(
            [fail("data", told, "see what is wrong with these files, or the package that reads them", key=keys)]
        )


def read_inputs(config: Config, *, with_rows: bool) -> Inputs:
    """The same in this process."""
    findings, samples, tokenizer = list[Finding](), list[Sample](), None
    if config.model.path is None or Path(config.model.path).is_dir():
        # The check of the model tells of one that is not there.
        finding, tokenizer = _check_tokenizer(config)
        findings.append(finding)
        if tokenizer is not None and config.episode.kind != "single":
            findings.append(check_chat(config, tokenizer))
    for key, data in (_sets(config) if with_rows else {}).items():
        found, some = _check_set(key, data, tokenizer, SAMPLES if key == "data" else 1)
        findings.append(found)
        samples += some
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
    try:
        tokenizer.encode(PROBE)
    except ValueError as error:
        fix = "add one; until then a prompt with a word that the vocabulary lacks ends the run"
        return warn("tokenizer", str(error), fix, key=MODEL), tokenizer
    return ok("tokenizer", f"that of {model.path} can be read", key=MODEL), tokenizer


def _check_set(key: str, data: DataConfig, tokenizer: Tokenizer | None, count: int) -> tuple[Finding, list[Sample]]:
    """The finding, and up to ``count`` rows from the beginning of the set, also where they cannot be tokenized."""
    problem: Finding | None = None
    samples: list[Sample] = []
    lengths: list[int] = []
    first: RawRow | None = None
    skipped = ""
    try:
        name, rows, prompt_key = open_source(data)
        for row in rows:
            first = first or row
            place = f"{row.path}:{row.line}"
            try:
                prompt, packed = check_row(row, prompt_key)
            except BadRow as error:
                if data.on_bad_row == "error":
                    return fail("data", f"{place}: {error}", f'mend it, or set {key}.on_bad_row = "skip"', key=key), []
                skipped = skipped or f"{place}: {error}; it is left out"
                if row.line > SAMPLES * count:
                    break
                continue
            text = prompt if isinstance(prompt, str) else ""
            if tokenizer is not None and problem is None:
                try:
                    ids, text = tokenizer.encode_prompt(prompt, data.template, data.system)
                    lengths.append(len(ids))
                except ValueError as error:
                    problem = _untokenized(key, place, error)
                else:
                    if not ids:
                        problem = fail("data", f"{place}: the prompt has no tokens", "mend the row", key=key)
            samples.append(Sample(key, place, text, unpack(packed)))
            if len(samples) == count:
                break
    except DataError as error:
        return fail("data", str(error), f"correct {key}.path, or put the data there on this host", key=key), []
    if problem is not None:
        return problem, samples
    if first is None:
        return fail("data", f"{name} holds no row", "put the prompts there, or set another", key=f"{key}.path"), []
    if skipped:
        return warn("data", skipped, f'mend it, or leave {key}.on_bad_row = "skip"', key=key), samples
    told = f"the first row of {name} can be read"
    if not lengths:
        return ok("data", told, key=key), samples
    told = f"the first row of {name} is a prompt of {lengths[0]} tokens"
    if lengths[0] > data.max_prompt_tokens:
        fix = f"raise {key}.max_prompt_tokens, or shorten the prompts"
        return warn("data", f"{told}, over {data.max_prompt_tokens}: it would be quarantined", fix, key=key), samples
    return ok("data", told, key=key), samples


def _untokenized(key: str, place: str, error: ValueError) -> Finding:
    if isinstance(error, ConfigError):
        # There is no chat template, or none that can be used.
        told = "; ".join(problem.removeprefix("data.template: ") for problem in error.problems)
        fix = "take a model that has one, or put chat_template.jinja into its folder"
        return fail("data", told, fix, key=f"{key}.template")
    fix = f"set {key}.template to what the rows hold, or mend the row or the tokenizer"
    return fail("data", f"{place}: {error}", fix, key=key)


def main() -> int:
    """Answer the order on standard input."""
    answers = os.dup(1)
    # Nothing that is imported or called may write between the answers.
    os.dup2(2, 1)
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Order)
    data = msgspec.msgpack.encode(read_inputs(config_from_json(order.config), with_rows=order.with_rows))
    while data:
        data = data[os.write(answers, data) :]
    sys.stderr.flush()
    # Threads of a library's own must not keep it.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
