"""Shows a group of samples/ as text: its prompt, then each response or conversation with its score. Pure.

Every text view of samples draws these lines: ``asyncrl-top --samples``, the samples screen of asyncrl-top, and
``asyncrl-launch --dry-run --generate``. The page of ``asyncrl-view`` shows a message by its parts.

Invariant: a line is printable and holds no newline. Each text, the number of responses and messages, a group and a
page are bounded, and a line says how much is left out. It never fails: a message that does not have the form of
OpenAI's chat completions is shown as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from asyncrl.core.formatting import printable
from asyncrl.observe.samples import SampleGroup, SampleTrajectory

SampleStyle = Literal["group", "heading", "role", "text", "note"]
LONGEST_TEXT = 4000
"""Most characters of one text that are shown: half of them its beginning, half its end."""
LONGEST_NAME = 64
"""Most characters of a name that are shown: OpenAI's API allows as many for a tool."""
MOST_RESPONSES = 16
LONGEST_GROUP = 100_000
"""Number of characters of a group after which no further response is shown."""
LONGEST_PAGE = 400_000
"""Most characters of a page, unless its first group has more."""
MOST_MESSAGES = 60
"""Most messages of a conversation that are shown: half of them the first ones, half the last ones."""
MOST_COMPONENTS = 12
INDENT = 2
TAB = 4


class SampleLine(NamedTuple):
    """A line of text. The view indents it by ``indent`` blanks, wraps it, and colours it by its style."""

    text: str
    style: SampleStyle = "text"
    indent: int = 0


class MessagePart(NamedTuple):
    """A part of a message, with a title unless it is its text."""

    kind: Literal["text", "reasoning", "call"]
    text: str
    title: str = ""


class ShownMessage(NamedTuple):
    """A message in parts, for any view."""

    role: str
    name: str
    parts: list[MessagePart]


def sample_lines(group: SampleGroup) -> list[SampleLine]:
    """Make the lines of a group: title, prompt or shared messages, then each response, up to the limits."""
    trajectories = group.trajectories
    lines = [SampleLine(title_of(group), "group")]
    shared = _shared_messages(trajectories)
    if shared:
        lines += _conversation(trajectories[0].messages[:shared], 0)
    else:
        lines += [SampleLine("prompt", "role"), *_text(group.prompt, INDENT)]
    shown = 0
    for number, trajectory in enumerate(trajectories[:MOST_RESPONSES], 1):
        if sum(len(line.text) for line in lines) > LONGEST_GROUP:
            break
        shown = number
        lines += [SampleLine(""), SampleLine(_score(trajectory, number, len(trajectories)), "heading")]
        if trajectory.messages:
            lines += _conversation(trajectory.messages[shared:], INDENT)
        else:
            lines += _text(trajectory.text, INDENT)
        if trajectory.judgement:
            lines += [SampleLine("judge", "role", INDENT), *_text(trajectory.judgement, 2 * INDENT)]
    if (more := len(trajectories) - shown) > 0:
        lines += [SampleLine(""), SampleLine(f"[{more} more responses are not shown]", "note")]
    return lines


def sample_page(groups: Sequence[SampleGroup]) -> list[str]:
    """Show the groups one below the other, as indented lines of text, up to LONGEST_PAGE; the first in any case."""
    page: list[str] = []
    size = 0
    for number, group in enumerate(groups):
        lines = sample_lines(group)
        size += sum(len(line.text) + line.indent for line in lines)
        if page and size > LONGEST_PAGE:
            return [*page, f"[{len(groups) - number} more groups are not shown]"]
        page += [
            f"== {line.text} ==" if line.style == "group" else f"{' ' * line.indent}{line.text}".rstrip()
            for line in lines
        ]
        page.append("")
    return page[:-1]


def title_of(group: SampleGroup) -> str:
    """Make the title of a group: kind, step, policy version, prompt, and the mean and range of its rewards."""
    rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
    parts = [
        " ".join(filter(None, (group.kind, _short(group.name)))),
        f"step {group.step}" if group.step is not None else "",
        f"version {group.version}" if group.version is not None and group.version >= 0 else "",
        f"prompt {_short(group.uid)}" if group.uid else "",
        f"source {_short(group.source)}" if group.source else "",
        f"reward {_rewards(rewards)}" if rewards else "",
        _short(group.reason),
    ]
    return "  ".join(filter(None, parts))


def _rewards(rewards: Sequence[float]) -> str:
    mean, low, high = sum(rewards) / len(rewards), min(rewards), max(rewards)
    return f"{mean:.3g}" if low == high else f"{mean:.3g} ({low:.3g} to {high:.3g})"


