"""The life of a run: checkpoints, preemption, sockets, keys, supervision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from asyncrl.config.section import EXPAND_PATHS, NonNegative, OptionalPath, Positive, Seconds, Section
from asyncrl.core.states import OF_ACTORS, STATES

LAST_GROUPS_SHARE = 0.3
"""Share of preempt.grace_s for which a preempted run waits at most for the last groups of the rollouters."""
TAKE_SHARE = 0.8
"""Share of learner.collective_timeout_s in which an engine must give a GPU back in time slices."""


class CheckpointConfig(Section):
    """Checkpoints, and the export at the end."""

    every_versions: NonNegative = 20
    """Write a checkpoint at each multiple of this many versions, and at the end; 0 writes one only at preemption."""
    dir: OptionalPath = None
    """Folder of the checkpoints, shared by all learner ranks; by default checkpoints/ in the run folder."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    keep_every_steps: NonNegative = 0
    """Besides the newest, keep the first checkpoint at or after each multiple of this many steps; 0 keeps no others."""
    export_at_end: bool = True
    """Write the final weights in Hugging Face layout to export/ in the run folder."""
    room_wait_s: Seconds = 300.0
    """Longest wait for room for the last checkpoint and the export, or for a version when nothing is left to train;
    then the run fails. A preempted run has preempt.grace_s instead."""


class ResumeConfig(Section):
    """Resuming a run (asyncrl-launch --resume)."""

    allow: list[Literal["data", "seed", "batch"]] = []
    """Differences that a resume accepts: other prompts (they start a new epoch), another seed, another batch geometry.
    The flags --allow-changed-data, -seed and -batch set it."""


