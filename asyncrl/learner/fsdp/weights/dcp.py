"""The trainer's state on disk: shards of weights and optimizer in the format of torch.distributed.checkpoint (DCP).

    trainer/
        contents.json             TrainerContents, written last: steps taken, checksums of the other files
        __R_0.distcp .metadata    DCP: the shards of rank R, and where each one is
        rank_RRRRR.msgpack        random number generators of rank R

Only trained weights are written: with adapters these alone, without the frozen model. Each rank writes its own shards;
if the model has replicas, each replica writes a part of the tensors. Each rank reads the shards that it needs, for any
number of ranks and replicas that wrote. DCP plans, writes and reads. Its plans would be exchanged as pickles, so the
ranks exchange MessagePack by ``Ranks.exchange`` instead; loading needs no exchange at all.

Invariants: the files hold the state of the moment when ``StagedState`` was made, which copies every tensor. A file is
compared with its checksum before its content is used.

Fails with CheckpointError naming the file. All ranks fail if loading fails or one rank cannot write its files; rank 0
alone fails if it cannot write the metadata. DamagedCheckpoint comes before a load changes anything. After any other
error of a load the weights are of no use.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from asyncrl.checkpoint.contents import CONTENTS, TrainerContents, read_trainer_contents
from asyncrl.checkpoint.damage import check_file, refused
from asyncrl.core.disk import full_errno
from asyncrl.core.errors import CheckpointError, DamagedCheckpoint
from asyncrl.core.files import Digest, digest_file, sync, write_file
from asyncrl.learner.fsdp.model.lora import A
from asyncrl.learner.fsdp.model.optimizers import ADAMW_STATE, MUON_STATE, STATES, Optimizer, state_names, state_of
from asyncrl.learner.fsdp.model.policy import local
from asyncrl.learner.fsdp.ranks.ranks import Ranks

_LOG = logging.getLogger(__name__)
METADATA = ".metadata"
EXCHANGE_WAIT_S = 1800.0
"""Longest wait of a rank for the slowest one to write; the timeout of the group that is given to ``write``."""
WEIGHTS = "weights"
"""Prefix of the names of weights in a checkpoint; the prefixes of the optimizer's states are STATES."""
AROUND_TENSOR_BYTES = 2560
"""Bytes that torch adds for each tensor: the archive around it, and its entry in the metadata."""
T = TypeVar("T")


