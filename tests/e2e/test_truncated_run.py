"""Runs that sample from truncated distributions, on the reference engine."""

from contextlib import closing

import pytest
from parity import EXACT, configuration, figures, run_live, run_plainly, trained, weights

from tools.live_run import LiveRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRUNCATED = {"rollout": {"top_p": 0.9, "top_k": 20, "min_p": 0.01}}
DROPS = """
from asyncrl.messages import token_sets

token_sets.make_sets = lambda sets: None
"""
"""Python runs it at the start of each process."""
RUN_S = 240.0


def test_i8_a_truncated_run_equals_the_plain_loop_and_the_engine_agrees(parity_folder):
    learner = {"steps": 6, "kl": {"coefficient": 0.01}}
    tree = configuration(parity_folder, learner=learner, **TRUNCATED)
    plain, live = (run(parity_folder, tree, name) for run, name in ((run_plainly, "cut-p"), (run_live, "cut-l")))
    assert trained(live) == trained(plain)
    assert figures(live, *EXACT) == figures(plain, *EXACT)
    assert weights(live) == weights(plain)
    found = figures(live, "policy/engine_kl", "policy/engine_kl_tokens")
    assert len(found) == 6
    assert all(kl < 1e-8 and tokens > 0 for kl, tokens in found.values())


def test_a_run_whose_engine_drops_the_sets_ends_before_the_first_step(parity_folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(DROPS)
    tree = configuration(parity_folder, learner={"steps": 6}, **TRUNCATED)
    with closing(LiveRun(tree, tmp_path, env={"PYTHONPATH": f"{tmp_path}:{parity_folder}"})) as run:
        assert run.wait(RUN_S) == 1, run.output
        for words in ("rollouter/0", "whose token sets it does not return", "drift.stop = "):
            assert words in run.output, run.output
        assert run.step == 0
