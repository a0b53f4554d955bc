"""The prompts of a run, ready to be leased: rows that were read, checked and tokenized.

Reading blocks and may take minutes: it belongs on a thread. Each row is checked and packed as MessagePack, and all rows
together give a fingerprint. Invariants: the content of a DataRow survives MessagePack and JSON. The fingerprint depends
on prompts, rows and their order alone, not on the files' paths. Ids, text and row of an index never change.

A bad row is one that cannot be used or tokenized. Bad rows end the reading with DataError: file and line of the first,
and the number of other rows that cannot be used. Under on_bad_row = "skip" a bad row is left out, as if it were not
there. A prompt over max_prompt_tokens keeps its index and is left out before a lease, which is no failure. Fails with
TooFewUsable when no prompt is left, or more than max_left_out_fraction is left out. Fails with ConfigError if the model
has no chat template.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from asyncrl.config import Config
from asyncrl.config.training import PromptsConfig, TrainingPromptsConfig
from asyncrl.core.errors import ChatRefused, ConfigError, DataError
from asyncrl.data.files import find_files
from asyncrl.data.rows import GrowingFile, RawRow, column_names, column_of, has_column, read_json_rows
from asyncrl.dataloader.sources import hf, missing_column, parquet, reasoning_gym, synthetic
from asyncrl.text.chat.chat_messages import Tool, read_tools, without_nulls
from asyncrl.text.chat.template import Prompt, PromptEncoder, read_prompt
from asyncrl.text.tokenizer import Tokenizer

LISTED_PROBLEMS = 5
"""Most places of further bad rows in an error."""
KEPT_PROBLEMS = 1000
"""Most bad rows that are kept for the error; the others are only counted."""
MEND = 'mend it, or leave such rows out with data.on_bad_row = "skip"'

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(dict[str, Any])


class BadRow(ValueError):
    """The problem of one row."""


class TooFewUsable(DataError):
    """The rows were read, and none, or too small a share, can be used."""


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
    fingerprint: str
    """Hex digest of the content."""
    skipped: int
    """Rows left out under on_bad_row = "skip"."""
    first_skipped: str = ""
    """FILE:LINE and problem of the first row left out; "" without one."""


def unpack(packed: bytes) -> dict[str, Any]:
    """Unpack a row's columns, as the reward function gets them."""
    return _DECODER.decode(packed)


def collect(source: str, raw_rows: Iterable[RawRow], data: PromptsConfig) -> Dataset:
    """Check all rows and return the usable ones as a Dataset. ``source`` is the name in errors.

    Raises DataError if no row is usable, or if one is bad and ``data.on_bad_row`` is "error".
    """
    rows: list[DataRow] = []
    bad: list[tuple[RawRow, str]] = []
    skipped = 0
    for raw in raw_rows:
        try:
            row = check_row(raw, data)
        except BadRow as error:
            skipped += 1
            if len(bad) < KEPT_PROBLEMS:
                bad.append((raw, str(error)))
            continue
        rows.append(row)
    if bad and data.on_bad_row == "error":
        first, problem = bad[0]
        others = ", ".join(f"{raw.path}:{raw.line}" for raw, _ in bad[1 : 1 + LISTED_PROBLEMS])
        more = f"; {skipped - 1} more bad rows ({others}{', …' if skipped > LISTED_PROBLEMS + 1 else ''})"
        raise DataError(problem + (more if others else ""), path=first.path, line=first.line, fix=MEND)
    first_skipped = ""
    if bad:
        first, problem = bad[0]
        first_skipped = f"{first.path}:{first.line}: {problem}"
    if not rows:
        raise nothing_usable(source, first_skipped)
    return Dataset(rows, fingerprint_of(rows), skipped, first_skipped)


def nothing_usable(source: str, first_bad: str) -> TooFewUsable:
    """The error of a source without a usable row. ``first_bad`` is the first bad row and its problem; "" if no row."""
    if first_bad:
        return TooFewUsable(f"holds no usable row ({first_bad})", path=source, fix="mend them")
    return TooFewUsable("holds no row", path=source, fix="put the prompts there, or set another path")


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


def fingerprint_of(rows: Iterable[DataRow]) -> str:
    """Return the fingerprint of rows."""
    fingerprint, found = Fingerprint(), ""
    for row in rows:
        found = fingerprint.add(row)
    return found


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
        if raw.typed:
            _leave_out_nulls(columns, prompt_key, tools_key)
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