class _Shard(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a tensor (where it begins, and its extent, by dimension), and the bytes of a file that hold it."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class _WrittenShards(msgspec.Struct, frozen=True, array_like=True):
    """Report of one rank to all others: the shards and files that it has written, or why it could not."""

    problem: tuple[str, str, int] | None
    """File, reason, and the errno of a full disk (else 0); None if everything was written."""
    shards: list[_Shard] = []
    files: dict[str, Digest] = {}


class _Generators(msgspec.Struct, frozen=True):
    """States of the random number generators of a process."""

    torch: bytes
    cuda: bytes | None
    numpy: tuple[str, bytes, int, int, float]
    python: tuple[int, list[int], float | None]


class StagedState:
    """A copy of this rank's state in host memory, and DCP's plan of how it is written."""

    def __init__(self, policy: nn.Module, optimizer: Optimizer, ranks: Ranks, *, steps: int, warm_steps: int) -> None:
        """Copy this rank's state without any exchange, and plan which shards this rank writes."""
        live = _tensors(policy, optimizer)
        self.steps, self.warm_steps = steps, warm_steps
        self.generators = msgspec.msgpack.encode(_generators(ranks.device))
        """The content of this rank's file rank_RRRRR.msgpack."""
        self.shapes = {
            name: (tensor.shape, TensorProperties.create_from_tensor(local(tensor))) for name, tensor in live.items()
        }
        """Shape of each whole tensor, and its properties, by name: for the metadata."""
        self.planner = _CopiesPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planner.set_up_planner(dict(live), is_coordinator=ranks.rank == 0)
        # The ranks of one replica write a sharded tensor. Rank 0 writes a tensor that all ranks have whole. A rank may
        # have no rows of a small tensor: such an empty shard is left out.
        writers = {name: number % ranks.replicas for number, name in enumerate(live)}
        items = [
            item
            for item in self.planner.create_local_plan().items
            if (writers[item.index.fqn] == ranks.replica if item.type == WriteItemType.SHARD else ranks.rank == 0)
            and 0 not in _chunk(item).sizes
        ]
        self.plan = SavePlan(items)
        """The shards that this rank writes."""
        # ``copy``, since a tensor may be in host memory already, and the next step changes it in place.
        self.planner.copies = {
            name: local(live[name]).to("cpu", copy=True) for name in dict.fromkeys(item.index.fqn for item in items)
        }


def expected_bytes(policy: nn.Module, optimizer: Optimizer) -> int:
    """Estimate the bytes that all ranks together write: the trained weights and the optimizer's states."""
    total = 0
    for parameter in _trained(policy).values():
        names = state_names(optimizer, parameter)
        # The weights, and each state except ``step``, which is one number.
        total += (1 + len(names) - ("step" in names)) * parameter.numel() * parameter.element_size()
        total += (1 + len(names)) * AROUND_TENSOR_BYTES
    return total


class _CopiesPlanner(DefaultSavePlanner):
    """DCP's planner, except that it plans with the live tensors and writes their copies."""

    copies: dict[str, Tensor]
    """Copies in host memory of this rank's parts, by name; only those that this rank writes."""

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.copies[write_item.index.fqn]


def write(folder: Path, staged: StagedState | CheckpointError, ranks: Ranks, group: Any) -> None:
    """All ranks together, from any thread: write the staged state to ``folder``.

    Each rank writes its own files, then all exchange reports, then rank 0 writes the metadata. A rank whose state could
    not be staged passes the error as ``staged``, and reports the error. ``group`` is from ``Ranks.another_group``. If
    any rank could not write, all raise CheckpointError; rank 0 also raises it if it does not see the others' files. If
    the exchange itself fails, its error is raised.
    """
    # The copies are in host memory, so there is nothing to prefetch from a device.
    writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
    report = _write_own(folder, staged, ranks, writer)
    data = msgspec.msgpack.encode(report)
    answers = ranks.exchange(data, "what each has written of a checkpoint", group, EXCHANGE_WAIT_S)
    reports = [msgspec.msgpack.decode(answer, type=_WrittenShards) for answer in answers]
    for rank, found in enumerate(reports):
        if found.problem is not None:
            where, reason, full = found.problem
            raise CheckpointError(where, f"{reason} (learner/{rank})", full=full)
    if ranks.rank == 0:
        assert isinstance(staged, StagedState)
        _as_checkpoint_error(folder, lambda: _write_metadata(folder, staged, reports, writer))


def _write_own(
    folder: Path, staged: StagedState | CheckpointError, ranks: Ranks, writer: FileSystemWriter
) -> _WrittenShards:
    """Write this rank's files, and return the report for the other ranks, also of a failure."""

    def work() -> _WrittenShards:
        if isinstance(staged, CheckpointError):
            raise staged
        folder.mkdir(exist_ok=True)
        writer.set_up_storage_writer(ranks.rank == 0)
        # DCP gives each rank other names of files. Only this rank's plan is used, so the other plans are placeholders.
        plan = writer.prepare_global_plan([staged.plan] * ranks.world_size)[ranks.rank]
        results = writer.write_data(staged.planner.finish_plan(plan), staged.planner).wait()
        sizes = {item.index: tuple(_chunk(item).sizes) for item in plan.items}
        shards = [
            _Shard(
                name=result.index.fqn,
                offsets=tuple(result.index.offset or ()),
                sizes=sizes[result.index],
                file=result.storage_data.relative_path,
                start=result.storage_data.offset,
                length=result.storage_data.length,
            )
            for result in results
        ]
        own = f"rank_{ranks.rank:05d}.msgpack"
        files = {own: write_file(folder / own, [staged.generators])}
        files |= {name: digest_file(folder / name) for name in sorted({shard.file for shard in shards})}
        sync(folder)
        return _WrittenShards(None, shards, files)

    try:
        return _as_checkpoint_error(folder, work)
    except CheckpointError as error:
        return _WrittenShards((error.path, error.reason, error.full))


def _write_metadata(folder: Path, staged: StagedState, reports: list[_WrittenShards], writer: FileSystemWriter) -> None:
    """Rank 0: check that all files are there, and write DCP's metadata of all shards, then contents.json.

    Raises CheckpointError if a file of another rank cannot be seen here.
    """
    files: dict[str, Digest] = {}
    for rank, report in enumerate(reports):
        for name, digest in report.files.items():
            path = folder / name
            if not path.exists() or path.stat().st_size != digest.bytes:
                reason = f"written by learner/{rank} and not to be seen by learner/0; checkpoint.dir must be shared"
                raise CheckpointError(str(path), reason)
        files |= report.files
    shards = [shard for report in reports for shard in report.shards]
    described: dict[str, Any] = {}
    for name, (shape, properties) in staged.shapes.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
            for shard in shards
            if shard.name == name
        ]
        described[name] = TensorStorageMetadata(properties, shape, chunks)
        written = sum(chunk.sizes.numel() for chunk in chunks)
        assert written == shape.numel(), f"{name}: {written} of {shape.numel()} numbers were written"
    results = [
        WriteResult(
            index=MetadataIndex(shard.name, torch.Size(shard.offsets)),
            size_in_bytes=shard.length,
            storage_data=_StorageInfo(shard.file, shard.start, shard.length),
        )
        for shard in shards
    ]
    metadata = Metadata(described, planner_data={name: (name,) for name in described})
    writer.finish(metadata, [results])
    files[METADATA] = digest_file(folder / METADATA)
    contents = TrainerContents(steps=staged.steps, warm_steps=staged.warm_steps, world_size=len(reports), files=files)
    write_file(folder / CONTENTS, [msgspec.json.encode(contents)])
    sync(folder)


