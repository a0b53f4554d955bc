"""Evaluation sets over made-up prompts."""

from asyncrl.config.training import EvalConfig, EvalPromptsConfig
from asyncrl.dataloader.evals import EvalSet


def eval_set(
    name: str, prompts: tuple[int, ...], *, every_versions: int = 0, at_start: bool = False, at_end: bool = False
) -> EvalSet:
    """A set that is evaluated at these times only."""
    config = EvalConfig(
        data=EvalPromptsConfig(source="synthetic"), every_versions=every_versions, at_start=at_start, at_end=at_end
    )
    return EvalSet(name, prompts, config)
