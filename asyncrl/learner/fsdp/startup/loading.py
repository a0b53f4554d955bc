"""Reads a model from its files, each rank its own rows.

A weight is cut by rows, as FSDP2 will shard it (shard_plan.py). Each rank maps the files into memory, reads its own
rows, a layer at a time, and casts them to float32 in host memory. A host reads from storage only the rows of its ranks,
each byte once. No rank holds more than its shards and one layer. If transformers must convert a weight across rows,
each rank reads it whole, a layer at a time; only the first read goes to storage.
transformers itself reads, renames, converts and ties weights and computes buffers, as in its ``from_pretrained``.

If any rank cannot read a model like this (``shard_plan.obstacle``), rank 0 reads it whole and sends each rank its rows.

Invariant: each rank gets, bit for bit, its rows of the model that ``load_policy`` gives.

Fails with ConfigError, on all ranks alike, when the model cannot be loaded on one.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from asyncrl.config.training import ModelConfig
from asyncrl.core.errors import ConfigError
from asyncrl.learner.fsdp.model.policy import Policy, local, parts
from asyncrl.learner.fsdp.ranks.ranks import Ranks
from asyncrl.learner.fsdp.startup.shard_plan import (
    INDEX,
    ONE_FILE,
    converts_rows,
    obstacle,
    own_rows,
    read_together,
    refusal,
)

_LOG = logging.getLogger(__name__)
UNLOADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""Types of errors that transformers raises when it cannot load a model."""


@dataclass
class Loaded:
    """This rank's rows of a model, and what is needed to build the model around them."""

    config: ModelConfig
    values: dict[str, Tensor]
    """This rank's rows of each parameter, and the buffers, by the names of Policy, in host memory. ``sharding.fill``
    removes what it copies."""
    tied: dict[str, str]
    """Names of tied weights, each with the name of the weight that it shares."""
    conversions: Any
    """Conversions by which transformers turned the checkpoint's names and shapes into its own."""

    def empty(self) -> Policy:
        """Build a policy on device "meta", with exactly the parameters of ``values`` and the weights tied as loaded."""
        policy = empty_policy(self.config)
        model = policy.model
        for name in model.all_tied_weights_keys.keys() - self.tied.keys():
            # The configuration ties this weight, but the checkpoint has a value of its own for it.
            _replace(model, name, nn.Parameter(model.get_parameter(name).detach().clone()))
        model.all_tied_weights_keys = dict(self.tied)
        model._weight_conversions = self.conversions
        return policy


def load(config: ModelConfig, ranks: Ranks, mesh: DeviceMesh) -> Loaded:
    """All ranks together: read the model that ``config`` names, each rank its rows. Raises ConfigError.

    Each rank checks the files first. If any rank cannot read them in shards, rank 0 reads the model whole and sends the
    rows. ``mesh`` is the mesh of all ranks for tensors in host memory.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if refused := ranks.agree(_judge_folder(config, refusal), "looking at what the model's folder holds"):
        raise ConfigError([f"model.path: {config.path} cannot be trained: {refused[0]}"])
    reasons = ranks.agree(_judge_folder(config, obstacle), "looking at the files of the model")
    if reasons and not ranks.rank:
        _LOG.warning("%s: learner/0 reads it whole and hands it out: %s", config.path, reasons[0])
    policy, problem = None, None
    try:
        if not reasons:
            policy = _read(config, mesh)
        elif not ranks.rank:
            policy = load_policy(config)
        else:
            policy = empty_policy(config)
    except ConfigError as error:
        problem = "\n".join(error.problems)
    if problems := ranks.agree(problem, "loading the model"):
        raise ConfigError(list(dict.fromkeys(problems)))
    assert policy is not None
    if reasons:
        with ranks.waiting("handing out the weights"):
            _distribute(policy, ranks, mesh)
    model = policy.model
    return Loaded(config, parts(policy), model.all_tied_weights_keys, getattr(model, "_weight_conversions", None))


def _judge_folder(config: ModelConfig, judge: Callable[[Collection[str], Mapping[str, Any]], str | None]) -> str | None:
    """Call ``judge`` (``refusal`` or ``obstacle``) with the file names and the config.json of the model's folder."""
    folder = Path(config.path or "")
    try:
        settings = json.loads((folder / "config.json").read_text())
        return judge([file.name for file in folder.iterdir()], settings)
    except (OSError, ValueError, AttributeError):
        # Loading the model raises an error that says more.
        return None


