"""The sources of prompts, by the name they have in the configuration.

Reading blocks and may take minutes: it belongs on a thread. Fails with DataError.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config import DataConfig
from asyncrl.dataloader.files import read_hf, read_jsonl, read_parquet
from asyncrl.dataloader.rows import Dataset, RawRow, collect
from asyncrl.errors import DataError


def load_dataset(config: DataConfig) -> Dataset:
    """Read and check every row. Raises DataError."""
    path = config.path or ""
    name, prompt_key = path, config.prompt_key
    if config.source == "jsonl":
        rows = read_jsonl(path)
    elif config.source == "parquet":
        rows = read_parquet(path, prompt_key)
    elif config.source == "hf":
        rows = read_hf(path, config.split, prompt_key)
    elif config.source == "reasoning_gym":
        name, prompt_key = f"reasoning_gym/{config.task}", "question"
        rows = _reasoning_gym(config, name)
    else:
        name, prompt_key = "synthetic", "question"
        rows = _synthetic(config.size)
    return collect(name, rows, prompt_key=prompt_key, on_bad_row=config.on_bad_row)


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
            # The library's tasks are code of many authors and raise whatever they like.
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
