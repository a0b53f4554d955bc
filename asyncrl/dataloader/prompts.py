"""The prompts of a run: rows that are read, checked and tokenized, and then leased.

Reading blocks and may take minutes, so it runs on threads. Each row is checked and packed as MessagePack, and all rows
together give a fingerprint. Invariants: the content of a row survives MessagePack and JSON. The fingerprint depends on
prompts, rows and their order alone, not on the files' paths. Ids, text and row of an index never change. Rows that are
appended to a growing file get the next indices, and are leased only from an epoch on that has not begun
(prompt_queue.py). A prompt that is too long keeps its index.

Fails with DataError as sources.py and left_out.py say, and with ConfigError if the model has no chat template. While
the run lives, a bad row in a growing file ends the dataloader with DataError, unless on_bad_row is "skip"; so does a
file that has become shorter.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.rollout import RolloutConfig
from asyncrl.config.training import EvalConfig, PromptsConfig, SourceConfig, TrainingPromptsConfig
from asyncrl.core.errors import ChatRefused, ConfigError, DataError
from asyncrl.data.rows import (
    EpochOrder,
    GrowingFile,
    RawRow,
    column_names,
    column_of,
    find_files,
    has_column,
    read_json_rows,
)
from asyncrl.dataloader.evals import EvalPrompt
from asyncrl.dataloader.lease_book import PromptLease
from asyncrl.dataloader.left_out import (
    LISTED_PROBLEMS,
    MEND,
    BadRow,
    bad_rows,
    nothing_usable,
    remarks,
    too_few_usable,
)
from asyncrl.dataloader.prompt_queue import PromptSource
from asyncrl.dataloader.sources import hf, missing_column, parquet, reasoning_gym, synthetic
from asyncrl.messages.groups import Lease
from asyncrl.rpc.services import ActorServices
from asyncrl.text.chat.chat_messages import Tool, read_tools
from asyncrl.text.chat.template import Prompt, PromptEncoder, read_prompt
from asyncrl.text.tokenizer import Tokenizer

TOKENIZED_AT_ONCE = 2000
"""Number of prompts tokenized before the actor reports progress and may be cancelled."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class DataRow:
    """One usable row."""

    prompt: Prompt
    packed: bytes
    """All its columns as MessagePack: a fraction of the memory, and immutable."""
    path: str
    line: int
    tools: list[Tool] = field(default_factory=list)
    """Tools that the model is shown with the prompt."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows in the order of their source."""

    rows: list[DataRow]
    skipped: int
    """Number of bad rows, which are left out."""
    first_skipped: str = ""
    """FILE:LINE and problem of the first bad row; "" without one."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of the content."""
        fingerprint, found = Fingerprint(), ""
        for row in self.rows:
            found = fingerprint.add(row)
        return found


def load_dataset(config: PromptsConfig, file: GrowingFile | None = None) -> Dataset:
    """Read and check every row, of ``file`` if the set follows it. Raises DataError."""
    return collect(*open_source(config, file), config)


def open_source(config: PromptsConfig, file: GrowingFile | None = None) -> tuple[str, Iterator[RawRow]]:
    """The source's name, and an iterator that reads its rows. Both the call and the iterator may raise DataError."""
    if config.source == "reasoning_gym":
        name = f"reasoning_gym/{config.task}"
        return name, reasoning_gym(config, name)
    if config.source == "synthetic":
        return "synthetic", synthetic(config.size)
    path = config.path or ""
    if follows(config):
        return path, iter((file or growing_file(config)).read())
    kind, files = find_files(path, kind=None if config.source == "auto" else config.source, split=config.split)
    if kind == "hf":
        return path, hf(path, config)
    if kind == "parquet":
        return path, parquet(files, config)
    return path, read_json_rows(files)


def follows(config: PromptsConfig) -> bool:
    """Whether rows may be appended to the set's file while it is read."""
    return isinstance(config, TrainingPromptsConfig) and config.follow


def growing_file(config: PromptsConfig) -> GrowingFile:
    """Return the file of a set that follows it. Raises DataError."""
    kind, files = find_files(config.path or "", kind=None, split=config.split)
    if kind != "jsonl" or len(files) != 1:
        raise DataError("cannot be followed", path=config.path or "", fix="name one file of JSON lines")
    return GrowingFile(files[0])


