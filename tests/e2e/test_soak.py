"""Updates of the real vLLM while it generates, in small."""

import pytest

from tools import soak


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), [("gloo", "keep"), ("stream", "abort_resume")])
def test_the_real_vllm_takes_a_version_a_step(capfd, transport, mode):
    """I3 and I4: two rollouters, every update verified in full."""
    code = soak.main(["--steps", "6", "--transport", transport, "--mode", mode])
    assert code == 0, capfd.readouterr().out
