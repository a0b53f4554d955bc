"""Checks of the chat template of a run with episodes, and of the conversations of ``sft.data``.

They run in the process that reads the tokenizer. A template is a program and may hang: a thread checks it under a
deadline, and the process ends without waiting for the thread.
"""

from __future__ import annotations

import threading
import time

from asyncrl.config import Config
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.launcher.checks.findings import Finding, fail, ok, warn
from asyncrl.launcher.checks.model import window_of
from asyncrl.text.chat.probe import ChatReport
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.sft.conversations import load_conversations
from asyncrl.text.tokenizer import Tokenizer

MODEL = "model.path"
MORE = "asyncrl-doctor --chat CONFIG shows the details"
MEND = "correct the template, or take another model"
CONVERSATIONS = "sft.data"


def check_chat(config: Config, tokenizer: Tokenizer) -> Finding:
    """Check the template within chat.check_timeout_s."""
    answer: list[Finding] = []
    thread = threading.Thread(target=lambda: answer.append(_check(config, tokenizer)), daemon=True)
    thread.start()
    thread.join(config.chat.check_timeout_s)
    if answer:
        return answer[0]
    text = f"the check of the chat template did not end within {config.chat.check_timeout_s:g} s"
    return fail("chat", text, "correct the template, or raise chat.check_timeout_s", key="chat.check_timeout_s")


def _check(config: Config, tokenizer: Tokenizer) -> Finding:
    try:
        return judge(make_renderer(config, tokenizer).report)
    except ConfigError as error:
        problem, _, fix = error.problems[0].removeprefix(f"{MODEL}: ").partition("; ")
        return fail("chat", problem, fix or MEND, key=MODEL)
    except Exception as error:
        text = f"the chat template cannot be used: {type(error).__name__}: {error}"
        return fail("chat", text, MEND, key=MODEL)


def judge(report: ChatReport) -> Finding:
    """Judge a report on a template."""
    if not report.works:
        text = f"the chat template refuses every conversation: {report.cases[0].reason}"
        return fail("chat", text, f"correct the template; {MORE}", key=MODEL)
    forks = [case for case in report.cases if case.verdict == "fork" and not case.by_policy]
    if forks:
        names = ", ".join(case.case for case in forks)
        text = f"each answer starts a new sequence for turns of the kinds {names}: {forks[0].reason}"
        return warn("chat", text, f"take a template that only appends to a conversation; {MORE}", key=MODEL)
    return ok("chat", f"contexts are extended; tool calls are parsed by {report.tool_parser!r}", key=MODEL)


def check_conversations(config: Config, tokenizer: Tokenizer, seconds: float) -> list[Finding]:
    """Read and encode the conversations of sft.data as the learner does, for about so many seconds at most."""
    window, longest = window_of(config), config.sft.max_tokens
    if window is not None and longest is not None and longest > window:
        text = f"is {longest}, and the model has max_position_embeddings = {window}"
        return [fail("data", text, f"lower it to {window}", key="sft.max_tokens")]
    end = time.monotonic() + seconds
    is_cut = False

    def goes_on() -> bool:
        nonlocal is_cut
        is_cut = time.monotonic() >= end
        return not is_cut

    try:
        found = load_conversations(config, tokenizer, goes_on=goes_on)
    except DataError as error:
        fix = error.fix or f"correct {CONVERSATIONS}, or put the file there on this host"
        return [fail("data", error.detail, fix, key=CONVERSATIONS)]
    except ConfigError as error:
        fix = "take a model whose chat template can be used, or rows of prompt and completion"
        return [fail("data", "; ".join(error.problems), fix, key=CONVERSATIONS)]
    lengths = [len(each.ids) for row in found.rows for each in row.sequences]
    text = f"{in_rows(len(found.rows))} can be trained; the longest sequence has {max(lengths)} tokens"
    if is_cut:
        text += f"; read up to {found.rows[-1].place} in {seconds:.2g} s, and the run reads the rest"
    if found.skipped:
        text += f"; {in_rows(found.skipped)} left out, the first: {found.first_skipped}"
        return [warn("data", text, "correct these rows", key=CONVERSATIONS)]
    return [ok("data", text, key=CONVERSATIONS)]


def in_rows(count: int) -> str:
    """A number of rows, in words."""
    return "1 row" if count == 1 else f"{count:,} rows"
