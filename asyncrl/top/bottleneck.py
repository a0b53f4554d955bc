"""The bottleneck: the stage of the pipeline that sets the pace. Pure; its facts come from state-time ledgers.

The flow is dataloader → rollouters → reward → learner → weights, and back: the gate admits a prompt when earlier ones
are trained. The rules are in docs/monitor.md. Among the stages that are busy at least SATURATED of their time, the one
furthest downstream sets the pace. If no stage is that busy, the verdict follows from the waits of the stages. A window
shorter than MIN_WINDOW_S has no verdict.

Shares of a stage cover the time of all its resources. A dead resource has no time, and starting counts as busy, because
others wait for it. The learner's shares are those of rank 0: the other ranks wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.core.states import STATES, FlowKind

SATURATED = 0.8
MIN_WINDOW_S = 3.0
WAITS = 0.05
"""Share of waiting from which on the verdict names it."""

Stage = Literal["dataloader", "rollouters", "reward", "learner", "weights"]
"""Stages in the order of flow."""

KIND_OF = {name: state.flow for states in STATES.values() for name, state in states.items()}


def kind_of(state: str) -> FlowKind:
    """Kind of a state for the flow; an unknown state counts as work."""
    return KIND_OF.get(state, "work")


def by_kind(shares: Mapping[str, float]) -> dict[FlowKind, float]:
    """Shares of states, added up by their kinds."""
    found: dict[FlowKind, float] = {}
    for state, share in shares.items():
        found[kind_of(state)] = found.get(kind_of(state), 0.0) + share
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Facts about the stages over a window; levels are means. An empty mapping or None is unknown."""

    running: bool = True
    """Whether the run is in the phase running, and not stalled."""
    window_s: float
    rollouters: Mapping[str, float] = field(default_factory=dict)
    """Shares of the engines' time by state, which add up to 1; so do those of the other stages."""
    reward: Mapping[str, float] = field(default_factory=dict)
    learner: Mapping[str, float] = field(default_factory=dict)
    dataloader_busy: float | None = None
    """Share of time in which the dataloader's event loop used a processor."""
    generating: float | None = None
    """Trajectories that are leased and not finished, including waiting ones."""
    at_reward: float | None = None
    """Trajectories at the reward pool."""
    lag: float | None = None
    """Versions that the engines are behind, as a mean."""
    gate_open: bool | None = None
    """Whether there was room for leases all the time."""
    episodes: Mapping[str, float] = field(default_factory=dict)
    """Open episodes by stage."""
    exhausted: bool = False
    """Whether all prompts that are left to train are leased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck, if there is one, and a sentence on the reason."""

    stage: Literal["gate", "episodes", Stage] | None
    """``gate`` is part of the dataloader, ``episodes`` the user's code that plays episodes. None is no bottleneck."""
    why: str


def find_bottleneck(flow: Flow) -> Verdict:
    """The verdict, by the rules of the module."""
    if not flow.running:
        return Verdict(stage=None, why="")
    if flow.window_s < MIN_WINDOW_S or not (flow.rollouters and flow.learner):
        return Verdict(stage=None, why="measuring")
    return _saturated(flow) or _unsaturated(flow)


def _saturated(flow: Flow) -> Verdict | None:
    """The verdict on the stage furthest downstream that is busy at least SATURATED of its time; None without one.

    The tests go from the learner back to the dataloader, with ``_episodes`` between reward and rollouters. A learner or
    rollouters that spend more time on weight updates than on work give the verdict "weights".
    """
    learner, reward, rollouters = by_kind(flow.learner), by_kind(flow.reward), by_kind(flow.rollouters)
    if _occupied(learner) >= SATURATED:
        if learner.get("weights", 0.0) > learner.get("work", 0.0):
            return Verdict(stage="weights", why=f"the learner publishes {_percent(learner['weights'])} of the time")
        return _verdict(flow, "learner", _does(flow.learner))
    if flow.reward and _occupied(reward) >= SATURATED:
        return _verdict(flow, "reward", _does(flow.reward))
    if found := _episodes(flow):
        return found
    if _occupied(rollouters) >= SATURATED:
        if rollouters.get("weights", 0.0) > rollouters.get("work", 0.0):
            # "Them" are the weights: the screen shows the stage before the reason.
            why = f"engines are paused for them {_percent(rollouters['weights'])} of the time"
            return Verdict(stage="weights", why=f"{why}{_others(flow, but='rollouters')}")
        return _verdict(flow, "rollouters", _does(flow.rollouters))
    if flow.dataloader_busy is not None and flow.dataloader_busy >= SATURATED:
        return _verdict(flow, "dataloader", f"its event loop is busy {_percent(flow.dataloader_busy)} of the time")
    return None