def collect(source: str, raw_rows: Iterable[RawRow], data: PromptsConfig) -> Dataset:
    """Check all rows and return the usable ones as a Dataset. ``source`` is the name in errors.

    Raises DataError if no row is usable, or if one is bad and ``data.on_bad_row`` is "error".
    """
    rows: list[DataRow] = []
    bad: list[tuple[RawRow, str]] = []
    skipped = 0
    for raw in raw_rows:
        try:
            rows.append(check_row(raw, data))
        except BadRow as error:
            skipped += 1
            # Keep the first bad row, and LISTED_PROBLEMS further ones.
            if len(bad) <= LISTED_PROBLEMS:
                bad.append((raw, str(error)))
    first_skipped = ""
    if bad:
        first, problem = bad[0]
        if data.on_bad_row == "error":
            raise bad_rows(first.path, first.line, problem, [f"{raw.path}:{raw.line}" for raw, _ in bad[1:]], skipped)
        first_skipped = f"{first.path}:{first.line}: {problem}"
    if not rows:
        raise nothing_usable(source, first_skipped)
    return Dataset(rows, skipped, first_skipped)


def check_row(raw: RawRow, data: PromptsConfig) -> DataRow:
    """Check one row: make its columns plain values, and read its prompt and tools. Raises BadRow with the problem."""
    prompt_key, tools_key = data.prompt_column, data.tools_column
    if raw.problem:
        raise BadRow(raw.problem)
    if not isinstance(raw.value, dict):
        raise BadRow(f"a row must be an object, not {_kind(raw.value)}")
    if not has_column(raw.value, prompt_key):
        raise BadRow(missing_column(prompt_key, column_names(raw.value)))
    try:
        columns = msgspec.to_builtins(raw.value, enc_hook=_simplify)
        packed = _ENCODER.encode(columns)
        # The encoder accepts keys that are no strings; the decoder rejects them.
        unpack(packed)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRow(f"cannot be sent as JSON or MessagePack: {error}") from None
    try:
        prompt = read_prompt(column_of(columns, prompt_key), prompt_key, continues=data.continue_final_message)
    except ChatRefused as error:
        raise BadRow(str(error)) from None
    try:
        tools = read_tools(column_of(columns, tools_key), tools_key) if tools_key else []
    except ChatRefused as error:
        raise BadRow(f'{error} (if the column is not for the model, set data.tools_key = "")') from None
    return DataRow(prompt, packed, raw.path, raw.line, tools)


def unpack(packed: bytes) -> dict[str, Any]:
    """Unpack a row's columns, as the reward function gets them."""
    return _DECODER.decode(packed)


def _simplify(value: Any) -> Any:
    """Convert a numpy value, which msgspec does not know, to a plain one. Raises TypeError for other types."""
    if isinstance(value, str):
        # numpy.str_, which msgspec refuses although it is text.
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def _kind(value: Any) -> str:
    """Name the type of a row's value, for an error."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


class Fingerprint:
    """Hex digest of prompts, tools, rows and their order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, row: DataRow) -> str:
        """Add a row. Returns the digest of all rows so far."""
        # The length marks the row's end, so that different rows never give the same bytes.
        self._digest.update(_ENCODER.encode((row.prompt, len(row.packed), *([row.tools] if row.tools else []))))
        self._digest.update(row.packed)
        return self._digest.hexdigest()


