"""Statistics that rollouters send to the learner: of their generation, and of the updates of their weights."""

from __future__ import annotations

from msgspec import Struct

from asyncrl.messages import ROLLOUTER, Count, Message


class UpdateTimes(Struct, gc=False, frozen=True, kw_only=True):
    """The cost of one weight update for one replica: seconds and bytes."""

    version: int
    transport: str = ""
    """nccl, gloo, shm, stream, or ipc: shm with the bytes from a copy on the same GPU."""
    stage_s: float = 0.0
    """With shm and stream, time until all bytes were received and verified; the engine generates meanwhile. Else 0."""
    pause_s: float = 0.0
    """Time that it took to pause the engine."""
    load_s: float = 0.0
    """Time to load the weights; with nccl and gloo it includes the transfer."""
    resume_s: float = 0.0
    stall_s: float = 0.0
    """Generation time lost: from when the engine stops admitting requests until it admits them again."""
    bytes: int = 0
    """Size of the weights."""
    drift: float | None = None
    """Drift of the engine from the learner (nats; rollouter/serving/drift.py); None if it was not measured."""
    drift_worst: float | None = None
    """Largest difference of log-probs over the probe's tokens (nats)."""
    probe_kl: float | None = None
    """Estimated divergence of the engine from the learner over the probe's tokens (nats)."""
    checksum: str = ""
    """Checksum of the engine's own copy of the weights under weights.verify = full; equal in all engines of a kind."""

    @property
    def encoded_bytes(self) -> int:
        """Bytes that were read or received for the weights: all of them."""
        return self.bytes


class RolloutStats(Message, frozen=True, kw_only=True):
    """Rollouter to learner, cast twice a second while it generates: statistics of its generation and updates."""

    senders = ROLLOUTER
    sampled_tokens: Count
    """Tokens sampled since the start of this incarnation, eval included."""
    sampling: list[tuple[float, float]]
    """Intervals (wall clock, s) in which at least one token was being sampled, since the last cast."""
    updates: list[UpdateTimes] = []
    """Times of the weight updates since the last cast."""
    in_flight: Count = 0
    """Leased trajectories that are not generated yet."""
    served_version: int = -1
    reprefill_tokens: Count = 0
    """Tokens that its engines have computed again because of updates and sleeps, since this incarnation's start."""
    idle: bool = False
    """Whether it generates nothing and has no news. It sends the next statistics on news, or after some seconds."""