def _score(trajectory: SampleTrajectory, number: int, count: int) -> str:
    """Make the heading of a response: its reward with components, finish reason, length and turns."""
    shown = list(trajectory.components.items())[:MOST_COMPONENTS]
    components = [f"{_short(name)} {_number(value)}" for name, value in shown]
    if (more := len(trajectory.components) - len(shown)) > 0:
        components.append(f"{more} more")
    reward = f"reward {_number(trajectory.reward)}" + (f" ({', '.join(components)})" if components else "")
    parts = [
        f"response {number} of {count}" if count > 1 else "response",
        reward,
        _short(trajectory.finish_reason),
        f"{trajectory.length} tokens" if trajectory.length is not None else "",
        f"{trajectory.turns} turns" if trajectory.turns else "",
    ]
    return "  ".join(filter(None, parts))


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


# --- conversations ---


def _shared_messages(trajectories: Sequence[SampleTrajectory]) -> int:
    """Count the messages that all conversations share before the first answer; 0 for responses without messages."""
    conversations = [trajectory.messages for trajectory in trajectories]
    shortest = min((len(each) for each in conversations), default=0)
    for at in range(shortest):
        message = conversations[0][at]
        if _role(message) == "assistant" or any(each[at] != message for each in conversations):
            return at
    return shortest


def _conversation(messages: Sequence[Any], indent: int) -> list[SampleLine]:
    """Make the lines of a conversation; beyond MOST_MESSAGES its middle is left out."""
    half = MOST_MESSAGES // 2
    left_out = len(messages) - MOST_MESSAGES
    if left_out <= 0:
        return [line for message in messages for line in _message(message, indent)]
    note = SampleLine(f"[{left_out} messages are left out]", "note", indent)
    return [*_conversation(messages[:half], indent), note, *_conversation(messages[-half:], indent)]


def _message(message: Any, indent: int) -> list[SampleLine]:
    """Make the lines of one message: role and name, then reasoning, content and tool calls."""
    if not isinstance(message, Mapping):
        return _text(_json(message), indent)
    shown, inner = message_parts(message), indent + INDENT
    lines = [SampleLine(shown.role + (f" {shown.name}" if shown.name else ""), "role", indent)]
    for part in shown.parts:
        if part.kind != "text":
            lines.append(SampleLine(part.title, "note", inner))
        lines += _text(part.text, inner + (INDENT if part.kind != "text" else 0))
    return lines


def message_parts(message: Any) -> ShownMessage:
    """Split a message into its role and name, and its parts: reasoning, content and tool calls. Never fails."""
    if not isinstance(message, Mapping):
        return ShownMessage(_role(message), "", [MessagePart("text", _json(message))])
    name = message.get("name") or message.get("tool_call_id")
    parts: list[MessagePart] = []
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        parts.append(MessagePart("reasoning", _content(reasoning), "reasoning"))
    if message.get("content") not in (None, ""):
        parts.append(MessagePart("text", _content(message["content"])))
    calls = message.get("tool_calls")
    parts += [_call(call) for call in calls] if isinstance(calls, list) else []
    return ShownMessage(_role(message), _short(name) if isinstance(name, str) else "", parts)


def _role(message: Any) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    return _short(role) if isinstance(role, str) else "message"


def _content(content: Any) -> str:
    """Return a message's content as text. A list gives a line for each part; a part that is not text becomes JSON."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in parts]
    return "\n".join(part if isinstance(part, str) else _json(part) for part in texts)


def _call(call: Any) -> MessagePart:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return MessagePart("text", f"calls {_json(call)}")
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return MessagePart("call", text, f"calls {_short(str(function.get('name')))}")


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        return repr(value)


# --- text ---


def _short(text: str) -> str:
    """A name without control characters, cut to LONGEST_NAME."""
    shown = printable(text[: LONGEST_NAME + 1])
    return shown if len(shown) <= LONGEST_NAME else f"{shown[: LONGEST_NAME - 3]}..."


def _text(text: str, indent: int) -> list[SampleLine]:
    """Make the lines of a text. Beyond LONGEST_TEXT a note takes the place of its middle."""
    left_out = len(text) - LONGEST_TEXT
    if left_out <= 0:
        return _lines(text, indent)
    half = LONGEST_TEXT // 2
    note = SampleLine(f"[{left_out} characters are left out]", "note", indent)
    return [*_lines(text[:half], indent), note, *_lines(text[-half:], indent)]


def _lines(text: str, indent: int) -> list[SampleLine]:
    if not text.strip("\n"):
        return [SampleLine("[empty]" if not text else f"[{len(text)} newlines]", "note", indent)]
    return [SampleLine(printable(line.expandtabs(TAB)), "text", indent) for line in text.removesuffix("\n").split("\n")]
