"""Updates of the real vLLM while it generates, at a small size."""

import pytest
from quick import needs_vllm

from tools import soak


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(("transport", "mode"), [("gloo", "keep"), ("stream", "abort_resume")])
def test_i3_i4_the_real_vllm_takes_a_version_per_step(capfd, transport, mode):
    """Two rollouters, every update verified in full."""
    code = soak.main(["--steps", "6", "--transport", transport, "--mode", mode])
    assert code == 0, capfd.readouterr().out