def _leave_out_nulls(columns: dict[str, Any], prompt_key: str, tools_key: str) -> None:
    """Remove nulls from tool calls and tools, in place.

    A typed table (Parquet, Arrow) gives each object all fields that occur in any row, as null where it has none.
    """
    tools = column_of(columns, tools_key)
    if isinstance(tools, list):
        tools[:] = without_nulls(tools)
    prompt = column_of(columns, prompt_key)
    for message in prompt if isinstance(prompt, list) else ():
        if isinstance(message, dict) and message.get("tool_calls"):
            message["tool_calls"] = without_nulls(message["tool_calls"])


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
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def load_dataset(config: PromptsConfig) -> Dataset:
    """Read and check every row. Raises DataError."""
    return collect(*open_source(config), config)


def open_source(config: PromptsConfig) -> tuple[str, Iterator[RawRow]]:
    """The source's name, and an iterator that reads its rows. Both the call and the iterator may raise DataError."""
    column = config.prompt_column
    if config.source == "reasoning_gym":
        name = f"reasoning_gym/{config.task}"
        return name, reasoning_gym(config, name)
    if config.source == "synthetic":
        return "synthetic", synthetic(config.size)
    path = config.path or ""
    if follows(config):
        return path, iter(growing_file(config).read())
    kind, files = find_files(path, kind=None if config.source == "auto" else config.source, split=config.split)
    if kind == "hf":
        return path, hf(path, config.split, column)
    if kind == "parquet":
        return path, parquet(files, column)
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


@dataclass(frozen=True, slots=True)
class Remark:
    """A message to the user about rows that are left out of a usable set."""

    kind: Literal["bad_rows", "too_long"]
    detail: str
    fix: str


