"""I8, parity of episodes: on the reference engine with staleness.max = 0 a run equals the plain loop
(tools/synchronous.py) bit for bit. The user's function asks the policy repeatedly, also several times at once.

The function runs in the workers of episode hosts and waits at random between its calls. It asks equal and different
things at once, so that calls are rendered, sampled and answered in any order.
"""

import json
import random

import parity
import pytest
from parity import EXACT, figures, run_live, run_plainly, trained, weights

from tools.learn.chat_model import make_model, make_tokenizer, save
from tools.learn.recipe import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 4
EPISODE = '''
import asyncio
import random


async def branch(client, messages, name, pause):
    """Two more turns of its own."""
    for turn in range(2):
        await pause()
        reply = await client.chat([*messages, {"role": "user", "content": f"{name}{turn}"}])
        messages = [*messages, {"role": "user", "content": f"{name}{turn}"}, reply.message]
    return reply.content


async def play(task, client, delay_s):
    """The share of digits, in sixths, so that some groups have no signal."""
    async def pause():
        await asyncio.sleep(delay_s * random.SystemRandom().random())

    messages = [{"role": "user", "content": task.prompt}]
    said = await asyncio.gather(*(client.chat(messages) for _ in range(2)))
    messages += [said[task.seed % 2].message, {"role": "user", "content": "on"}]
    await pause()
    found = await asyncio.gather(branch(client, messages, "a", pause), branch(client, messages, "b", pause))
    last = await client.chat([*messages, {"role": "user", "content": "end"}])
    text = "".join([*(each.content for each in said), *found, last.content])
    return {"reward": round(6 * sum(c.isdigit() for c in text) / max(1, len(text))) / 6, "length": float(len(text))}
'''


def configuration(folder, delay_s):
    return parity.configuration(
        folder,
        data={"template": "plain"},
        episode={
            "function": "episodes:play",
            "options": {"delay_s": delay_s},
            "max_context_tokens": 200,
            "workers": 2,
        },
        chat={"date": "2026-11-23"},
        reward={"function": "episode", "options": {}},
        learner={"steps": STEPS},
    )


def sampled(run_dir):
    """The groups of each step, without the metrics of episodes, which the plain loop does not keep."""
    steps = trained(run_dir)
    for trajectory in (t for groups in steps.values() for group in groups for t in group["trajectories"]):
        for figure in ("turns", "forks", "stage_s"):
            trajectory.pop(figure, None)
    return steps


def test_i8_a_run_of_episodes_equals_the_plain_loop_bit_for_bit(tmp_path):
    tokenizer = make_tokenizer()
    save(make_model(Settings(layers=2), len(tokenizer)), tokenizer, tmp_path / "model")
    (tmp_path / "episodes.py").write_text(EPISODE)
    numbers = random.Random(0)
    prompts = [{"prompt": f"{numbers.randint(10, 9999)}+{numbers.randint(10, 9999)}="} for _ in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))

    plain = run_plainly(tmp_path, configuration(tmp_path, 0.0), "plain")
    live = run_live(tmp_path, configuration(tmp_path, 0.05), "live")
    expected, found = sampled(plain), sampled(live)
    assert list(expected) == list(range(1, STEPS + 1))
    for step, groups in expected.items():
        assert groups == found[step], f"step {step}"
    assert found == expected
    assert figures(live, *EXACT) == figures(plain, *EXACT)
    assert weights(live) == weights(plain)

    # The hard cases occurred: several sequences in a trajectory, some with tokens trained in another, and learning.
    trajectories = [t for groups in expected.values() for group in groups for t in group["trajectories"]]
    assert all(len(trajectory["sequences"]) == 4 for trajectory in trajectories)
    roles = {span[3] for t in trajectories for sequence in t["sequences"] for span in sequence["spans"]}
    assert roles == {"sampled", "context", "repeated"}
    assert any(value for (value, *_) in figures(live, "policy/grad_norm").values())
