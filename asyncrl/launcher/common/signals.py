"""The signals that ask for the end of a run. Standard library only, and no state."""

from __future__ import annotations

import signal

STOPPING = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2)
"""Signals of Ctrl-C, of a closed terminal, and of schedulers."""


def heeded() -> tuple[signal.Signals, ...]:
    """Return the signals that this process takes: STOPPING without a SIGHUP that it was started to ignore, as by nohup.

    SIGINT stays: if a shell makes background processes ignore it, this concerns Ctrl-C and not ``kill -INT``.
    """
    without = signal.SIGHUP if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else None
    return tuple(number for number in STOPPING if number != without)


def cause_of(number: int) -> str:
    """Return the cause of this signal, in words for the user."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "a closed terminal"}
    return names.get(signal.Signals(number)) or signal.Signals(number).name
