"""The instructions of ``AgentState`` to a node agent, which carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start an actor now."""

    name: str


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """Report the end of this incarnation to the controller."""

    name: str
    incarnation: int
    exit_code: int
    fatal: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReportStart:
    """Report to the controller that this incarnation is live."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class AnnounceRestart:
    """Report to the launcher that an actor died ``after_s`` ago and is started again."""

    name: str
    reason: str
    after_s: float = field(default=0.0, compare=False)
    incarnation: int = field(default=0, compare=False)
    """The incarnation that died."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill an actor's process group; its end is reported like any other."""

    name: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask the controller to stop or to preempt the run."""

    reason: str
    preempt: bool = False


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill every process that is left."""


Instruction = Spawn | ReportStart | ReportEnd | AnnounceRestart | Kill | AskStop | KillAll
