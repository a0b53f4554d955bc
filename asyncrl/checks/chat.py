"""The chat template of a run with episodes, and the conversations of ``sft.data``.

Runs in the process that reads the tokenizer. A template is a program and may hang: it is checked in a thread, under a
deadline, and the process ends without it.
"""

from __future__ import annotations

import threading
import time

from asyncrl.chat.renderer import make_renderer
from asyncrl.chat.report import ChatReport
from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.checks.model import window_of
from asyncrl.config import Config
from asyncrl.errors import ConfigError, DataError
from asyncrl.sft.conversations import load_conversations
from asyncrl.stops import resolve_stops
from asyncrl.tokenizer import Tokenizer

MODEL = "model.path"
SEE = "asyncrl-doctor --chat CONFIG shows all that was found"
CONVERSATIONS = "sft.data"


def check_chat(config: Config, tokenizer: Tokenizer) -> Finding:
    """Check the template within chat.check_timeout_s."""
    answer: list[Finding] = []
    thread = threading.Thread(target=lambda: answer.append(_check(config, tokenizer)), daemon=True)
    thread.start()
    thread.join(config.chat.check_timeout_s)
    if answer:
        return answer[0]
    told = f"the chat template was not checked within {config.chat.check_timeout_s:g} s"
    return fail("chat", told, "mend the template, or raise chat.check_timeout_s", key="chat.check_timeout_s")


def _check(config: Config, tokenizer: Tokenizer) -> Finding:
    try:
        stops = resolve_stops(config.rollout, tokenizer)
        return judge(make_renderer(config, tokenizer, stop_ids=stops.token_ids).report)
    except ConfigError as error:
        problem, _, fix = error.problems[0].removeprefix(f"{MODEL}: ").partition("; ")
        return fail("chat", problem, fix or "mend the template, or take another model", key=MODEL)
    except Exception as error:
        told = f"the chat template cannot be used: {type(error).__name__}: {error}"
        return fail("chat", told, "mend the template, or take another model", key=MODEL)


def judge(report: ChatReport) -> Finding:
    """The finding that a report makes."""
    if not report.works:
        told = f"the chat template refuses every conversation: {report.cases[0].reason}"
        return fail("chat", told, f"mend the template; {SEE}", key=MODEL)
    forks = [case for case in report.cases if case.verdict == "fork" and not case.by_policy]
    if forks:
        names = ", ".join(case.case for case in forks)
        told = f"each answer begins a new sequence for turns of the kinds {names}: {forks[0].reason}"
        return warn("chat", told, f"take a template that only adds to a conversation; {SEE}", key=MODEL)
    return ok("chat", f"contexts are extended; calls are read by {report.tool_parser!r}", key=MODEL)


def check_conversations(config: Config, tokenizer: Tokenizer, seconds: float) -> list[Finding]:
    """Read and encode the conversations of sft.data as the learner does, for about so long."""
    window, longest = window_of(config), config.sft.max_tokens
    if window is not None and longest is not None and longest > window:
        told = f"is {longest}, and the model has max_position_embeddings = {window}"
        return [fail("data", told, f"lower it to {window}", key="sft.max_tokens")]
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
        return [fail("data", error.told, fix, key=CONVERSATIONS)]
    except ConfigError as error:
        fix = "take a model whose chat template can be used, or rows of prompt and completion"
        return [fail("data", "; ".join(error.problems), fix, key=CONVERSATIONS)]
    lengths = [len(each.ids) for row in found.rows for each in row.sequences]
    told = f"{_counted(len(found.rows))} can be trained; the longest sequence has {max(lengths)} tokens"
    if is_cut:
        told += f"; read up to {found.rows[-1].place} in {seconds:.2g} s, and the run reads the rest"
    if found.skipped:
        told += f"; {_counted(found.skipped)} left out, the first: {found.first_skipped}"
        return [warn("data", told, "mend these rows", key=CONVERSATIONS)]
    return [ok("data", told, key=CONVERSATIONS)]


def _counted(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows:,} rows"