class PromptSet:
    """The prompts of one dataset, by index.

    ``tokenize`` fills it in batches, and blocks, so it belongs on a thread; the set is complete once that returns True.
    ``run`` is the configuration of the run, for its chat and episode settings; None means the defaults.
    """

    def __init__(
        self, dataset: Dataset, config: PromptsConfig, tokenizer: Tokenizer, run: Config | None = None
    ) -> None:
        self.fingerprint = dataset.fingerprint
        self.skipped = dataset.skipped
        """Number of bad rows that are left out."""
        self.oversize: set[int] = set()
        """Indices of prompts over max_prompt_tokens."""
        self.longest = (0, "")
        """Number of tokens of the longest prompt, and its FILE:LINE."""
        self.place = ""
        """FILE:LINE of the last row that was tokenized."""
        self._first_skipped = dataset.first_skipped
        self._rows = dataset.rows
        """All rows; emptied once all are tokenized."""
        self._left_out: set[int] = set()
        """Positions in ``_rows`` of the rows that cannot be tokenized."""
        self._next = 0
        """Position in ``_rows`` of the next row to tokenize."""
        self._packed: list[bytes] = []
        self._growing = Fingerprint() if follows(config) else None
        self._prefixes: list[str] = []
        """Fingerprint of the prompts up to each one, if the file of the set grows."""
        self._config = config
        self._encoder = PromptEncoder(tokenizer, config, run)
        self._ids: list[np.ndarray] = []
        self._texts: list[str] = []
        """``_packed``, ``_ids`` and ``_texts`` have the row, tokens and text of each prompt, by index."""

    def __len__(self) -> int:
        """Prompts so far; all of them once the set is complete."""
        return len(self._ids)

    def tokenize(self, count: int) -> bool:
        """Tokenize the next ``count`` rows; returns True once all rows are done and the set is checked.

        A row that cannot be tokenized raises DataError, or is left out under ``data.on_bad_row = "skip"``. Raises
        ConfigError.
        """
        for row in self._rows[self._next : self._next + count]:
            number, self._next = self._next, self._next + 1
            try:
                self._add(row)
            except BadRow as problem:
                self._skip(row, problem)
                self._left_out.add(number)
        if self._next < len(self._rows):
            return False
        self._complete()
        return True

    def extend(self, raw_rows: Iterable[RawRow]) -> None:
        """Add rows that were appended to the file of a complete set; blocks.

        A bad row raises DataError, or is left out under ``data.on_bad_row = "skip"``.
        """
        for raw in raw_rows:
            try:
                self._add(check_row(raw, self._config))
            except BadRow as problem:
                self._skip(raw, problem)

    def fingerprint_at(self, count: int) -> str:
        """Fingerprint of the first ``count`` prompts of a growing file."""
        return self._prefixes[count - 1]

    def _add(self, row: DataRow) -> None:
        """Tokenize a row and append its prompt. Raises BadRow."""
        self.place = f"{row.path}:{row.line}"
        ids, text = self._encode(row)
        self.longest = max(self.longest, (len(ids), self.place), key=lambda found: found[0])
        if len(ids) > self._config.max_prompt_tokens:
            # The prompt keeps its index, so that max_prompt_tokens moves no other prompt in the order. It is never
            # leased, so its tokens are dropped.
            self.oversize.add(len(self))
            ids, text = [], ""
        if self._growing is not None:
            self._prefixes.append(self._growing.add(row))
        self._texts.append(text)
        self._packed.append(row.packed)
        self._ids.append(np.array(ids, np.int32))

    def _skip(self, row: RawRow | DataRow, problem: BadRow) -> None:
        """Count a bad row; raises DataError under ``data.on_bad_row = "error"``."""
        if self._config.on_bad_row == "error":
            raise DataError(str(problem), path=row.path, line=row.line, fix=MEND) from None
        self.skipped += 1
        self._first_skipped = self._first_skipped or f"{row.path}:{row.line}: {problem}"

    def _encode(self, row: DataRow) -> tuple[list[int], str]:
        """Token ids and text of a row's prompt. Raises BadRow, or ConfigError if the configuration is at fault."""
        try:
            ids, text = self._encoder(row.prompt, row.tools)
        except ConfigError:
            raise
        except ValueError as error:
            raise BadRow(str(error)) from None
        if not ids:
            raise BadRow("the prompt has no tokens")
        return ids, text

    def _complete(self) -> None:
        """Finish the set: recompute its fingerprint if rows were left out, and check that enough prompts are usable.

        Raises TooFewUsable. Drops the rows, which are not needed any more.
        """
        path = self._rows[0].path
        if self._left_out:
            self.fingerprint = fingerprint_of(
                row for number, row in enumerate(self._rows) if number not in self._left_out
            )
        if not len(self):
            raise nothing_usable(path, self._first_skipped)
        if len(self.oversize) == len(self):
            raise TooFewUsable(
                f"every prompt is over data.max_prompt_tokens = {self._config.max_prompt_tokens}; the longest has "
                f"{self.longest[0]} tokens",
                path=path,
                fix="raise data.max_prompt_tokens, or shorten the prompts",
            )
        self._check_share(path)
        self._rows = []

    def _check_share(self, path: str) -> None:
        """Raise TooFewUsable if more than max_left_out_fraction of all rows is left out: oversize or bad."""
        config, rows, left_out = self._config, len(self) + self.skipped, len(self.oversize) + self.skipped
        if left_out <= config.max_left_out_fraction * rows:
            return
        parts, mends = [], []
        if self.oversize:
            tokens, place = self.longest
            over = f"{len(self.oversize):,} have more than data.max_prompt_tokens = {config.max_prompt_tokens} tokens"
            parts.append(f"{over} (the longest has {tokens}: {place})")
            mends.append("raise data.max_prompt_tokens or shorten the prompts")
        if self.skipped:
            parts.append(f"{self.skipped:,} cannot be used (the first: {self._first_skipped})")
            mends.append("mend the rows")
        raise TooFewUsable(
            f"{_share(left_out, rows)} rows are left out, more than data.max_left_out_fraction = "
            f"{config.max_left_out_fraction:g} allows: {'; '.join(parts)}",
            path=path,
            fix=f"{'; '.join(mends)}; or raise data.max_left_out_fraction if the rest is enough",
        )

    def remarks(self, key: str) -> list[Remark]:
        """Messages about bad rows and too long prompts, if there are any; ``key`` is the set's configuration key."""
        found = []
        if self.skipped:
            share = _share(self.skipped, self.skipped + len(self))
            detail = f'{share} rows cannot be used and are left out ({key}.on_bad_row = "skip")'
            found.append(Remark("bad_rows", f"{detail}; the first: {self._first_skipped}", "mend them, or leave it so"))
        if self.oversize:
            tokens, place = self.longest
            detail = (
                f"{_share(len(self.oversize), len(self))} prompts have more than {key}.max_prompt_tokens = "
                f"{self._config.max_prompt_tokens} tokens and are left out; the longest has {tokens} ({place})"
            )
            found.append(Remark("too_long", detail, f"raise {key}.max_prompt_tokens, shorten them, or leave it so"))
        return found

    @property
    def admissible(self) -> tuple[int, ...]:
        """Indices of the prompts that may be leased."""
        return tuple(index for index in range(len(self)) if index not in self.oversize)

    def prompt(self, index: int) -> tuple[np.ndarray, str, dict[str, Any]]:
        """(ids int32 [P], text, row) of a prompt that may be leased."""
        assert index not in self.oversize
        return self._ids[index], self._texts[index], unpack(self._packed[index])


def _share(count: int, total: int) -> str:
    """The count with its share of the total, as in "40 of 200 (20 %)"."""
    return f"{count:,} of {total:,} ({100 * count / total:.2g} %)"