def load(folder: Path, policy: nn.Module, optimizer: Optimizer, ranks: Ranks) -> TrainerContents:
    """All ranks together: restore weights and optimizer from ``folder``. Returns the contents of contents.json.

    The number of ranks may differ from that at the time of writing. First each rank compares a part of the files with
    their checksums; damage raises DamagedCheckpoint before anything is changed. Then the state is read. At last each
    rank restores its random number generators, if the checkpoint has those of this rank's number. Raises
    CheckpointError on all ranks.
    """

    def check() -> TrainerContents:
        contents = read_trainer_contents(folder)
        for name in sorted(contents.files)[ranks.rank :: ranks.world_size]:
            check_file(folder / name, contents.files[name])
        return contents

    contents = _on_all_ranks(folder, check, ranks, "the check of a checkpoint")
    anew = _on_all_ranks(folder, lambda: _read(folder, policy, optimizer), ranks, "reading a checkpoint")
    if anew and ranks.rank == 0:
        message = "%s: written under another learner.optimizer: the states of %d parameters begin anew, the first %s"
        _LOG.warning(message, folder, len(anew), anew[0])
    own = folder / f"rank_{ranks.rank:05d}.msgpack"
    _on_all_ranks(own, lambda: _restore_generators(own, contents, ranks.device), ranks, "the state of random numbers")
    return contents


def load_weights(folder: Path, policy: nn.Module) -> None:
    """Restore the trained weights alone, in a single process that holds the whole model. Raises CheckpointError."""

    def read() -> None:
        contents = read_trainer_contents(folder)
        for name in contents.files:
            check_file(folder / name, contents.files[name])
        _read(folder, policy, None)

    _as_checkpoint_error(folder, read)


