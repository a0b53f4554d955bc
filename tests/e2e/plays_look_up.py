"""An agent that looks values up in its task's table, in the framework that the task's row names.

It runs as an episode's command, and needs the framework and not asyncrl. Its reward is drawn at random, so that
weights change at each step, and it exits with 0 for any answer of the policy.
"""

import asyncio
import json
import os
import random

import openai

TASK = json.loads(os.environ["ASYNCRL_TASK"])
ROW = TASK["row"]
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "The entry of a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
MOST_TURNS = 3


def entry(key):
    return ROW["table"].get(key, "none")


def result(call):
    try:
        key = json.loads(call.function.arguments)["key"]
    except (ValueError, KeyError, TypeError):
        key = ""
    return {"role": "tool", "tool_call_id": call.id, "content": entry(str(key))}


def asked():
    return [{"role": "user", "content": ROW["prompt"]}]


def after(message):
    """The messages that follow an answer: the results of its calls, or else the question again.

    So each play has as many turns as it may, whether the policy calls tools or not.
    """
    return [message.model_dump(exclude_none=True), *([result(call) for call in message.tool_calls or []] or asked())]


def bare_sync():
    messages = asked()
    with openai.OpenAI() as client:
        for _ in range(MOST_TURNS):
            message = client.chat.completions.create(model="m", messages=messages, tools=[LOOK_UP]).choices[0].message
            messages += after(message)


async def bare_async():
    messages = asked()
    async with openai.AsyncOpenAI() as client:
        for _ in range(MOST_TURNS):
            done = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK_UP])
            message = done.choices[0].message
            messages += after(message)


def bare_stream():
    messages = asked()
    with openai.OpenAI() as client:
        for _ in range(MOST_TURNS):
            with client.chat.completions.stream(model="m", messages=messages, tools=[LOOK_UP]) as stream:
                message = stream.get_final_completion().choices[0].message
            messages += after(message)


async def openai_agents(streamed=False, responses=False):
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
    from agents.exceptions import AgentsException

    set_tracing_disabled(True)
    set_default_openai_api("responses" if responses else "chat_completions")

    @function_tool
    def look_up(key: str) -> str:
        """The entry of a key."""
        return entry(key)

    agent = Agent(name="reader", tools=[look_up], model="m")
    try:
        if streamed:
            run = Runner.run_streamed(agent, ROW["prompt"], max_turns=MOST_TURNS)
            async for _ in run.stream_events():
                pass
        else:
            await Runner.run(agent, ROW["prompt"], max_turns=MOST_TURNS)
    except AgentsException as error:
        print("ended by", type(error).__name__)


def langgraph():
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.prebuilt import create_react_agent

    @tool
    def look_up(key: str) -> str:
        """The entry of a key."""
        return entry(key)

    agent = create_react_agent(ChatOpenAI(model="m"), [look_up])
    try:
        agent.invoke({"messages": [("user", ROW["prompt"])]}, {"recursion_limit": 2 * MOST_TURNS})
    except GraphRecursionError:
        print("ended by its limit")


def smolagents(code=False):
    from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
    from smolagents.utils import AgentError

    @tool
    def look_up(key: str) -> str:
        """The entry of a key.

        Args:
            key: the key
        """
        return entry(key)

    model = OpenAIModel("m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = (CodeAgent if code else ToolCallingAgent)(tools=[look_up], model=model, max_steps=2, verbosity_level=0)
    try:
        agent.run(ROW["prompt"])
    except AgentError as error:
        print("ended by", type(error).__name__)


PROGRAMS = {
    "openai": bare_sync,
    "openai-async": lambda: asyncio.run(bare_async()),
    "openai-stream": bare_stream,
    "openai-agents": lambda: asyncio.run(openai_agents()),
    "openai-agents-streamed": lambda: asyncio.run(openai_agents(streamed=True)),
    "openai-agents-responses": lambda: asyncio.run(openai_agents(streamed=True, responses=True)),
    "langgraph": langgraph,
    "smolagents-tools": smolagents,
    "smolagents-code": lambda: smolagents(code=True),
}

if __name__ == "__main__":
    PROGRAMS[ROW["client"]]()
    print(json.dumps(random.Random(f"{TASK['episode_id']}").random()))
