"""The tools that torment a run, in small: as many processes and signals as a test run has time for."""

import random

import pytest

from tools import chaos, soak


@pytest.mark.slow
def test_a_run_goes_on_whoever_is_killed_or_frozen_in_the_middle_of_updates(capfd):
    """I5 and I7: SIGKILL and SIGSTOP at random moments, on real processes."""
    seed = random.randrange(1 << 32)
    transport = random.Random(seed).choice(chaos.TRANSPORTS)
    code = chaos.main(["--rounds", "4", "--transport", transport, "--seed", str(seed)])
    assert code == 0, capfd.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), [("gloo", "keep"), ("stream", "abort_resume")])
def test_the_real_vllm_takes_a_version_a_step(capfd, transport, mode):
    """I3 and I4: two rollouters, every update verified in full."""
    code = soak.main(["--steps", "6", "--transport", transport, "--mode", mode])
    assert code == 0, capfd.readouterr()