def _read(config: ModelConfig, mesh: DeviceMesh) -> Policy:
    """Read the model in shards: this rank's rows of each weight. Raises ConfigError."""
    policy, path = empty_policy(config), model_folder(config)
    try:
        info = _fill(policy.model, _files(path), mesh)
    except UNLOADABLE as error:
        raise cannot_load(path, error) from error
    refuse_incomplete(policy.model, path, info)
    return policy


def _files(folder: Path) -> list[Path]:
    """Return the files with the model's weights: the only one, or those that the index names."""
    if (folder / ONE_FILE).is_file():
        return [folder / ONE_FILE]
    return [folder / name for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))]


def _fill(model: Any, files: list[Path], mesh: DeviceMesh) -> dict[str, Any]:
    """Read this rank's rows from ``files`` into a model on device "meta", a layer at a time.

    Parameters that can be read by rows become shards first. Others are read whole and then cut. Returns the loading
    information of ``from_pretrained``. Raises an error of UNLOADABLE.
    """
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model, dot_natural_key
    from transformers.modeling_utils import LoadStateDictConfig

    info = None
    with ExitStack() as opened:
        slices = dict[str, _Slice]()
        for file in files:
            source = opened.enter_context(safe_open(file, framework="pt"))
            slices |= {name: _Slice(source.get_slice(name)) for name in source.keys()}  # noqa: SIM118 - no mapping
        targets, by_rows = _match_names(model, sorted(slices, key=dot_natural_key), mesh)
        _make_empty_shards(model, by_rows, mesh)
        mapping: Any = get_model_conversion_mapping(model)
        config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=mapping)
        for group in read_together(targets):
            group_info, _ = convert_and_load_state_dict_in_model(
                model, {name: slices[name] for name in group}, config, None
            )
            _keep_own_rows(model, mesh)
            if info is not None:
                # Each group counts the weights of other groups as missing. A weight is missing if all groups count it.
                group_info.missing_keys &= info.missing_keys
                group_info.unexpected_keys |= info.unexpected_keys
                group_info.mismatched_keys |= info.mismatched_keys
                group_info.conversion_errors |= info.conversion_errors
            info = group_info
    if info is None:
        raise ValueError("its files hold no weights")
    report: dict[str, Any] = model._finalize_model_loading(model, config, info).to_dict()
    return report


class _Slice:
    """A tensor in a file, with the interface that transformers reads.

    Each read copies out of the mapped file, so that the file is read once.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.get_shape, self.get_dtype = source.get_shape, source.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        read: Tensor = self._source[index]
        # transformers casts any other type to float32, which copies.
        return read.clone() if read.dtype == torch.float32 else read


def _match_names(model: Any, names: list[str], mesh: DeviceMesh) -> tuple[dict[str, str], list[str]]:
    """Match the weights of the checkpoint (``names``) with those of the model.

    Returns the model's name for each name in the checkpoint: that of the weight that it becomes, or the first of
    several. Also returns the parameters that can be read by rows (``converts_rows``).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    # A copy of its own: renaming changes the state of these objects.
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    operations = {pattern: entry.operations for entry in converters for pattern in entry.source_patterns}
    parameters, state = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
    prefix = model.base_model_prefix
    targets, by_rows = dict[str, str](), dict[str, None]()
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        # The name may be the model's already, where a renaming does not apply.
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        targets[name] = target
        steps = [(type(each).__name__, getattr(each, "dim", 0)) for each in operations.get(pattern or "", ())]
        if target in parameters and converts_rows(steps, len(parameters[target]), mesh.size(mesh.ndim - 1)):
            by_rows[target] = None
    return targets, list(by_rows)


def _make_empty_shards(model: nn.Module, names: list[str], mesh: DeviceMesh) -> None:
    """Replace parameters by empty shards, so that transformers reads only this rank's rows."""
    for name in names:
        parameter = model.get_parameter(name)
        rows = len(own_rows(len(parameter), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)))
        _replace(model, name, _shard(parameter.new_empty(rows, *parameter.shape[1:]), parameter, mesh))


def _keep_own_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the parameters that have been read whole to this rank's rows."""
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        rows = own_rows(len(parameter), mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1))
        cut = _shard(parameter.detach()[rows.start : rows.stop].clone(), parameter, mesh)
        # By this attribute transformers knows that the weight needs no initial value.
        cut._is_hf_initialized = True  # type: ignore[attr-defined]
        _replace(model, name, cut)


