"""A reward function counts as broken by its rate of failures, in virtual time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.reward.faults import MIN_PROMPTS, OUTAGE_S, FailureRate


class Calls:
    """Calls one after the other, on a clock of its own; ``broken`` is the first verdict."""

    def __init__(self, workers=2, worked=0):
        self.rate, self.now, self.broken, self.made = FailureRate(workers=workers), 0.0, "", 0
        for number in range(worked):
            self.call(f"good {number}", works=True, after_s=0.1)

    def call(self, uid, works, after_s=0.0):
        self.rate.came(str(uid))
        self.end(uid, works, after_s)

    def end(self, uid, works, after_s=0.0):
        self.now += after_s
        if works:
            self.rate.succeeded(str(uid), self.now)
        elif not self.broken:
            self.made += 1
            self.broken = self.rate.failed(str(uid), self.now)


@pytest.mark.parametrize(("workers", "handful"), [(1, 16), (6, 30), (64, 50)])
def test_a_function_that_never_gave_a_reward_is_broken_after_few_calls(workers, handful):
    calls = Calls(workers)
    for number in range(100):
        calls.call(number % 5, works=False)
    assert (calls.made, calls.now) == (handful, 0.0)
    assert calls.broken == f"has failed in all of its {handful} calls, for 5 prompts"


@given(prompts=st.integers(1, MIN_PROMPTS - 1), worked=st.sampled_from([0, 50]), samples=st.integers(1, 64))
def test_one_or_two_failing_prompts_never_end_the_run(prompts, worked, samples):
    calls = Calls(worked=worked)
    for number in range(3 * samples * prompts):
        calls.call(number % prompts, works=False, after_s=10.0)
    assert not calls.broken


def test_a_working_function_may_fail_briefly_and_is_broken_after_the_outage_limit():
    calls = Calls(worked=200)
    since = calls.now
    while calls.now < since + OUTAGE_S - 1.0:
        calls.call(f"then {calls.made}", works=False, after_s=0.01)
    assert not calls.broken and calls.made > 1000
    calls.call("again", works=True)
    calls.call("and again", works=False, after_s=OUTAGE_S)
    assert not calls.broken
    # Before a restart, say.
    calls = Calls()
    for number in range(40):
        calls.rate.has_worked(calls.now)
        calls.call(number, works=False, after_s=1.0)
    assert calls.made == OUTAGE_S
    assert calls.broken == f"has failed in all of its last {calls.made} calls, for {calls.made} prompts, for 30 s"


@pytest.mark.parametrize("share", [0.01, 0.3])
@pytest.mark.parametrize("what", ["calls", "prompts"])
def test_a_share_of_failures_never_ends_a_run(share, what):
    """Each prompt with 8 samples, those that fail tried three times, long after all others are scored."""
    random_ = random.Random(f"{share} {what}")
    calls, tail = Calls(), []
    for step in range(400):
        uids = [f"{step}-{number}" for number in range(32)]
        bad = {uid for uid in uids if random_.random() < share}
        for uid in uids:
            calls.rate.came(uid)
            for _ in range(8):
                fails = uid in bad if what == "prompts" else random_.random() < share
                if fails:
                    tail.append(uid)
                else:
                    calls.end(uid, works=True)
        # Nothing new comes before the last of the step is given up.
        for uid in 3 * tail:
            calls.end(uid, works=False, after_s=5.0)
        tail.clear()
    assert not calls.broken
    assert calls.made > 1000


def test_a_higher_failure_rate_requires_more_failing_prompts():
    needed = []
    for bad_of_10 in (0, 1, 3):
        calls = Calls()
        for number in range(1000):
            calls.call(number, works=number % 10 >= bad_of_10)
        needed.append(calls.rate.prompts_needed)
    assert needed == sorted(needed)
    assert needed[0] == MIN_PROMPTS and needed[-1] > 10
