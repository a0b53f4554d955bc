"""The chat template of a run with episodes: whether conversations can be had with it, and what they cost.

Runs in the process that reads the tokenizer. A template is a program and may hang: it is checked in a thread, under a
deadline, and the process ends without it.
"""

from __future__ import annotations

import threading

from asyncrl.chat.renderer import make_renderer
from asyncrl.chat.report import ChatReport
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.preflight.findings import Finding, fail, ok, warn
from asyncrl.stops import resolve_stops
from asyncrl.tokenizer import Tokenizer

MODEL = "model.path"
SEE = "asyncrl-doctor --chat CONFIG shows all that was found"


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
