"""The follower of a run's agents: what it tells the head where another host's agent fails."""

from types import SimpleNamespace

import pytest

from asyncrl.launcher.follow import Follower
from asyncrl.launcher.terms.spec import STOP, EndedEvent


@pytest.mark.parametrize(
    ("phase", "interrupted", "told"),
    [
        ("starting", False, [STOP]),
        ("running", False, [STOP]),
        # The head has heard the user's wish, though it has not said so yet.
        ("running", True, []),
        ("preempting", False, []),
        ("draining", False, []),
    ],
)
def test_agents_that_fail_end_the_run_in_good_order_and_never_hurry_it(phase, interrupted, told):
    """To the head's agent a second word is the user's wish for the end at once, without the checkpoint."""
    sent, others = [], [SimpleNamespace(), SimpleNamespace()]
    follower = Follower(None, None, [SimpleNamespace(send=sent.append), *others], None, phase=phase)
    follower.interrupts.signal = 15 if interrupted else 0
    for number, other in enumerate(others, 1):
        follower._take(other, EndedEvent(result="failed", actor=f"agent/{number}", reason="died", exit_code=0))
    assert sent == told
    assert (follower._failure.actor, follower._failure.exit_code) == ("agent/1", 1)
