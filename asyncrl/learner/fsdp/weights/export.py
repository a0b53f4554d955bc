"""The weights as a folder that transformers and vLLM load: Hugging Face layout.

The files of model.path except its weights are copied; ``config.json`` gets the dtype that the weights are written in.
The weights lie in ``model.safetensors``, or, past SHARD_BYTES, in several files with an index. Adapters have a folder
of their own, in the layout of PEFT (https://huggingface.co/docs/peft/developer_guides/checkpoint), with the tokenizer's
files. An export is written to another folder, synced, then renamed to the target. So the target is either complete or
as it was. If the process dies between the renames, there is no target, and the old folder is named .NAME.old.

Fails with OSError on rank 0, after all ranks have finished the gather, and then removes the other folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config.algorithm import LoraConfig
from asyncrl.core.files import sync
from asyncrl.weights.lora import ADAPTER_FILE, PREFIX, SETTINGS_FILE

SHARD_BYTES = 4 << 30
"""Bytes of a file of weights, past which the next one begins."""
ADAPTER = "adapter"
"""Subfolder of an exported model for the adapters that are merged into it."""
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
"""Patterns of the names of a tokenizer's files."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""Ends of the names of files with weights, which are not copied."""


def export(
    gathered: Iterator[dict[str, Tensor]],
    source: Path,
    folder: Path,
    dtype: torch.dtype,
    *,
    adapter: dict[str, Any] | None = None,
) -> None:
    """Rank 0: write the buckets of ``gather_buckets`` to ``folder``, and replace what is there. Raises OSError.

    ``source`` is the folder that the model was loaded from. If ``adapter`` is given, it is the adapter_config.json of
    the adapters among the gathered weights, which go to the subfolder ADAPTER.
    """
    with _aside(folder) as aside:
        writer, adapters = _WeightsWriter(aside), dict[str, Tensor]()
        try:
            for tensors in gathered:
                adapters |= {name: tensor.clone() for name, tensor in tensors.items() if name.startswith(PREFIX)}
                writer.add({name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)})
        except OSError:
            # The rest is gathered all the same, since the other ranks take part in it.
            for _ in gathered:
                pass
            raise
        writer.finish()
        copy_settings(source, aside, dtype)
        if adapter is not None:
            _write_adapter(adapters, adapter, source, aside / ADAPTER)


def export_adapter(units: Iterator[dict[str, Tensor]], source: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Write adapters alone to ``folder`` in PEFT's layout, and replace what is there. Raises OSError.

    ``source`` is the folder that the model was loaded from, ``settings`` adapter_config.json.
    """
    with _aside(folder) as aside:
        adapters = {name: tensor for tensors in units for name, tensor in tensors.items()}
        _write_adapter(adapters, settings, source, aside)


def adapter_settings(lora: LoraConfig, *, model: str, targets: Iterable[str]) -> dict[str, Any]:
    """Return the content of adapter_config.json for adapters on the model in folder ``model``.

    ``targets`` are the ends of the names of the layers with an adapter.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(set(targets)),
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Context that gives another path to write a folder to, and at its end puts that folder in place of ``folder``.

    On an error the other folder is removed, and ``folder`` stays as it was.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        yield aside
        for path in aside.rglob("*"):
            sync(path)
        sync(aside)
        _put_in_place(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _put_in_place(aside: Path, folder: Path) -> None:
    """Rename ``aside`` to ``folder``, and remove the old folder. If the rename fails, restore it and raise OSError."""
    # No rename replaces a folder that holds files: the old one is moved away first.
    old, had_folder = folder.with_name(f".{folder.name}.old"), folder.exists()
    if had_folder:
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        if had_folder:
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
    sync(folder.parent)


def copy_settings(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Copy the files of a model's folder, except weights and hidden files; write ``dtype`` into config.json."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHTS):
            shutil.copyfile(file, target / file.name)
    settings = json.loads((source / "config.json").read_text())
    # The older name of dtype; it may have another value.
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _write_adapter(adapters: dict[str, Tensor], settings: dict[str, Any], source: Path, target: Path) -> None:
    """Write the adapter's files and copies of the tokenizer's files in ``source`` to the new folder ``target``."""
    target.mkdir(parents=True)
    _save(adapters, target / ADAPTER_FILE)
    (target / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n")
    for file in sorted(source.iterdir()):
        if file.is_file() and any(file.match(pattern) for pattern in _TOKENIZER):
            shutil.copyfile(file, target / file.name)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors to a new safetensors file. Raises OSError."""
    path.touch()
    permissions = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.parent}: {error}") from error
    # safetensors makes the file readable by its owner alone, but another user may serve the model.
    path.chmod(permissions)


class _WeightsWriter:
    """Writes weights to safetensors files of up to SHARD_BYTES; holds the tensors of one file in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        """Tensors of the next file, by name."""
        self._held_bytes = 0
        self._names_by_file: list[list[str]] = []
        """Names of the weights in each written file."""
        self._total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Copy a bucket's tensors into memory; whenever the next one would pass SHARD_BYTES, write a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, tensor in tensors.items():
            if self._held and self._held_bytes + tensor.nbytes > SHARD_BYTES:
                self._write()
            self._held[name] = tensor.to("cpu", copy=True).contiguous()
            self._held_bytes += tensor.nbytes

    def _write(self) -> None:
        self._names_by_file.append(list(self._held))
        _save(self._held, self._folder / _part(len(self._names_by_file)))
        self._total_bytes += self._held_bytes
        self._held, self._held_bytes = {}, 0

    def finish(self) -> None:
        """Write the last file, give the files their names, and write the index if there are several."""
        self._write()
        count = len(self._names_by_file)
        if count == 1:
            (self._folder / _part(1)).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for i, names in enumerate(self._names_by_file, 1):
            final = f"model-{i:05}-of-{count:05}.safetensors"
            (self._folder / _part(i)).rename(self._folder / final)
            places |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": places}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _part(number: int) -> str:
    return f"part-{number}.safetensors"
