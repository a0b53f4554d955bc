"""The restart policy."""

import asyncio

import pytest
from harness import until
from hypothesis import given
from hypothesis import strategies as st
from inprocess import System
from run_settings import sim_config

from asyncrl.core.errors import ActorFailed, AsyncRLError, ConfigError, DeadlineExceeded, RunChanged
from asyncrl.messages.actors import WatchRun
from asyncrl.rpc.actor import CONTROLLER
from asyncrl.rpc.calls.retry import LONGEST_S
from asyncrl.rpc.lifecycle.supervision import GiveUp, Restart, Supervisor


class Misfit(AsyncRLError):
    """An error that allows a restart, with an exit code after which no agent restarts."""

    exit_code = 78


@pytest.mark.parametrize(("exit_code", "restarted"), [(-9, True), (1, True), (0, True), (78, False), (2, False)])
def test_the_end_of_an_actor_decides_on_its_restart(exit_code, restarted):
    decision = Supervisor(3, 100.0, 0.5).ended("rollouter/3", exit_code, now=0.0)
    assert isinstance(decision, Restart if restarted else GiveUp)


def test_pauses_double_and_the_limit_holds_within_the_window():
    policy = Supervisor(max_restarts=3, window_s=100.0, backoff_s=0.5)
    restarts = [policy.ended("rollouter/0", 1, t) for t in (0.0, 1.0, 2.0)]
    assert restarts == [Restart(0.5), Restart(1.0), Restart(2.0)]
    assert policy.ended("rollouter/0", -9, 3.0) == GiveUp("killed by SIGKILL, after 3 restarts within 100 s")
    # Another actor is counted separately, and restarts before the window do not count.
    assert policy.ended("rollouter/1", 1, 3.0) == Restart(0.5)
    assert policy.ended("rollouter/0", 1, 100.0) == Restart(2.0)
    assert isinstance(policy.ended("rollouter/0", 1, 100.5), GiveUp)


@given(
    deaths=st.lists(st.floats(0, 50), min_size=1, max_size=60),
    max_restarts=st.integers(0, 5),
    window=st.floats(1, 100),
    backoff=st.floats(0.01, 10),
)
def test_no_window_has_more_restarts_than_allowed(deaths, max_restarts, window, backoff):
    policy = Supervisor(max_restarts, window, backoff)
    now, restarts = 0.0, []
    for gap in deaths:
        now += gap
        decision = policy.ended("rollouter/0", 1, now)
        if isinstance(decision, Restart):
            restarts.append(now)
            assert backoff <= decision.after_s <= max(backoff, LONGEST_S)
    for start in restarts:
        assert sum(start <= t < start + window for t in restarts) <= max_restarts


@pytest.mark.parametrize(
    ("error", "restarted"),
    [
        (RuntimeError("a lost peer"), True),
        (DeadlineExceeded("learner/0", "dataloader/0", "Restored", 30.0), True),
        (ConfigError(["no model"]), False),
        (ActorFailed("learner/0", "no signal"), False),
        (RunChanged("seed", "run.seed", was="1", now="2"), False),
        (Misfit("an exit code that is not restarted"), False),
    ],
)
async def test_an_error_knows_whether_a_restart_may_help(tmp_path, monkeypatch, error, restarted):
    """The controller ends the run only for an error that no restart mends."""
    system = System(sim_config(), tmp_path)
    controller = system.make(CONTROLLER)
    life = asyncio.create_task(controller.main())

    async def fail(_self):
        raise error

    try:
        await until(lambda: controller.ready)
        doomed = system.make("dataloader/0")
        monkeypatch.setattr(type(doomed), "setup", fail)
        with pytest.raises(type(error)):
            await doomed.main()
        state = await controller.watch_run(WatchRun(), system.caller("agent/0"))
        assert state.failed_actor == ("" if restarted else "dataloader/0")
    finally:
        life.cancel()
        await asyncio.wait({life})
    assert getattr(error, "restartable", True) == restarted or isinstance(error, Misfit)
