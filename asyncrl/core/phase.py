"""The phase and the end of a run, in the same words everywhere. Pure."""

from __future__ import annotations

from asyncrl.core.errors import PREEMPTED_EXIT_CODE


def phase_word(phase: str, exit_code: int) -> str:
    """Its phase in a word: a run that ended before its last step was stopped or preempted, and is not done."""
    if phase == "done" and exit_code:
        return "preempted" if exit_code == PREEMPTED_EXIT_CODE else "stopped"
    return phase


def phase_and_reason(phase: str, exit_code: int, reason: str) -> str:
    """The phase's word with the reason, where that is known: ``stopped: by the launcher``."""
    word = phase_word(phase, exit_code)
    return f"{word}: {reason.removeprefix(f'{word} ')}" if reason else word