def _episodes(flow: Flow) -> Verdict | None:
    """The verdict if most open episodes run the user's code; None if not, or with less than one open episode.

    Numbers of episodes are means over the window, so they may be fractions. This test comes before that of the
    rollouters, because the few other episodes can keep an engine busy.
    """
    with_user = {stage: level for stage, level in flow.episodes.items() if stage not in NOT_USERS}
    users, every = sum(with_user.values()), sum(flow.episodes.values())
    if every < 1 or users <= every / 2:
        return None
    largest = max(with_user, key=lambda stage: with_user[stage])
    at = _STAGES_SAID.get(largest, f"in {largest}")
    why = f"{users:.0f} of {every:.0f} run their own code, {with_user[largest]:.0f} of them {at}"
    return _verdict(flow, "episodes", why)


NOT_USERS = frozenset({"queue", "engine", "paused", "score", "judge"})
"""Stages in which an episode waits for the run."""
_STAGES_SAID = {
    "start": "before their first call of the policy",
    "user": "between two calls of the policy",
    "close": "at their close",
}
"""Words for stages of the user's code; another stage is "in STAGE"."""


def _unsaturated(flow: Flow) -> Verdict:
    """The verdict if no stage is busy enough: the stage that the others wait for.

    It names no stage if nothing is known of the gate, or if the last prompts are under way.
    """
    if flow.exhausted:
        return Verdict(stage=None, why="the last prompts are under way")
    at_reward, generating = flow.at_reward, flow.generating
    if at_reward is not None and generating is not None and at_reward > generating:
        why = f"{at_reward:.0f} of {at_reward + generating:.0f} trajectories are with it"
        return _verdict(flow, "reward", why)
    # The rollouters and the learner are not busy, so the reason includes the waits of both.
    others = _others(flow, but="dataloader").removeprefix("; ")
    if flow.lag is not None and flow.lag >= 1.0:
        return Verdict(stage="weights", why=f"engines are {flow.lag:.1f} versions behind; {others}")
    if flow.gate_open:
        return Verdict(stage="dataloader", why=f"the gate is open, but no leases come; {others}")
    if flow.gate_open is None:
        return Verdict(stage=None, why=f"nothing is known of the gate; {others}")
    return Verdict(stage="gate", why=f"it is closed: {others}")


def _occupied(kinds: Mapping[FlowKind, float]) -> float:
    """The busy share of a stage's time: all kinds of states except waiting."""
    return sum(share for kind, share in kinds.items() if kind != "wait")


def _does(shares: Mapping[str, float]) -> str:
    """Words for the busy share of a stage's time, and for the busy state with most of it."""
    state = max((state for state in shares if kind_of(state) != "wait"), key=lambda state: shares[state])
    busy, largest = _percent(_occupied(by_kind(shares))), _percent(shares[state])
    return f"{state} {largest} of the time" if largest == busy else f"busy {busy} of the time ({state} {largest})"


def _verdict(flow: Flow, stage: Literal["episodes", Stage], why: str) -> Verdict:
    """The verdict on ``stage``; its reason is ``why``, then the waits of rollouters and learner."""
    return Verdict(stage=stage, why=f"{why}{_others(flow, but=stage)}")


def _others(flow: Flow, *, but: str) -> str:
    """Words for the waits of rollouters and learner, as the end of a reason: "; the learner waits 40 % for groups".

    Waits of the stage ``but``, and those below the share WAITS, are left out. The text may be empty.
    """
    waiting = []
    waits = by_kind(flow.rollouters).get("wait", 0.0)
    if but != "rollouters" and waits >= WAITS:
        waiting.append(f"rollouters wait {_percent(waits)} for {'calls' if but == 'episodes' else 'leases'}")
    waits = by_kind(flow.learner).get("wait", 0.0)
    if but != "learner" and waits >= WAITS:
        waiting.append(f"the learner waits {_percent(waits)} for groups")
    return f"; {', '.join(waiting)}" if waiting else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
