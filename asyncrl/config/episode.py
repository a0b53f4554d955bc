"""Users' episodes: the code that plays a task against the policy, its limits, and how chats become tokens."""

from __future__ import annotations

from datetime import date as Date
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from asyncrl.config.section import NonNegative, Positive, Seconds, Section

EpisodeKind = Literal["single", "function", "env", "tools", "command"]
OWN_TOOL_PARSERS = ("auto", "json", "none")
OWN_REASONING_PARSERS = ("auto", "think", "none")
"""Names of asyncrl's own parsers; any other name is one of vLLM's."""


class EpisodeConfig(Section):
    """Code that plays a task against the policy. Without any, a prompt gets one response."""

    function: str | None = None
    """MODULE:FUNCTION, called with the task and a client of the policy; returns the reward."""
    env: str | None = None
    """MODULE:CLASS with reset(task) and step(message)."""
    tools: list[str] = []
    """MODULE:FUNCTION of each tool, or MODULE:CLASS whose public methods are tools that share a state."""
    command: list[str] = []
    """A program and its arguments; OPENAI_BASE_URL and OPENAI_API_KEY lead it to the policy."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, or of the constructor of the env or of the tools' classes."""
    workers: Positive = 2
    """Processes of an episode host; each runs many episodes concurrently."""
    extra_hosts: NonNegative | None = None
    """CPU-only hosts that play episodes for all rollouters; by default every host that has no other part in generation
    or training."""
    max_turns: Positive = 32
    """Most answers of the policy; then the episode ends and is scored as truncated."""
    max_context_tokens: Positive | None = None
    """Longest context plus answer; by default the longest prompt plus the longest response."""
    start_timeout_s: Seconds = 60.0
    """Longest time to the first call of the policy."""
    turn_timeout_s: Seconds = 120.0
    """Longest time between an answer and the next call or the end."""
    timeout_s: Seconds = 600.0
    """Longest time of an episode, without its waits for the policy; then it ends and is scored as truncated."""
    close_timeout_s: Seconds = 10.0
    """Time that an episode gets to end by itself once it is over."""
    stall_timeout_s: Seconds = 10.0
    """Longest time that a worker's event loop may block before the worker is killed."""
    max_memory_bytes: Positive = 4 << 30
    """Memory limit of a worker or a program, child processes included."""
    max_output_bytes: Positive = 1 << 20
    """Bytes of an episode's output that reach the log."""
    max_request_bytes: Positive = 64 << 20
    """Largest request body at the endpoint."""

    @property
    def kind(self) -> EpisodeKind:
        """Key of the code that plays an episode; "single" if none is set."""
        given = [name for name in ("function", "env", "tools", "command") if getattr(self, name)]
        return given[0] if given else "single"  # type: ignore[return-value]

    @model_validator(mode="after")
    def _one_player(self) -> EpisodeConfig:
        given = [name for name in ("function", "env", "tools", "command") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both set; an episode is played by one of them")
        return self


class ChatConfig(Section):
    """Conversion between messages and tokens."""

    template_options: dict[str, Any] = {}
    """Extra arguments of the chat template, for example enable_thinking = false."""
    history: Literal["sampled", "template"] = "sampled"
    """How a later context shows an earlier answer: as the sampled tokens, or as the chat template renders it. Set it
    as the model will be served (docs/episodes.md)."""
    tool_parser: str = "auto"
    """Parser of tool calls: auto, json (<tool_call>{...}</tool_call>), none, or a parser of vLLM by name."""
    reasoning_parser: str = "auto"
    """Parser that separates reasoning from the answer: auto, think (<think>...</think>), none, or a parser of vLLM by
    name."""
    renderer: str = Field(default="template", pattern=r"^(template|renderers:.+)$")
    """template is the model's own chat template; renderers:NAME is one of the package renderers."""
    date: str | None = Field(default=None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    """The date that chat templates see, YYYY-MM-DD; by default that of the run's first start, also after a resume."""
    check_timeout_s: Seconds = 60.0
    """Timeout of the check of the chat template before a start."""
    render_threads: Positive = 2
    """Threads of a rollouter that render messages."""

    @field_validator("date")
    @classmethod
    def _is_a_day(cls, value: str | None) -> str | None:
        if value is not None:
            Date.fromisoformat(value)
        return value
