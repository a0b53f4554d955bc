"""Benches that reach into what they measure run to their end and print their ratios."""

import subprocess
import sys

import pytest
from quick import needs_vllm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "figures"),
    [
        pytest.param(["rollout", "--pairs", "1"], ["rollout"], marks=needs_vllm),
        (["weights", "--up-to", "1M"], ["shm_vs_memcpy_1M", "stream_vs_tcp_1M", "gloo_vs_bare_gloo_1M"]),
    ],
)
def test_a_bench_prints_its_ratios(bench, figures):
    ended = subprocess.run(
        [sys.executable, "-m", "tools.bench", *bench], capture_output=True, text=True, check=False, timeout=280
    )
    printed = ended.stdout + ended.stderr
    assert ended.returncode == 0, printed[-3000:]
    ratios = {line.split()[0] for line in printed.splitlines() if " ratio " in line}
    assert set(figures) <= ratios, printed
