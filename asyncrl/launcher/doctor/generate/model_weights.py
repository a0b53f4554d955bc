"""The weights in the model's folder as version 0, in sealed memory as an engine loads them.

An engine reads no weights by itself: in a run the first update brings them. A dry run has no learner, so the tensors
are copied from the safetensors files unchanged. The engine converts them to its own dtype.

Raises ConfigError if the folder has no safetensors files or a tensor has a dtype that no engine loads, and OSError if
a file cannot be read or memory runs out. No descriptor is left open then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError
from asyncrl.launcher.checks.weights import Tensor, Unreadable, read_header, weight_files
from asyncrl.messages.weights import Bucket, Manifest
from asyncrl.weights.held_version import HeldVersion
from asyncrl.weights.segments import Segment, layout

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors that old versions of transformers saved, and that every engine computes."""
COPIED_BYTES = 64 << 20


def stage_model(config: Config) -> HeldVersion:
    """The model's weights; the caller closes them. A simulated engine without a model gets one small tensor."""
    made: list[tuple[Bucket, int]] = []
    try:
        if config.model.path is None:
            made.append(_bucket([("weights", "uint8", (1,))], {}, None))
        else:
            made += [_read_file(path) for path in _files(Path(config.model.path))]
        manifest = Manifest(version=0, buckets=[bucket for bucket, _ in made])
        return HeldVersion(manifest, [descriptor for _, descriptor in made])
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
        raise ConfigError([f"model.path: {folder} has no safetensors files, which --generate needs"])
    return files


def _read_file(path: Path) -> tuple[Bucket, int]:
    """One file as one bucket."""
    try:
        tensors = {name: each for name, each in read_header(path).items() if not COMPUTED.search(name)}
    except Unreadable as error:
        raise ConfigError([f"model.path: {path.parent}: {error}"]) from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError([f"model.path: {path}: {name} has the dtype {tensor.dtype}, which is not trained"])
    return _bucket([(name, DTYPES[each.dtype], each.shape) for name, each in tensors.items()], tensors, path)


def _bucket(
    shapes: list[tuple[str, str, tuple[int, ...]]], tensors: Mapping[str, Tensor], path: Path | None
) -> tuple[Bucket, int]:
    """The bucket of these tensors, filled from the file, and its descriptor."""
    specs, size = layout(shapes)
    segment = Segment("asyncrl-model", size)
    try:
        if path is not None:
            with path.open("rb") as file:
                for spec in specs:
                    file.seek(tensors[spec.name].start)
                    at, left = spec.offset, tensors[spec.name].size
                    while left and (data := file.read(min(left, COPIED_BYTES))):
                        segment.write(at, data)
                        at, left = at + len(data), left - len(data)
        return segment.seal(specs), segment.fd
    except BaseException:
        segment.discard()
        raise
