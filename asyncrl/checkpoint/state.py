"""State of a run: all that a learner has to know, beside weights and groups, to lose nothing and repeat nothing."""

from __future__ import annotations

import msgspec

from asyncrl.checkpoint.origin import Origin
from asyncrl.config import Config
from asyncrl.messages import Count
from asyncrl.messages.groups import LedgerState

FORMAT = 3
"""Format of a state. Format 1 has groups without sequences; the ledger of 1 and 2 is one of intervals."""
READABLE = (1, 2, FORMAT)


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes by which prompts become steps and versions; a ledger and a schedule of steps only make sense with them."""

    groups_per_step: Count
    steps_per_version: Count
    samples_per_prompt: Count

    @classmethod
    def of(cls, config: Config) -> Geometry:
        """Geometry of a configuration."""
        return cls(
            groups_per_step=config.learner.groups_per_step,
            steps_per_version=config.learner.steps_per_version,
            samples_per_prompt=config.rollout.samples_per_prompt,
        )


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the adapters that are trained; at rank 0 the model's own weights are."""

    rank: Count = 0
    alpha: float = 0.0
    targets: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config) -> Adapters:
        """Adapters of a configuration."""
        lora = config.lora
        if not lora.is_on:
            return cls()
        targets = lora.targets if isinstance(lora.targets, list) else [lora.targets]
        return cls(rank=lora.rank, alpha=lora.alpha, targets=tuple(sorted(targets)))


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the run at a version boundary. Fields are only ever added, with a default."""

    format: int = FORMAT
    version: Count
    """Newest published version: that of the weights in the checkpoint, unless a run that made way could not publish
    the steps after it.
    """
    trained_at_version: Count
    """T(version): groups trained when it was published."""
    step: Count
    """Steps trained."""
    start: Count
    """Number of the learner's start in this run; lines of append-only files carry it."""
    incarnation: Count
    """Incarnation of the learner that wrote the checkpoint."""
    ledger: LedgerState
    fingerprint: str
    """Fingerprint of the prompts that the ledger speaks of."""
    seed: int
    """Seed of the prompts' order."""
    geometry: Geometry
    world_size: Count
    """Ranks that wrote the checkpoint."""
    limit: float = 0.0
    """Working limit eta_t, in versions."""
    rounds_closed: list[str] = []
    """Rounds of evaluation that are over, as NAME@ROUND."""
    quarantined: Count = 0
    """Groups quarantined since the last step."""
    delivered_lengths: list[Count] = []
    """Response lengths delivered since the last step, in tokens."""
    accumulators: dict[str, float] = {}
    """Running sums of metrics, by name."""
    buffered: Count = 0
    """Groups in the buffer; they are in groups.msgpack, first."""
    filtered: Count = 0
    """Groups filtered since the last step; they follow in groups.msgpack."""
    prompts: Count = 0
    """Number of prompts that the ledger speaks of; 0 where it is not known."""
    adapters: Adapters = Adapters()
    conversations: str = ""
    """Fingerprint of the conversations of sft.data; empty without."""
    origin: Origin = Origin()
    """The configuration and the files that the groups were made with."""
    components: list[str] = []
    """Names of reward components of the run (learner/groups/components.py)."""