class PromptSet:
    """The prompts of one dataset, by index.

    ``tokenize`` fills it in batches, and blocks; the set is complete once that returns True. ``run`` is the
    configuration of the run, for its chat and episode settings; None means the defaults.
    """

    def __init__(
        self, dataset: Dataset, config: PromptsConfig, tokenizer: Tokenizer, run: Config | None = None
    ) -> None:
        self.config = config
        self.fingerprint = ""
        """Fingerprint of the prompts so far."""
        self.skipped = dataset.skipped
        """Number of bad rows."""
        self.first_skipped = dataset.first_skipped
        """FILE:LINE and problem of the first bad row; "" without one."""
        self.oversize: set[int] = set()
        """Indices of the prompts over max_prompt_tokens, which are never leased."""
        self.longest = (0, "")
        """Number of tokens of the longest prompt, and its FILE:LINE."""
        self.place = ""
        """FILE:LINE of the last row that was tokenized."""
        self._rows = dataset.rows
        """All rows; emptied once all are tokenized."""
        self._tokenized = 0
        """Number of ``_rows`` that ``tokenize`` has passed."""
        self._digest = Fingerprint()
        self._prefixes: list[str] = []
        """Fingerprint of the prompts up to each one, if the file of the set grows."""
        self._encoder = PromptEncoder(tokenizer, config, run)
        self._prompts: list[tuple[np.ndarray, str, bytes]] = []
        """Tokens, text and packed row of each prompt, by index."""

    def __len__(self) -> int:
        """Prompts so far; all of them once the set is complete."""
        return len(self._prompts)

    def tokenize(self, count: int) -> bool:
        """Tokenize the next ``count`` rows; returns True once all rows are done and the set is checked.

        A row that cannot be tokenized raises DataError, or is left out under ``data.on_bad_row = "skip"``. Raises
        ConfigError, and TooFewUsable.
        """
        rows = self._rows[self._tokenized : self._tokenized + count]
        for row in rows:
            try:
                self._add(row)
            except BadRow as problem:
                self._skip(row, problem)
        self._tokenized += len(rows)
        if self._tokenized < len(self._rows):
            return False
        if error := too_few_usable(self, self._rows[0].path):
            raise error
        self._rows = []
        return True

    def extend(self, raw_rows: Iterable[RawRow]) -> None:
        """Add rows that were appended to the file of a complete set; blocks.

        A bad row raises DataError, or is left out under ``data.on_bad_row = "skip"``.
        """
        for raw in raw_rows:
            try:
                self._add(check_row(raw, self.config))
            except BadRow as problem:
                self._skip(raw, problem)

    def fingerprint_at(self, count: int) -> str:
        """Fingerprint of the first ``count`` prompts of a growing file."""
        return self._prefixes[count - 1]

    def _add(self, row: DataRow) -> None:
        """Tokenize a row and append its prompt. Raises BadRow, or ConfigError if the configuration is at fault."""
        self.place = f"{row.path}:{row.line}"
        try:
            ids, text = self._encoder(row.prompt, row.tools)
        except ConfigError:
            raise
        except ValueError as error:
            raise BadRow(str(error)) from None
        if not ids:
            raise BadRow("the prompt has no tokens")
        self.longest = max(self.longest, (len(ids), self.place), key=lambda found: found[0])
        if len(ids) > self.config.max_prompt_tokens:
            # The prompt keeps its index, so that max_prompt_tokens moves no other prompt in the order. It is never
            # leased, so its tokens are dropped.
            self.oversize.add(len(self))
            ids, text = [], ""
        self.fingerprint = self._digest.add(row)
        if follows(self.config):
            self._prefixes.append(self.fingerprint)
        self._prompts.append((np.array(ids, np.int32), text, row.packed))

    def _skip(self, row: RawRow | DataRow, problem: BadRow) -> None:
        """Count a bad row; raises DataError under ``data.on_bad_row = "error"``."""
        if self.config.on_bad_row == "error":
            raise DataError(str(problem), path=row.path, line=row.line, fix=MEND) from None
        self.skipped += 1
        self.first_skipped = self.first_skipped or f"{row.path}:{row.line}: {problem}"

    @property
    def admissible(self) -> tuple[int, ...]:
        """Indices of the prompts that may be leased."""
        return tuple(index for index in range(len(self)) if index not in self.oversize)

    def prompt(self, index: int) -> tuple[np.ndarray, str, dict[str, Any]]:
        """(ids int32 [P], text, row) of a prompt that may be leased."""
        assert index not in self.oversize
        ids, text, packed = self._prompts[index]
        return ids, text, unpack(packed)


@dataclass(frozen=True, slots=True)
class TrainingSet:
    """A source of training prompts."""

    name: str
    """Its name in a mixture; empty for the only set."""
    prompts: PromptSet
    source: PromptSource
    """The same prompts as the queue sees them."""
    file: GrowingFile | None = None
    """File of the source, if rows may be appended to it; else None."""


