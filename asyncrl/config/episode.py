"""Users' episodes: the code that plays a task against the policy, its limits, and how chats become tokens."""

from __future__ import annotations

from datetime import date as Date
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from asyncrl.config.section import NonNegative, Positive, Seconds, Section

EpisodeKind = Literal["single", "function", "env", "tools", "command"]
OWN_TOOL_PARSERS = ("auto", "json", "none")
OWN_REASONING_PARSERS = ("auto", "think", "none")
"""Other names are of vLLM's parsers."""


class EpisodeConfig(Section):
    """The code that plays a task against the policy. Without any a prompt has one response."""

    function: str | None = None
    """MODULE:FUNCTION, called with the task and the client of the policy; it returns the reward."""
    env: str | None = None
    """MODULE:CLASS with reset(task) and step(message)."""
    tools: list[str] = []
    """MODULE:FUNCTION of each tool, or MODULE:CLASS whose public methods are tools with a state of their own."""
    command: list[str] = []
    """A program and its arguments, told by OPENAI_BASE_URL and OPENAI_API_KEY where the policy is."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, or of the constructor of the env or of the tools' classes."""
    workers: Positive = 2
    """Processes of each episode host that run episodes; each runs many at a time."""
    extra_hosts: NonNegative | None = None
    """Hosts with CPUs alone that play episodes for all rollouters, each in one more actor; by default every host of the
    run that has neither GPUs nor a rollouter nor a rank of the learner."""
    max_turns: Positive = 32
    """Answers of the policy in an episode, after which it is over and scored as truncated."""
    max_context_tokens: Positive | None = None
    """Longest context plus answer in an episode, in tokens; by default data.max_prompt_tokens + rollout.max_tokens."""
    start_timeout_s: Seconds = 60.0
    """Longest time until an episode first calls the policy."""
    turn_timeout_s: Seconds = 120.0
    """Longest time between an answer of the policy and the next call or the end."""
    timeout_s: Seconds = 600.0
    """Longest time of an episode, without that in which it waited for the policy; then it is over and scored as
    truncated."""
    close_timeout_s: Seconds = 10.0
    """Time to end by itself for an episode that is over."""
    stall_timeout_s: Seconds = 10.0
    """Longest time in which the event loop of a worker may stand still; the worker is killed then."""
    max_memory_bytes: Positive = 4 << 30
    """Memory that a worker or a program may take, with all that it starts."""
    max_output_bytes: Positive = 1 << 20
    """Bytes of an episode's output that reach the log."""
    max_request_bytes: Positive = 64 << 20
    """Longest body of a request to the endpoint."""

    @property
    def kind(self) -> EpisodeKind:
        """Kind of the player that is set; single without any."""
        given = [name for name in ("function", "env", "tools", "command") if getattr(self, name)]
        return given[0] if given else "single"  # type: ignore[return-value]

    @model_validator(mode="after")
    def _one_player(self) -> EpisodeConfig:
        given = [name for name in ("function", "env", "tools", "command") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both set; an episode is played by one of them")
        return self


class ChatConfig(Section):
    """Conversion of the messages of a conversation into tokens, and of tokens into messages."""

    template_options: dict[str, Any] = {}
    """Further arguments of the model's chat template, as enable_thinking = false."""
    history: Literal["sampled", "template"] = "sampled"
    """Form of an earlier answer of the policy in the context of a later one: exactly what was sampled, reasoning
    included; or what the chat template makes of it, so that where a template leaves reasoning out, the answer is
    trained in its own context and another sequence begins. It must be as the model is served later."""
    tool_parser: str = "auto"
    """Parser that reads calls of tools from sampled text: auto, json (<tool_call>{...}</tool_call>), none, or the name
    of one of vLLM's parsers."""
    reasoning_parser: str = "auto"
    """Parser that tells reasoning from the answer: auto, think (<think>...</think>), none, or the name of one of vLLM's
    parsers."""
    renderer: str = Field(default="template", pattern=r"^(template|renderers:.+)$")
    """template: the model's own chat template; or renderers:NAME of the package of that name."""
    date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """The date that chat templates are told, YYYY-MM-DD; by default that of the run's first start. A resumed run keeps
    it."""
    check_timeout_s: Seconds = 60.0
    """Longest time of the check of the chat template at start."""
    render_threads: Positive = 2
    """Threads of a rollouter that turn messages into tokens."""

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        if value is not None:
            Date.fromisoformat(value)
        return value
