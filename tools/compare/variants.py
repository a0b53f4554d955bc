"""The variants of a comparison: for each the keys in which its run differs from the quickstart.

Pure. A variant with a teacher learns from the run of the same seed that ``TAUGHT_BY`` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BASE: Mapping[str, str] = {
    "learner.ranks": "1",
    "learner.steps": "25",
    "learner.dynamic_sampling": "true",
    "eval.heldout_greedy.at_start": "false",
}
"""Keys of every run: it ends where curves are apart, half-way through the quickstart. Trained groups have a signal."""
STALE: Mapping[str, str] = {"staleness.max": "4", "staleness.adapt": "false"}
"""The gate lets generation run four versions ahead, and stays there."""
TAUGHT_BY = "decoupled"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way of training."""

    name: str
    group: str
    """The table that it stands in."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys and their values, as on a command line."""
    taught: bool = False
    """Learns from a teacher."""


LOSSES, ADVANTAGES, CORRECTIONS = "losses", "advantages", "corrections at staleness.max = 4"

VARIANTS: tuple[Variant, ...] = (
    Variant("decoupled", LOSSES),
    Variant("decoupled, 2 updates", LOSSES, {"learner.updates_per_batch": "2"}),
    Variant(
        "asymmetric clip, 2 updates",
        LOSSES,
        {"learner.updates_per_batch": "2", "learner.loss_options.clip_high": "0.28"},
    ),
    Variant("bypass", LOSSES, {"learner.loss": "bypass"}),
    Variant("gspo", LOSSES, {"learner.loss": "gspo", "learner.aggregation": "sequence"}),
    Variant("cispo", LOSSES, {"learner.loss": "cispo"}),
    Variant("dppo", LOSSES, {"learner.loss": "dppo"}),
    Variant("reinforce", LOSSES, {"learner.loss": "reinforce"}),
    Variant("decoupled, KL to the start", LOSSES, {"learner.kl.coefficient": "0.01"}),
    Variant("distill", LOSSES, {"learner.loss": "distill"}, taught=True),
    Variant("dr_grpo", ADVANTAGES, {"learner.advantage": "dr_grpo", "learner.aggregation": "constant"}),
    Variant("rloo", ADVANTAGES, {"learner.advantage": "rloo"}),
    Variant("reinforce", ADVANTAGES, {"learner.advantage": "reinforce", "learner.dynamic_sampling": "false"}),
    Variant("uncorrected", CORRECTIONS, {**STALE, "learner.correction.weight": "none"}),
    Variant("weight by token", CORRECTIONS, {**STALE, "learner.correction.weight": "token"}),
    Variant("weight by sequence", CORRECTIONS, {**STALE, "learner.correction.weight": "sequence"}),
    Variant("mask", CORRECTIONS, {**STALE, "learner.correction.mask": "[0.5, 2.0]"}),
    Variant("bypass", CORRECTIONS, {**STALE, "learner.loss": "bypass"}),
)