class RunPrompts:
    """All prompts of a run: those of training, and those of each evaluation set."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.training: list[TrainingSet] = []
        """The sources, in the order of the configuration; complete once ``read`` has returned."""
        self.evals: dict[str, PromptSet] = {}

    @property
    def grow(self) -> bool:
        """Whether a file of training prompts may grow."""
        return any(each.file is not None for each in self.training)

    @property
    def count(self) -> int:
        """Number of training prompts read so far."""
        return sum(len(each.prompts) for each in self.training)

    async def read(self, tokenizer: Tokenizer, services: ActorServices) -> None:
        """Read and tokenize all prompts on threads, with log lines and notices by ``services``.

        Raises DataError or ConfigError.
        """
        for key, data in self._config.training_sets.items():
            file = growing_file(data) if follows(data) else None
            prompts = await self._read(key, data, tokenizer, services, file)
            order = EpochOrder(prompts.fingerprint, self._config.run.seed, len(prompts), shuffle=data.shuffle)
            source = PromptSource(order, prompts.oversize, prefix=prompts.fingerprint_at if file is not None else None)
            if isinstance(data, SourceConfig):
                source.weight = data.weight
            self.training.append(TrainingSet(data.source_name, prompts, source, file))
        for name, evaluation in self._config.eval.items():
            self.evals[name] = await self._read(f"eval.{name}.data", evaluation.data, tokenizer, services)

    async def _read(
        self,
        key: str,
        data: PromptsConfig,
        tokenizer: Tokenizer,
        services: ActorServices,
        file: GrowingFile | None = None,
    ) -> PromptSet:
        """Read and tokenize one set; logs it, and notifies the user of rows that are left out."""
        dataset = await asyncio.to_thread(load_dataset, data, file)
        prompts = PromptSet(dataset, data, tokenizer, self._config)
        while not await asyncio.to_thread(prompts.tokenize, TOKENIZED_AT_ONCE):
            services.progress()
        services.log.info(
            "prompts are ready",
            data=key,
            prompts=len(prompts),
            too_long=len(prompts.oversize),
            bad_rows=prompts.skipped,
            fingerprint=prompts.fingerprint,
        )
        for remark in remarks(prompts, key):
            services.notify(f"{remark.kind}/{key}", f"{key}: {remark.detail}. To do: {remark.fix}")
        return prompts

    async def read_appended(self) -> bool:
        """Read the rows appended to growing files since the last call. Returns whether any is usable.

        Raises DataError.
        """
        has_grown = False
        for each in self.training:
            if each.file is None:
                continue
            rows = await asyncio.to_thread(each.file.read)
            await asyncio.to_thread(each.prompts.extend, rows)
            size, source = len(each.prompts), each.source
            if size > source.order.size:
                source.order = replace(source.order, size=size, fingerprint=each.prompts.fingerprint)
                has_grown = True
        return has_grown

    def sample(self, count: int) -> list[np.ndarray]:
        """Token ids of ``count`` training prompts (or all, if fewer), evenly spread over the data; always the same."""
        admissible = [(each.prompts, index) for each in self.training for index in each.prompts.admissible]
        count = min(count, len(admissible))
        chosen = [admissible[i * len(admissible) // count] for i in range(count)]
        return [prompts.prompt(index)[0] for prompts, index in chosen]

    def lease(self, lease: PromptLease) -> Lease:
        """The message that leases a prompt to a rollouter, with its tokens and sampling settings; not yet sealed."""
        prompt, rollout = lease.prompt, self._config.rollout
        sampling: RolloutConfig | EvalConfig = rollout
        if isinstance(prompt, EvalPrompt):
            prompts, sampling = self.evals[prompt.name], self._config.eval[prompt.name]
            source = sampling.data.source_name
            purpose, epoch, samples = f"eval/{prompt.name}", prompt.version, sampling.n
        else:
            # Epochs are numbered over all sources, which take turns (messages/ledger.py).
            training = self.training[prompt.epoch % len(self.training)]
            prompts, source = training.prompts, training.name
            purpose, epoch, samples = "train", prompt.epoch, rollout.samples_per_prompt
        ids, text, row = prompts.prompt(prompt.index)
        return Lease(
            uid=prompt.uid,
            number=lease.number,
            purpose=purpose,
            epoch=epoch,
            index=prompt.index,
            param_version=lease.param_version,
            attempt=lease.attempt,
            prompt_ids=ids,
            prompt=text,
            row=row,
            samples=samples,
            temperature=sampling.temperature,
            truncation=rollout.truncation,
            max_tokens=sampling.max_tokens or rollout.max_tokens,
            source=source,
        )
