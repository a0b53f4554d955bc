"""Shows trajectories to a judge as bounded text: the part that they share once, then the rest of each. Pure.

A conversation is shown as its main line, the messages of the completion, and summaries of up to MOST_BRANCHES
*branches*, other paths of it. A text that is too long loses its middle, with a mark. Invariant: the text has at most
``limit`` characters, not counting marks and a few words for each trajectory. Trajectories with the same text are shown
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.messages.reward import Completion
from asyncrl.observe.sample_text import MessagePart, message_parts

SHARED_FRACTION = 0.4
"""Largest share of all characters for the shared part, if the other parts need the rest."""
BRANCH_CHARS = 800
"""Longest summary of a branch (characters)."""
MOST_BRANCHES = 8
CUT_SHORT = {
    "length": "[it was cut off at its longest length]",
    "turns": "[it was ended after its most turns]",
    "time": "[it was ended when its time was over]",
}


@dataclass(frozen=True, slots=True)
class JudgeView:
    """A group as a judge is shown it."""

    shared: str
    """Text that all trajectories begin with."""
    bodies: list[str]
    """Texts of what follows in the trajectories, without duplicates."""
    body_of: list[int]
    """For each completion, the index of its text in ``bodies``."""


def view(prompt: str, completions: Sequence[Completion], limit: int) -> JudgeView:
    """Show the completions of one prompt in about ``limit`` characters: their shared part, and the rest of each.

    The shared part gets the characters that the bodies do not need, and at least SHARED_FRACTION of ``limit``. The
    bodies divide the other characters (``shares``).
    """
    pieces = [_pieces(completion) for completion in completions]
    count = _shared_count(completions, pieces)
    shared = "\n\n".join(pieces[0][:count])
    # The conversation of an episode need not begin with the prompt of its row.
    if prompt.strip() and prompt.strip() not in shared:
        shared = f"{prompt}\n\n{shared}" if shared else prompt
    rests = [_body(completion, texts[count:]) for completion, texts in zip(completions, pieces, strict=True)]
    shared_room = max(int(SHARED_FRACTION * limit), limit - sum(map(len, set(rests))))
    shared = shorten(shared, shared_room)
    different = list(dict.fromkeys(rests))
    rooms = shares([len(body) for body in different], max(0, limit - len(shared)))
    shown = {body: shorten(body, room) for body, room in zip(different, rooms, strict=True)}
    bodies = list(dict.fromkeys(shown.values()))
    index_of = {body: at for at, body in enumerate(bodies)}
    return JudgeView(shared, bodies, [index_of[shown[body]] for body in rests])


def shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide ``total`` characters among texts of these ``sizes``: short texts get their size, all others the same
    room."""
    rooms = [0] * len(sizes)
    left = total
    for done, at in enumerate(sorted(range(len(sizes)), key=lambda at: sizes[at])):
        rooms[at] = min(sizes[at], left // (len(sizes) - done))
        left -= rooms[at]
    return rooms


def shorten(text: str, room: int) -> str:
    """Replace the middle of ``text`` by a line that says so, if it has more than ``room`` characters."""
    if len(text) <= room:
        return text
    head, tail = (room + 1) // 2, room // 2
    left_out = f"\n[... {len(text) - room} characters are left out here ...]\n"
    return text[:head] + left_out + text[len(text) - tail :]


def message_text(message: Mapping[str, Any]) -> str:
    """Format a message of OpenAI's chat completions as text under its role: reasoning, content, tool calls."""
    role, shown = message.get("role", "user"), message_parts(message)
    heads = {"reasoning": f"{role}, thinking", "text": f"{role} {shown.name}".rstrip()}
    # An empty text is shown only if the message has nothing else.
    parts = [part for part in shown.parts if part.text or part.kind == "call"] or [MessagePart("text", "")]
    return "\n\n".join(f"[{heads.get(part.kind, f'{role} {part.title}')}]\n{part.text}" for part in parts)


def _pieces(completion: Completion) -> list[str]:
    """Format the messages of a completion; without messages, return its text alone."""
    if completion.messages:
        return [message_text(message) for message in completion.messages]
    return [completion.text]


def _shared_count(completions: Sequence[Completion], pieces: list[list[str]]) -> int:
    """Count the first messages that all trajectories share, from the texts of their messages (``pieces``).

    0 if a completion has no messages. If the trajectories are equal, only the messages before the first answer count,
    so that an answer remains to be judged.
    """
    if not all(completion.messages for completion in completions):
        return 0
    shortest = min(map(len, pieces))
    count = next((at for at in range(shortest) if len({texts[at] for texts in pieces}) > 1), shortest)
    if all(texts == pieces[0] for texts in pieces):
        roles = [message.get("role") for message in completions[0].messages]
        count = roles.index("assistant") if "assistant" in roles else 0
    return count


def _body(completion: Completion, pieces: list[str]) -> str:
    """Format what follows the shared part in one trajectory: messages (``pieces``), how it was cut, and branches."""
    parts = list(pieces) or ["[there is no more of it]"]
    if completion.finish_reason in CUT_SHORT:
        parts.append(CUT_SHORT[completion.finish_reason])
    main = [message_text(message) for message in completion.messages]
    for number, branch in enumerate(completion.branches[:MOST_BRANCHES], start=1):
        parts.append(_branch(number, [message_text(message) for message in branch], main))
    if len(completion.branches) > MOST_BRANCHES:
        parts.append(f"[{len(completion.branches) - MOST_BRANCHES} more branches are left out]")
    return "\n\n".join(parts)


def _branch(number: int, branch: list[str], main: list[str]) -> str:
    """Format a branch: the place where it leaves the ``main`` line, and its messages from there, shortened."""
    common = next(
        (at for at, (a, b) in enumerate(zip(branch, main, strict=False)) if a != b), min(len(branch), len(main))
    )
    own = branch[common:]
    where = f"after message {common} of the conversation" if common else "a conversation of its own"
    summary = shorten("\n\n".join(own), BRANCH_CHARS)
    return f"[branch {number}: {where}, {len(own)} messages]\n{summary}\n[end of branch {number}]"
