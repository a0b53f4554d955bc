"""SmolLM2-135M-Instruct with its own chat template, through the endpoint on the real vLLM: the verdicts of the check of
its template, conversations with a tool, and exact log-probs while weights change.

Skipped where ASYNCRL_CHAT_MODEL does not name its folder; ``make chat-model`` fetches it (tools/smollm2.py)
and runs this.
"""

import os
from pathlib import Path

import pytest
import torch
from whole import played_by, worst_error

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # vLLM leaves its ZeroMQ contexts to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.skipif(
        "ASYNCRL_CHAT_MODEL" not in os.environ,
        reason="ASYNCRL_CHAT_MODEL does not name the folder of SmolLM2-135M-Instruct (make chat-model)",
    ),
]

TOLERANCE = 1e-4
EPISODES = 6
CHANGE = 0.002
"""The difference of the second model's weights, relative to the first's."""
AGENT = '''
import openai

TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
CALL = '<tool_call>\\n{"name": "weather", "arguments": {"city": "%s"}}\\n</tool_call>'
SHOWN = [
    {"role": "system", "content": "Answer with the tool weather. To call it, write exactly\\n" + CALL % "CITY"},
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": CALL % "Paris"},
    {"role": "user", "content": "What is the weather in Rome?"},
    {"role": "assistant", "content": CALL % "Rome"},
]


async def play(task, client):
    """The number of turns in which the tool was called, or nothing was."""
    messages = [*SHOWN, {"role": "user", "content": "What is the weather in Bern?"}]
    called = 0
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as policy:
        for turn in range(2):
            answer = await policy.chat.completions.create(model=client.model, messages=messages, tools=[TOOL])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if said.tool_calls:
                called += 1
                messages += [{"role": "tool", "tool_call_id": c.id, "content": "Sunny, 21 degrees."}
                             for c in said.tool_calls]
            else:
                messages.append({"role": "user", "content": "And in Rome?"})
        last = await policy.chat.completions.create(model=client.model, messages=messages, tools=[TOOL])
    return {"reward": float(called), "first": float(bool(messages[6].get("tool_calls")))}
'''


def changed(folder):
    """The model, and one whose weights are a little different."""
    from transformers import AutoModelForCausalLM

    made = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for _ in range(2)]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made[1].parameters():
            parameter.mul_(1 + CHANGE * torch.randn_like(parameter))
    return made


def test_a_real_chat_model_plays_with_a_tool_and_each_token_has_the_log_prob_of_its_weights(tmp_path):
    folder = Path(os.environ["ASYNCRL_CHAT_MODEL"]).absolute()
    Path("agent.py").write_text(AGENT)
    made = changed(folder)
    sections = {"data": {"max_prompt_tokens": 700}, "chat": {"tool_parser": "json"}}
    world, trajectories, version = played_by(
        "vllm", tmp_path, folder, made, ["weather"] * EPISODES, tokens=70, max_tokens=48, **sections
    )
    report = world.renderer.report
    verdicts = {case.case: case.verdict for case in report.cases}
    assert (report.end, report.seam) == ("<|im_end|>", "\n")
    assert verdicts["user"] == "extend"
    called = [trajectory.components["first"] for trajectory in trajectories]
    worst, tokens = worst_error(trajectories, lambda of: made[of % 2])
    sequences = [len(trajectory.sequences) for trajectory in trajectories]
    print(
        f"{tokens} tokens of {EPISODES} episodes in {sequences} sequences, {version} updates, the tool called first in "
        f"{sum(called):g}: off by {worst:.1e} nats at most; {verdicts}"
    )
    assert worst < TOLERANCE
    assert sum(called) >= 1, "a call of the tool was sampled, read, and answered"
    assert version >= 2 and any(trajectory.resumes for trajectory in trajectories)