def _shard(local: Tensor, whole: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    """Make a sharded parameter of the shape of ``whole``, with ``local`` as this rank's rows."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    shard = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(shard, requires_grad=whole.requires_grad)


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` in place of the one with this dotted name."""
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, parameter)


def _distribute(policy: Policy, ranks: Ranks, mesh: DeviceMesh) -> None:
    """All ranks together: distribute rank 0's whole model, tensor by tensor; each rank keeps its rows.

    On other ranks ``policy`` has no values yet (device "meta"). All tensors are in host memory. Buffers are not
    sharded.
    """
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    parameters = dict(policy.named_parameters())
    # A tied weight has several names and is handed out once.
    places: dict[int, list[str]] = {id(parameter): [] for parameter in parameters.values()}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        places[id(parameter)].append(name)
    for parameter in parameters.values():
        whole = parameter.detach() if not ranks.rank else torch.empty(parameter.shape, dtype=parameter.dtype)
        shard = nn.Parameter(distribute_tensor(whole, mesh, placements), requires_grad=parameter.requires_grad)
        for name in places[id(parameter)]:
            _replace(policy, name, shard)
        ranks.note_progress()
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # As bytes: not every backend broadcasts every type.
            whole = buffer.detach() if not ranks.rank else torch.empty(buffer.shape, dtype=buffer.dtype)
            raw = whole.reshape(-1).view(torch.uint8).clone()
            dist.broadcast(raw, 0)
            setattr(module, name, raw.view(buffer.dtype).view(buffer.shape))


def load_policy(config: ModelConfig) -> Policy:
    """Load the whole model in float32 on the CPU. Raises ConfigError.

    It is in evaluation mode, without dropout, so that log-probs of different passes can be compared.
    """
    import transformers

    path = model_folder(config)
    auto: Any = transformers.AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            path,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except UNLOADABLE as error:
        raise cannot_load(path, error) from error
    refuse_incomplete(model, path, info)
    return Policy(model.eval())


def cannot_load(path: Path, error: Exception) -> ConfigError:
    """Return the error for a model that transformers cannot load; it names ``model.path``."""
    return ConfigError([f"model.path: {path} cannot be loaded as a causal LM: {error}"])


def refuse_incomplete(model: nn.Module, path: Path, info: dict[str, Any]) -> None:
    """Raise ConfigError if a model lacks weights, or holds NaN or infinity; ``info`` is transformers' report."""
    # transformers would use random numbers in place of missing weights.
    wrong = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if wrong:
        raise ConfigError([f"model.path: {path} lacks {len(wrong)} weights of the model, the first {wrong[0]}"])
    if broken := _not_finite(model):
        problem = f"{path} holds weights that are not finite (NaN or infinity) in {len(broken)} tensors"
        raise ConfigError([f"model.path: {problem}, the first {broken[0]}: download or copy the model again"])


def _not_finite(model: nn.Module) -> list[str]:
    """Return the names of the parameters that hold NaN or infinity in this rank's part."""

    def is_finite(weights: Tensor) -> bool:
        # A sum might overflow, and a mask of the same shape would take much memory.
        return not weights.numel() or all(math.isfinite(end.item()) for end in torch.aminmax(weights))

    return [name for name, weights in model.named_parameters() if not is_finite(local(weights))]


def empty_policy(config: ModelConfig) -> Policy:
    """Build the model of ``config`` on device "meta", without memory for its parameters. Raises ConfigError."""
    import transformers

    path = model_folder(config)
    try:
        settings = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=config.trust_remote_code
        )
        with torch.device("meta"):
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_config(settings, dtype=torch.float32, trust_remote_code=config.trust_remote_code)
    except UNLOADABLE as error:
        raise cannot_load(path, error) from error
    return Policy(model.eval())


def model_folder(config: ModelConfig) -> Path:
    """Return the folder of the model. Raises ConfigError naming model.path if it holds no config.json."""
    assert config.path is not None
    path = Path(config.path)
    if not (path / "config.json").is_file():
        what = "holds no config.json" if path.is_dir() else "is no folder"
        raise ConfigError([f"model.path: {config.path} {what}; it must hold a Hugging Face causal LM"])
    return path
