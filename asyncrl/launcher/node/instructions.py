"""The instructions of ``AgentState`` to a node agent, which the agent carries out in their order."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start an actor now."""

    name: str


@dataclass(frozen=True, slots=True)
class ReportEnd:
    """Tell the controller of the end of this incarnation."""

    name: str
    incarnation: int
    exit_code: int
    fatal: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReportStart:
    """Tell the controller that this incarnation lives."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class AnnounceRestart:
    """Tell the launcher that an actor that died for this reason, so long ago, is started again."""

    name: str
    reason: str
    after_s: float = field(default=0.0, compare=False)
    incarnation: int = field(default=0, compare=False)
    """The incarnation that died."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill an actor's process group; its end is reported as any other."""

    name: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask the controller to end the run in good order, or to let it make way."""

    reason: str
    preempt: bool = False


@dataclass(frozen=True, slots=True)
class KillAll:
    """Kill every process that is left."""


Instruction = Spawn | ReportStart | ReportEnd | AnnounceRestart | Kill | AskStop | KillAll