def _read(folder: Path, policy: nn.Module, optimizer: Optimizer | None) -> list[str]:
    """Read this rank's part. Returns the parameters whose saved state is of another optimizer and is not read.

    The optimizer forgets its present states. A parameter whose saved state is missing or not read has no state
    afterwards. Without an optimizer only weights are read. Raises CheckpointError for a checkpoint of another model.
    """
    anew = []
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    saved_tensors = metadata.state_dict_metadata
    parameters = _trained(policy)
    saves_adapters, has_adapters = (
        any(name.endswith(f".{A}") for name in names) for names in (saved_tensors, parameters)
    )
    if saves_adapters and not has_adapters:
        reason = "holds adapters, and lora.rank = 0 trains the model itself: set it as it was"
        raise CheckpointError(str(folder), reason)
    if has_adapters and not saves_adapters:
        raise CheckpointError(str(folder), "holds a whole model and no adapters: set lora.rank = 0, as it was")
    weights = {f"{WEIGHTS}/{name}" for name in parameters}
    for name in sorted(weights ^ {name for name in saved_tensors if name.startswith(f"{WEIGHTS}/")}):
        where = (
            "the model has it, the checkpoint does not"
            if name not in saved_tensors
            else "the model has none of that name"
        )
        raise CheckpointError(str(folder), f"is of another model: {name}: {where}")
    for name, parameter in parameters.items():
        saved = getattr(saved_tensors[f"{WEIGHTS}/{name}"], "size", ())
        if saved != parameter.shape:
            reason = f"is of another model: {name} is {list(saved)}, and {list(parameter.shape)} in the model"
            raise CheckpointError(str(folder), reason)
        if optimizer is None:
            continue
        optimizer.state.pop(parameter, None)
        saved_state = tuple(key for key in STATES if f"{key}/{name}" in saved_tensors)
        if saved_state not in ((), ADAMW_STATE, MUON_STATE):
            raise CheckpointError(str(folder), f"has {', '.join(saved_state)} alone of the optimizer's state of {name}")
        # DCP reads into existing tensors, and an optimizer creates its tensors only in its first step.
        if saved_state == state_names(optimizer, parameter):
            optimizer.state[parameter] = state_of(optimizer, parameter)
        elif saved_state:
            anew.append(name)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Each rank plans as if it were the only one, since it needs only its own shards.
    planner.set_up_planner(dict(_tensors(policy, optimizer)), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = planner.create_global_plan([plan])[0]
    with torch.no_grad():
        reader.read_data(planner.finish_plan(plan), planner).wait()
    return anew


def _tensors(policy: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds, by name: the live ones; without an optimizer the weights alone."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trained(policy).items():
        tensors[f"{WEIGHTS}/{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        assert state.keys() <= set(STATES)
        tensors |= {f"{key}/{name}": state[key] for key in STATES if key in state}
    return tensors


def _trained(policy: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by name; frozen ones are loaded from model.path instead."""
    return {name: parameter for name, parameter in policy.named_parameters() if parameter.requires_grad}


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    """Return where a shard begins in its tensor, and its extent."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def _generators(device: torch.device) -> _Generators:
    legacy: tuple[Any, ...] = np.random.get_state(legacy=True)  # type: ignore[assignment]
    kind, keys, position, has_gauss, cached = legacy
    version, numbers, gauss = random.getstate()
    return _Generators(
        torch=torch.get_rng_state().numpy().tobytes(),
        cuda=torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else None,
        numpy=(kind, keys.tobytes(), position, has_gauss, cached),
        python=(version, list(numbers), gauss),
    )


def _restore_generators(path: Path, contents: TrainerContents, device: torch.device) -> None:
    """Restore this rank's generators; a rank that was not there when the checkpoint was written has none.

    ``load`` has compared the checksum of the file.
    """
    if path.name not in contents.files:
        return
    saved = msgspec.msgpack.decode(path.read_bytes(), type=_Generators)
    kind, keys, position, has_gauss, cached = saved.numpy
    version, numbers, gauss = saved.python
    torch.set_rng_state(torch.frombuffer(bytearray(saved.torch), dtype=torch.uint8))
    if saved.cuda is not None and device.type == "cuda":
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(saved.cuda), dtype=torch.uint8), device)
    np.random.set_state((kind, np.frombuffer(keys, dtype=np.uint32), position, has_gauss, cached))
    random.setstate((version, tuple(numbers), gauss))


def _on_all_ranks(path: Path, work: Callable[[], T], ranks: Ranks, what: str) -> T:
    """All ranks together: call ``work`` on each, and return its result.

    If ``work`` fails on any rank, all raise CheckpointError, or DamagedCheckpoint if every failure is damage.
    """
    results: list[T] = []
    problem = None
    try:
        results.append(_as_checkpoint_error(path, work))
    except CheckpointError as error:
        problem = msgspec.json.encode([error.path, error.reason, isinstance(error, DamagedCheckpoint)]).decode()
    problems = ranks.agree(problem, what)
    if problems:
        failures = [msgspec.json.decode(text, type=tuple[str, str, bool]) for text in problems]
        # The first error that is not damage decides; without one, the first error.
        where, reason, is_damage = next((each for each in failures if not each[-1]), failures[0])
        raise (DamagedCheckpoint if is_damage else CheckpointError)(where, reason)
    return results[0]


def _as_checkpoint_error(path: Path, work: Callable[[], T]) -> T:
    """Call ``work``; its errors become CheckpointError, since DCP and torch raise errors of any type."""
    try:
        return work()
    except CheckpointError:
        raise
    except OSError as error:
        raise refused(path, error) from error
    except Exception as error:
        full = full_errno(error, path)
        reason = os.strerror(full) if full else f"{type(error).__name__}: {error}"
        raise CheckpointError(str(path), reason, full=full) from error