class HubConfig(Section):
    """The Hugging Face hub (docs/models.md)."""

    pinned: dict[str, str] = {}
    """Names with their commits, by key; set by the launcher."""
    timeout_s: Seconds = 7200.0
    """Longest download to a host."""

    @field_validator("pinned")
    @classmethod
    def _refuse_given(cls, pinned: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if pinned and info.context == EXPAND_PATHS:
            raise ValueError("is set by the launcher; to choose a commit, write ORG/NAME@COMMIT into the key itself")
        return pinned


class PreemptConfig(Section):
    """The end of a run that is preempted: by Ctrl-C, a closed terminal, SIGTERM, SIGUSR2 or --stop."""

    grace_s: Seconds = 60.0
    """Time in which the checkpoint must be complete; else the last one counts."""

    def too_short(self, step_s: float) -> tuple[str, str]:
        """Return the problem with grace_s if a step takes ``step_s`` (s, publication included), and what to do.

        Both texts are empty if there is no problem. A preempted run finishes the step that it has begun, waits for the
        last groups for LAST_GROUPS_SHARE of the time at most, and writes a checkpoint.
        """
        left_s = (1.0 - LAST_GROUPS_SHARE) * self.grace_s
        if step_s <= left_s:
            return "", ""
        least = math.ceil(step_s / (1.0 - LAST_GROUPS_SHARE)) + 1
        problem = (
            f"a step takes {step_s:.3g} s, and preempt.grace_s = {self.grace_s:g} leaves {left_s:.3g} s for it: a run "
            "that is asked to end may not reach a checkpoint"
        )
        return problem, f"set preempt.grace_s to {least} or more"


# A type checker cannot read a Literal that is computed.
if TYPE_CHECKING:
    ActorState = str
else:
    ActorState = Literal[tuple(dict.fromkeys(state for kind in OF_ACTORS for state in STATES[kind]))]
BUDGETS_S: dict[ActorState, float] = {
    "starting": 600.0,
    "waking": 600.0,
    "checkpointing": 1800.0,
    "exporting": 1800.0,
}
"""Times of states that may last longer than anything else of an actor."""


class WatchdogConfig(Section):
    """Reports of a stall: nothing moves although all actors are alive."""

    stall_s: Seconds = 300.0
    """Time without a trained group, a version or a token after which the waits of all actors are reported."""
    policy: Literal["report", "stop"] | None = None
    """The consequence of a stall (docs/failures.md). By default the run ends when a stall has outlasted stall_s and
    the longest deadlines of its work together. "stop" ends it with the first report, "report" never."""
    budgets_s: dict[ActorState, Seconds] = BUDGETS_S
    """Longer times for single states of an actor, by name of the state. States that are not named keep their times."""

    @field_validator("budgets_s", mode="before")
    @classmethod
    def _merge_with_defaults(cls, given: Any) -> Any:
        return BUDGETS_S | given if isinstance(given, dict) else given


class PlacementConfig(Section):
    """GPUs of learner and engines."""

    share: Literal["auto", "never", "always", "time_slice"] = "auto"
    """Whether an engine may use GPUs of the learner's ranks: if there are too few GPUs otherwise, never, or always.
    With time_slice both have the memory in turn (docs/learner.md)."""


class NetworkConfig(Section):
    """Sockets."""

    host: str = "127.0.0.1"
    """Address that actors bind, in a run on one host."""
    interface: str | None = None
    """Network interface whose address actors bind, in a run on several hosts. By default the one that routes to the
    head."""
    ports: Annotated[str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$")] = "0"
    """Ports that actors may bind: 0 for any, or LOW-HIGH. gloo and NCCL also use others."""
    controller_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the controller; 0 takes the lowest free one of network.ports. Choose the lowest or one
    outside: other actors take the highest."""
    max_message_bytes: Positive = 1 << 30
    """Largest message; the sender refuses larger ones."""
    call_timeout_s: Seconds = 30.0
    """Deadline of a call between actors."""


class SecurityConfig(Section):
    """Access to the actors, and isolation of users' code."""

    curve: Literal["auto", "required", "off"] = "auto"
    """CURVE encryption on every socket. auto requires it unless everything is on loopback. off sends secret and
    messages unencrypted: for tests and trusted networks."""
    isolate_user_code: Literal["auto", "required", "off"] = "auto"
    """Run users' code in namespaces without the run's keys and without access to other processes (docs/security.md).
    auto warns if the system forbids it; required refuses to start."""
    user_environment: list[str] = []
    """Environment variables that users' code gets in addition to the usual ones, for example the key of an API."""


class SupervisionConfig(Section):
    """Starting, watching and restarting actors."""

    heartbeat_s: Seconds = 1.0
    """Interval of heartbeats. An idle actor skips up to three in a row, if silence_s, unreachable_s, host_lost_s and
    watchdog.stall_s are at least 20 times as long."""
    silence_s: Seconds = 60.0
    """Silence after which an actor on a live host is killed and restarted. After as long (at least 10 s) a guard kills
    a silent node agent with its actors."""
    unreachable_s: Seconds = 60.0
    """Time after which one of two actors that cannot reach each other is restarted, although both send heartbeats."""
    host_lost_s: Seconds = 30.0
    """Silence of a host's node agent and actors after which the host counts as lost."""
    start_timeout_s: Seconds = 300.0
    """Longest time from an actor's start until it is ready."""
    max_restarts: NonNegative = 3
    """Restarts of one actor within restart_window_s before a replica has to rest or the run fails."""
    restart_window_s: Seconds = 600.0
    """Window in which restarts are counted, and first rest of a replica."""
    backoff_s: Seconds = 0.5
    """First pause before a restart; doubles with each."""
    drain_s: Seconds = 10.0
    """Time that actors get to end by themselves before they are killed."""
    host_grace_s: Seconds = 60.0
    """Silence of launcher and controller after which a node agent ends its host; also the longest wait for a lost host
    that the run needs."""

    @property
    def agent_silence_s(self) -> float:
        """Silence (s) after which a node agent on a live host counts as frozen.

        At least 10 s, because the end of an agent may end the run, and a busy machine must not cause that.
        """
        return max(self.silence_s, 10.0)
