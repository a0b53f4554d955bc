"""W&B's offline files, read back: a log of blocks as LevelDB has it, of protobuf records."""

import json
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2

FILE_HEADER, BLOCK, RECORD_HEADER = 7, 1 << 15, 7
FULL, FIRST, LAST = 1, 2, 4


def files(run_dir):
    """Those of each W&B run in the folder, in order of time."""
    return sorted(Path(run_dir).glob("wandb/offline-run-*/run-*.wandb"))


def records(path):
    """Every whole record."""
    data, at, parts = path.read_bytes(), FILE_HEADER, []
    assert data[:4] == b":W&B"
    while at + RECORD_HEADER <= len(data):
        if BLOCK - at % BLOCK < RECORD_HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + RECORD_HEADER : at + RECORD_HEADER + size]
        at += RECORD_HEADER + size
        if not kind or len(body) < size:
            return
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            yield record


def history(path):
    """The entries, without what W&B adds of itself."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            found.append({key: value for key, value in items.items() if not key.startswith("_")})
    return found


def run_of(path):
    """The W&B run itself."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")
