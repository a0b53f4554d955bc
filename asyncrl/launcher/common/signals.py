"""The signals that ask for the end of a run. Standard library only, and no state."""

from __future__ import annotations

import signal

STOPPING = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR2)
"""Signals of Ctrl-C, of a closed terminal, and of schedulers."""


def heeded() -> tuple[signal.Signals, ...]:
    """The signals that this process takes: all but a SIGHUP that it was started to ignore, as by nohup.

    SIGINT is always among them: a shell without job control has its background processes ignore it, which
    is a matter of the terminal's Ctrl-C and not of ``kill -INT``.
    """
    without = signal.SIGHUP if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else None
    return tuple(number for number in STOPPING if number != without)


def cause_of(number: int) -> str:
    """Cause of this signal, in the words that the user is shown."""
    names = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "a closed terminal"}
    return names.get(signal.Signals(number)) or signal.Signals(number).name
