"""The sources of prompts, by the name they have in the configuration.

Reading blocks and may take minutes: it belongs on a thread. Fails with DataError.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.training import DataConfig
from asyncrl.data.jsonl import RawRow, read_jsonl
from asyncrl.dataloader.files import read_hf, read_parquet
from asyncrl.dataloader.rows import Dataset, collect
from asyncrl.errors import DataError


def load_dataset(config: DataConfig) -> Dataset:
    """Read and check every row. Raises DataError."""
    name, rows, prompt_key = open_source(config)
    return collect(name, rows, prompt_key=prompt_key, on_bad_row=config.on_bad_row)


def open_source(config: DataConfig) -> tuple[str, Iterator[RawRow], str]:
    """The source's name, its rows as they are read, and the column that holds the prompt. Reading raises DataError."""
    path = config.path or ""
    if config.source == "jsonl":
        return path, read_jsonl(path), config.prompt_key
    if config.source == "parquet":
        return path, read_parquet(path, config.prompt_key), config.prompt_key
    if config.source == "hf":
        return path, read_hf(path, config.split, config.prompt_key), config.prompt_key
    if config.source == "reasoning_gym":
        name = f"reasoning_gym/{config.task}"
        return name, _reasoning_gym(config, name), "question"
    return "synthetic", _synthetic(config.size), "question"


def _reasoning_gym(config: DataConfig, name: str) -> Iterator[RawRow]:
    """The items of a task, each with all that its scorer needs.

    Columns: ``task``, ``index``, ``size``, ``seed``, ``options``, ``item`` (the library's own entry), and the item's
    ``question`` and ``answer``.
    """
    try:
        from reasoning_gym import create_dataset
    except ImportError:
        raise DataError("needs reasoning-gym: pip install 'asyncrl[train]'", path=name) from None
    try:
        dataset = create_dataset(config.task, size=config.size, seed=config.seed, **config.options)
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise DataError(f"the task cannot be made with these options: {error}", path=name) from None
    for index in range(config.size):
        try:
            item = dataset[index]
        except Exception as error:
            # The library's tasks are code of many authors and raise errors of any kind.
            yield RawRow(name, index + 1, problem=f"the task failed: {type(error).__name__}: {error}")
            continue
        yield RawRow(
            name,
            index + 1,
            {
                "task": config.task,
                "index": index,
                "size": config.size,
                "seed": config.seed,
                "options": config.options,
                "item": item,
                "question": item["question"],
                "answer": item["answer"],
            },
        )


def _synthetic(size: int) -> Iterator[RawRow]:
    """Sums of two numbers: ``question``, ``answer``, ``index``; the same for every run."""
    for index in range(size):
        # Multipliers coprime to the ranges, so that neighbours differ.
        left, right = 10 + index * 37 % 90, 10 + index * 53 % 89
        row = {"question": f"What is {left} + {right}?", "answer": str(left + right), "index": index}
        yield RawRow("synthetic", index + 1, row)
