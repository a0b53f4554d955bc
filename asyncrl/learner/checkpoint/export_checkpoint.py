"""Converts a checkpoint into a folder that transformers and vLLM load, without the run that wrote it.

The conversion runs on the CPU of one host, for any number of ranks, and needs memory for the weights in float32. The
model's layout, buffers and tokenizer are those of model.path. The files equal, bit for bit, those that the learner
would write at that version in that dtype. Merged adapters agree to the rounding of a sum in float32.

Fails with CheckpointError that names a damaged file, or says that the checkpoint is of another model. Fails with
ConfigError if the model of model.path cannot be loaded, and with OSError if the target cannot be written. After a
failure the target is as it was.
"""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.checkpoint.contents import TRAINER
from asyncrl.checkpoint.folder import CheckpointFolder, Found
from asyncrl.config import Config
from asyncrl.config.hub import model_name
from asyncrl.config.training import ModelConfig
from asyncrl.learner.fsdp.model.lora import add_adapters, target_names
from asyncrl.learner.fsdp.startup.loading import load_policy, model_folder
from asyncrl.learner.fsdp.weights.assembly import adapter_units, model_units, whole_buckets
from asyncrl.learner.fsdp.weights.dcp import load_weights
from asyncrl.learner.fsdp.weights.export import adapter_settings, export, export_adapter


def export_checkpoint(
    checkpoints: CheckpointFolder,
    found: Found,
    model: ModelConfig,
    config: Config,
    target: Path,
    dtype: str,
    *,
    adapter_alone: bool = False,
) -> None:
    """Verify the checkpoint ``found``, and write its weights to the folder ``target``, whose files are replaced.

    ``dtype`` is float32 or bfloat16. ``config`` is that of the run; ``model`` says where its model lies now.
    ``adapter_alone``: write only the adapter, in PEFT's layout, not the model that it is merged into.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    checkpoints.verify(found)
    policy, lora, torch_dtype = load_policy(model), config.lora, getattr(torch, dtype)
    if lora.is_on:
        add_adapters(policy, lora, seed=config.run.seed)
    load_weights(found.path / TRAINER, policy)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = model_folder(model)
    if not adapter_alone:
        export(whole_buckets(model_units(policy), dtype=torch_dtype), source, target, torch_dtype)
        return
    name = model_name(config) if model.path == config.model.path else str(model.path)
    settings = adapter_settings(lora, model=name, targets=target_names(policy.model, lora))
    export_adapter(whole_buckets(adapter_units(policy), dtype=torch_dtype), source, target, settings)
