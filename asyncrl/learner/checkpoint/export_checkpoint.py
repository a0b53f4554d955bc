"""A checkpoint as a folder that transformers and vLLM load, made without the run that wrote it.

On the CPU of one host, whatever the learner's ranks were: it needs the memory of the weights in float32, and nothing
of the optimizer's. The model's layout, its buffers and its tokenizer are those of model.path. What is written is, bit
for bit, what the learner would have written at that version in that dtype.

Fails with CheckpointError naming the file that is damaged, ConfigError if model.path is not there or is another model,
and OSError if the target cannot be written; then there is no target.
"""

from __future__ import annotations

from pathlib import Path

import torch

from asyncrl.checkpoint.contents import TRAINER
from asyncrl.checkpoint.folder import CheckpointFolder
from asyncrl.checkpoint.retention import Found
from asyncrl.config.training import ModelConfig
from asyncrl.learner.fsdp.dcp import load_weights
from asyncrl.learner.fsdp.export import export
from asyncrl.learner.fsdp.gather import whole_buckets
from asyncrl.learner.fsdp.policy import load_policy, model_folder


def export_checkpoint(
    checkpoints: CheckpointFolder, found: Found, model: ModelConfig, target: Path, dtype: str
) -> None:
    """Write ``found`` to ``target``, in place of what is there; ``dtype`` is float32 or bfloat16."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    checkpoints.verify(found)
    policy, kind = load_policy(model), getattr(torch, dtype)
    load_weights(found.path / TRAINER, policy)
    target.parent.mkdir(parents=True, exist_ok=True)
    export(whole_buckets(policy, dtype=kind), model_folder(model), target, kind)
