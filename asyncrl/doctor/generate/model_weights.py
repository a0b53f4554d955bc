"""The weights in the model's folder as version 0, in sealed memory as an engine loads them.

Engines read no weights by themselves: the first update of a run brings them. A dry run has no learner, so the tensors
are copied from the safetensors files without a change. An engine converts them to its own dtype.

Fails with ConfigError where the folder has no safetensors files or a tensor has a dtype that no engine loads. Fails
with OSError where a file cannot be read or memory runs out. Nothing is left open then.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from asyncrl.checks.weights import Unreadable, weight_files
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.messages.weights import Bucket, Manifest
from asyncrl.weights.segments import Segment, layout
from asyncrl.weights.staging import StagedVersion, layout_of

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors in files of old versions of transformers, which every engine computes."""
COPIED_BYTES = 64 << 20
"""Bytes that are copied at once."""


def stage_model(config: Config) -> StagedVersion:
    """The model's weights; the caller closes them. Without a model, for a simulated engine, one small tensor."""
    made: list[tuple[Bucket, int]] = []
    try:
        if config.model.path is None:
            made.append(_bucket([("weights", "uint8", (1,))], {}, None))
        else:
            made += [_read_file(path) for path in _files(Path(config.model.path))]
        manifest = Manifest(version=0, buckets=[bucket for bucket, _ in made])
        return StagedVersion(manifest, layout_of(manifest), [descriptor for _, descriptor in made])
    except BaseException:
        for _, descriptor in made:
            os.close(descriptor)
        raise


def _files(folder: Path) -> list[Path]:
    try:
        files = list(weight_files(folder))
    except Unreadable as error:
        raise ConfigError([f"model.path: {folder}: {error}"]) from None
    if any(path.suffix != ".safetensors" for path in files):
        raise ConfigError([f"model.path: {folder} has no safetensors files, which are read for this"])
    return files


def _read_file(path: Path) -> tuple[Bucket, int]:
    """A file as one bucket (https://github.com/huggingface/safetensors#format)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    tensors: list[tuple[str, str, tuple[int, ...]]] = []
    places: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        if name == "__metadata__" or COMPUTED.search(name):
            continue
        if entry["dtype"] not in DTYPES:
            raise ConfigError([f"model.path: {path}: {name} has the dtype {entry['dtype']}, which is not trained"])
        tensors.append((name, DTYPES[entry["dtype"]], tuple(entry["shape"])))
        begin, end = entry["data_offsets"]
        places[name] = (8 + length + begin, end - begin)
    return _bucket(tensors, places, path)


def _bucket(
    tensors: list[tuple[str, str, tuple[int, ...]]], places: dict[str, tuple[int, int]], path: Path | None
) -> tuple[Bucket, int]:
    """The bucket of these tensors and its descriptor; ``places`` are offset and size of each in the file."""
    specs, size = layout(tensors)
    segment = Segment("asyncrl-model", size)
    try:
        if path is not None:
            with path.open("rb") as file:
                for spec in specs:
                    begin, left = places[spec.name]
                    file.seek(begin)
                    at = spec.offset
                    while left and (data := file.read(min(left, COPIED_BYTES))):
                        segment.write(at, data)
                        at, left = at + len(data), left - len(data)
        return segment.seal(specs), segment.fd
    except BaseException:
        segment.discard()
        raise
