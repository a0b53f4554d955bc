"""Episodes of many turns on a real engine while its weights change again and again, asked through the client, at the
same time too, and over HTTP: each trained token has the log-prob that the Hugging Face model of its version gives it
over the whole context in which it was sampled (I3, I4).
"""

from pathlib import Path

import pytest
import torch
from whole import played_by, worst_error

from tools.learn.chat_model import make_model, make_tokenizer, save
from tools.learn.recipe import Settings

pytestmark = [
    # vLLM leaves its ZeroMQ contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]

TOLERANCE = 1e-4
AGENT = """
import asyncio

import openai


def user(text):
    return {"role": "user", "content": text}


async def through_client(client, messages):
    for turn in range(3):
        several = await asyncio.gather(*(client.chat(messages) for _ in range(1 + turn % 2)))
        messages = [*messages, several[-1].message, user(f"turn {turn}")]
    # Not what was said: a fork.
    return await client.chat([*messages[:-2], {"role": "assistant", "content": "no"}, user("and now")])


async def over_http(client, messages):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        for turn in range(4):
            asked = {"model": client.model, "messages": messages}
            if turn % 2:
                parts = [part async for part in await policy.chat.completions.create(stream=True, **asked)]
                text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            else:
                text = (await policy.chat.completions.create(**asked)).choices[0].message.content
            messages = [*messages, {"role": "assistant", "content": text}, user(f"turn {turn}")]


async def play(task, client):
    await (over_http if task.prompt.startswith("http") else through_client)(client, [user(task.prompt)])
    return 1.0
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder, and two models whose distributions are far from uniform and from one another."""
    folder, tokenizer = tmp_path_factory.mktemp("chat") / "model", make_tokenizer()
    made = [make_model(Settings(layers=2, width=64, heads=2, intermediate=128), len(tokenizer)) for _ in range(2)]
    for seed, model in enumerate(made):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(*((0.0, 0.15) if parameter.ndim > 1 else (0.5, 0.2)))
    save(made[0], tokenizer, folder)
    return folder, [model.float().eval() for model in made]


@pytest.mark.parametrize(
    ("engine", "episodes", "max_tokens"),
    [("reference", 4, 24), pytest.param("vllm", 12, 40, marks=pytest.mark.slow)],
)
def test_i4_each_trained_token_of_an_episode_has_the_log_prob_of_its_version(
    tmp_path, models, engine, episodes, max_tokens
):
    folder, made = models
    Path("agent.py").write_text(AGENT)
    names = [f"{'http' if sample % 2 else 'client'} {sample}" for sample in range(episodes)]
    limits = {"tokens": 12 * episodes, "max_tokens": max_tokens, "data": {"max_prompt_tokens": 400}}
    _, trajectories, version = played_by(engine, tmp_path, folder, made, names, **limits)
    worst, tokens = worst_error(trajectories, lambda of: made[of % 2])
    assert worst < TOLERANCE
    assert tokens > episodes * max_tokens
    print(f"{tokens} tokens of {episodes} episodes, {version} updates: off by {worst:.1e} nats at most")
    # Updates met turns, and forks and calls at the same time were there.
    assert version >= 4
    assert {len(t.sequences) for t in trajectories[1::2]} == {1}
    assert {len(t.sequences) for t in trajectories[::2]} == {3}
    spans = [{s.version for s in each.spans if s.role == "sampled"} for t in trajectories for each in t.sequences]
    assert sum(len(versions) > 1 for versions in spans) >= episodes / 2
    assert any(t.resumes for t in trajectories), "an answer was interrupted"
