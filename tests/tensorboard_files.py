"""Scalars that TensorBoard shows, read with its own reader."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(run_dir):
    """(step, value) by tag."""
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(e.step, round(e.value, 6)) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def steps(run_dir):
    """The scalars of training."""
    return [step for step, _ in scalars(run_dir).get("reward/mean", [])]
