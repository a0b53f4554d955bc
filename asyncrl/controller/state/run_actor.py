"""The controller as its parts know it: the registry, the state of the run, and methods for changes of these."""

from __future__ import annotations

from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.rpc.actor import Actor
from asyncrl.rpc.lifecycle.registry import Registry


class RunActor(Actor):
    """The base of the controller."""

    registry: Registry
    machine: RunStateMachine
    stalled: str = ""
    """Report of the present stall; empty while the run moves."""

    def state_changed(self) -> None:
        """Wake the calls and tasks that wait for the run's state, after a change of it."""
        raise NotImplementedError

    def registry_changed(self) -> None:
        """Update the run's state from the registry: at once, or with many actors together with the next changes."""
        raise NotImplementedError
