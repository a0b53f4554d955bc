"""Programs that ask the policy for the weather of Bern with a tool, each in a framework of its own.

Run as ``python plays_weather.py NAME``; the address and the key of the policy are in OPENAI_BASE_URL and
OPENAI_API_KEY. Prints the final answer. It needs the frameworks and not asyncrl.
"""

import asyncio
import os
import sys

QUESTION = "What is the weather in Bern?"


def openai_agents(streamed=False, responses=False):
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    set_tracing_disabled(True)
    set_default_openai_api("responses" if responses else "chat_completions")

    @function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"Sunny in {city}"

    agent = Agent(name="guide", instructions="Use the tool.", tools=[weather], model="gpt-4.1")
    if not streamed:
        return Runner.run_sync(agent, QUESTION).final_output

    async def run():
        result = Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def langgraph(streamed=False):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    @tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return f"Sunny in {city}"

    agent = create_react_agent(ChatOpenAI(model="gpt-4.1"), [weather], prompt="Use the tool.")
    asked = {"messages": [("user", QUESTION)]}
    if not streamed:
        return agent.invoke(asked)["messages"][-1].content
    parts = agent.stream(asked, stream_mode="messages")
    return "".join(chunk.content for chunk, where in parts if chunk.type == "AIMessageChunk" and chunk.content)


def smolagents(code=False):
    from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

    @tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        return f"Sunny in {city}"

    model = OpenAIModel(
        model_id="gpt-4.1", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    kind = CodeAgent if code else ToolCallingAgent
    return kind(tools=[weather], model=model, max_steps=3, verbosity_level=0).run(QUESTION)


PROGRAMS = {
    "openai-agents": openai_agents,
    "openai-agents-streamed": lambda: openai_agents(streamed=True),
    "openai-agents-responses": lambda: openai_agents(responses=True),
    "openai-agents-responses-streamed": lambda: openai_agents(streamed=True, responses=True),
    "langgraph": langgraph,
    "langgraph-streamed": lambda: langgraph(streamed=True),
    "smolagents-tools": smolagents,
    "smolagents-code": lambda: smolagents(code=True),
}

if __name__ == "__main__":
    print("answer:", PROGRAMS[sys.argv[1]]())
