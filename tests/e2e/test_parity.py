"""I8, parity: on the reference engine with staleness.max = 0 a run has the same tokens, losses and weights, bit by bit,
as the plain synchronous loop over the same parts (tools/synchronous.py), in any order of its groups. On vLLM, where
rounding depends on the batch, the tokens of the first steps are equal.
"""

import hashlib
import json

import pytest
from model_matrix import make_family
from parity import EXACT, configuration, counter, figures, run_live, run_plainly, trained, weights, write_assets
from quick import needs_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = {
    "steps": {"learner": {"steps": 12, "loss": "bypass"}},
    # Several updates a batch, several steps from one version's groups, weights by broadcast, requests frozen instead of
    # ended.
    "updates": {
        "learner": {"steps": 6, "steps_per_version": 2, "updates_per_batch": 3},
        "weights": {"transport": "gloo"},
        "rollout": {"on_update": "keep"},
    },
    # The engine sleeps while the learner computes.
    "slices": {"learner": {"steps": 6, "steps_per_version": 2}, "placement": {"share": "time_slice"}},
}


def both(folder, tree, name):
    """The folders of a plain loop and of a run whose rewards arrive out of order, and the order of their arrival."""
    plain = run_plainly(folder, tree, f"plain-{name}")
    arrivals = folder / f"arrivals-{name}.txt"
    delayed = {**tree["reward"], "options": {"delay_s": 0.1, "arrivals": str(arrivals)}}
    live = run_live(folder, {**tree, "reward": delayed}, f"live-{name}")
    return plain, live, list(dict.fromkeys(arrivals.read_text().splitlines()))


@pytest.mark.parametrize("case", CASES)
def test_i8_a_run_equals_the_plain_loop_bit_for_bit(parity_folder, case):
    tree = configuration(parity_folder, **CASES[case])
    plain, live, arrivals = both(parity_folder, tree, case)
    expected, found = trained(plain), trained(live)
    assert list(expected) == list(range(1, tree["learner"]["steps"] + 1))
    for step, of_step in expected.items():
        assert [group["uid"] for group in of_step] == [group["uid"] for group in found[step]], f"step {step}"
        assert of_step == found[step], f"step {step}"
    assert found == expected
    assert figures(live, *EXACT) == figures(plain, *EXACT)
    assert weights(live) == weights(plain)
    if case == "slices":
        # The engine slept, and the learner waited to get the GPU back for the first step on each version.
        assert counter(live, "rollouter/0", "rollout/engine_sleeps") > 1
        assert [wait > 0.0 for (wait,) in figures(live, "time/take_gpu_s").values()] == [True, False] * 3

    # The hard cases occurred: groups out of order, left out and replaced, both kinds of ends, and learning.
    prompts = [group["prompt"] for of_step in expected.values() for group in of_step]
    assert arrivals != list(dict.fromkeys(prompts))
    assert figures(live, "ledger/filtered")[len(expected)] > [0]
    responses = [response for of_step in expected.values() for group in of_step for response in group["trajectories"]]
    assert {response["finish_reason"] for response in responses} == {"stop", "length"}
    assert weights(live) != hashlib.sha256((parity_folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@needs_vllm
def test_i8_on_vllm_the_first_steps_have_equal_tokens_and_losses_within_rounding(parity_folder):
    vllm = {"engine": "vllm", "vllm": {"cpu_kv_cache_bytes": 64 << 20, "threads": 1}}
    tree = configuration(parity_folder, learner={"steps": 5}, rollout=vllm)
    plain, live, arrivals = both(parity_folder, tree, "vllm")
    expected, found = trained(plain), trained(live)
    assert list(expected) == [1, 2, 3, 4, 5]
    assert found == expected
    for step, (loss,) in figures(plain, "loss/policy").items():
        assert figures(live, "loss/policy")[step][0] == pytest.approx(loss, abs=1e-5), f"step {step}"
    prompts = [group["prompt"] for of_step in expected.values() for group in of_step]
    assert arrivals != list(dict.fromkeys(prompts))


def test_i8_a_run_of_a_hybrid_equals_the_plain_loop_and_the_engine_agrees(tmp_path):
    write_assets(tmp_path)
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    sizes = {name: settings[name] for name in ("vocab_size", "eos_token_id")}
    make_family("Qwen3_5", tied=False, **sizes).save_pretrained(tmp_path / "model")
    tree = configuration(tmp_path, learner={"steps": 5})
    plain, live = (run(tmp_path, tree, name) for run, name in ((run_plainly, "plain"), (run_live, "live")))
    assert trained(live) == trained(plain)
    assert figures(live, *EXACT) == figures(plain, *EXACT)
    assert weights(live) == weights(plain)
    found = figures(live, "policy/engine_kl")
    assert len(found) == 5
    assert all(kl < 1e-8 for (kl,) in found.values())
