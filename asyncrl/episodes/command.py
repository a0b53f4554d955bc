"""Episodes that are programs: each run as a process of its own, told by its environment where the policy is.

Its exit ends the episode: with 0 it has ended well, and the last line of its standard output is the reward, if that is
a finite number or a JSON object of components. Invariant: when an episode has ended nothing of the program is left; the
same holds when this process has died (workers/keeper.py). It has the part of the run's environment that
any program needs or the user names (workers/confinement.py), and the key of its own session.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from asyncrl.config.episode import EpisodeConfig
from asyncrl.episodes.counts import EpisodeCounts
from asyncrl.episodes.playing.task import Task
from asyncrl.episodes.session import Playing, PolicySession
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.messages.monitor import ResourceRecord
from asyncrl.outcome import BadOutcome, Outcome, read_outcome
from asyncrl.runtime.lifecycle.supervision import describe_exit
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.memory import held_beyond
from asyncrl.workers.process import WorkerProcess, gone

TAIL_BYTES = 1 << 12
LAST_LINES = 5
LOOK_S = 0.25
MOST_LOOKED_AT = 32
GATHER_S = 0.05
"""Seconds for which output is gathered."""
MOST_ANSWER_BYTES = 1 << 20
OURS = "ASYNCRL_"
LARGEST_TASK = 64 << 10
"""Bytes of a task in the environment, where the kernel allows 128 KiB for one variable."""


def environment(inherited: Mapping[str, str], task: str, *, base_url: str, key: str) -> dict[str, str]:
    """Environment of a program, with ``task`` where it fits. Pure."""
    env = {name: value for name, value in inherited.items() if not name.startswith(OURS)}
    env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key}
    # Anthropic's client puts the version into its paths.
    env |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    return env | ({"ASYNCRL_TASK": task} if len(task.encode()) <= LARGEST_TASK else {})


def described(task: Task) -> str:
    """A task as JSON. Pure."""
    return json.dumps({**task.fields(), "episode_id": task.episode_id}, default=str)


def outcome_of(line: str) -> Outcome | None:
    """The outcome that a last line holds; None where it holds none, as a line of a log.

    Raises BadOutcome for a number, and for an object with a "reward", that is none: it was meant as one.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | dict):
        return None
    try:
        return read_outcome(value)
    except BadOutcome:
        if isinstance(value, dict) and "reward" not in value:
            return None
        raise


@dataclass(eq=False, slots=True)
class Program:
    """A program that runs."""

    session: PolicySession
    playing: Playing
    process: WorkerProcess
    answer: dict[str, Any] | None = None
    """The keeper's answer on its end."""
    fault: str = ""
    """Reason that it was killed."""
    timer: asyncio.TimerHandle | None = None
    """Timer that kills it."""
    telling: asyncio.TimerHandle | None = None
    """Timer that hands out the gathered output."""


class Programs:
    """The programs that play episodes; arguments as of Workers."""

    def __init__(
        self,
        config: EpisodeConfig,
        *,
        base_url: str,
        confined: Confinement = UNISOLATED,
        on_output: Callable[[str, str, int], None] = lambda uid, text, dropped: None,
        on_fault: Callable[[str, str], None] = lambda kind, text: None,
    ) -> None:
        self._config, self._base_url, self._confined = config, base_url, confined
        self._on_output, self._on_fault = on_output, on_fault
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, Program] = {}
        self._end: asyncio.Future[None] = self._loop.create_future()
        self._all_ended = asyncio.Event()
        self._look: asyncio.TimerHandle | None = None
        self.counts = EpisodeCounts()
        self.waiting = self.suspects = 0

    async def start(self) -> None:
        """Begin to look at memory; no program runs before the first episode."""
        self._look_at_memory()

    def play(self, session: PolicySession) -> Playing:
        """Run the program. When the future is cancelled it gets SIGTERM, and after close_timeout_s SIGKILL with all
        else."""
        playing = Playing(loop=self._loop)
        task = described(session.task)
        setup = {
            "argv": self._config.command,
            "env": environment(self._confined.env(), task, base_url=self._base_url, key=session.key),
            "files": {"ASYNCRL_TASK_FILE": task},
        }
        try:
            process = WorkerProcess(
                "asyncrl.workers.keeper",
                json.dumps(setup).encode(),
                confined=self._confined,
                max_frame_bytes=MOST_ANSWER_BYTES,
                max_output_bytes=self._config.max_output_bytes,
                memory_key="episode.max_memory_bytes",
                own_session=True,
                tail_bytes=TAIL_BYTES,
                on_output=lambda process: self._printed(session.key),
                on_frame=lambda _, frame: self._told(session.key, json.loads(frame)),
                on_end=lambda _, reason: self._ended(session.key, reason),
            )
        except OSError as error:
            # It has no default, and a cancellation calls it.
            playing.on_stop = lambda: None
            playing.end(EpisodeDone(error=f"there is no process to be had: {error}", blame="host"))
            return playing
        program = self._running[session.key] = Program(session, playing, process)
        playing.on_stop = lambda: self._stop(program)
        session.begin()
        return playing

    async def watch(self) -> None:
        """Returns when this is closed."""
        await asyncio.shield(self._end)

    async def close(self) -> None:
        """Kill every program with what it has started. Raises DeadlineExceeded when a process outlives that."""
        if not self._end.done():
            self._end.set_result(None)
        if self._look is not None:
            self._look.cancel()
        left: list[psutil.Process] = []
        for program in list(self._running.values()):
            left += program.process.descendants()
            self._kill(program, "was stopped: the episode host was closed")
        if not self._running:
            self._all_ended.set()
        await gone("the episode host", self._all_ended, left, lambda: (each.process for each in self._running.values()))

    @property
    def open(self) -> int:
        """Programs that run."""
        return len(self._running)

    def resources(self) -> list[ResourceRecord]:
        """No records: a program has no place."""
        return []

    def _stop(self, program: Program) -> None:
        """Stop a program that nobody waits for any more."""
        self.counts.stopped += 1
        program.process.send(b"terminate")
        program.timer = self._loop.call_later(self._config.close_timeout_s, self._kill, program, "did not end")

    def _kill(self, program: Program, reason: str) -> None:
        """Hang up on the keeper, which then ends the program with all that it has started."""
        program.fault = program.fault or reason
        program.process.hang_up()

    def _told(self, key: str, answer: dict[str, Any]) -> None:
        program = self._running[key]
        program.answer = answer
        program.process.hang_up()

    def _ended(self, key: str, reason: str) -> None:
        program = self._running.pop(key)
        if program.timer is not None:
            program.timer.cancel()
        self._hand_out(program, at_end=True)
        done = self._outcome(program, reason)
        if not program.playing.done():
            self.counts.played += 1
            self.counts.failed += bool(done.error)
            if done.error and done.blame == "episode":
                kind = done.error.partition(":")[0]
                self._on_fault(kind, f"{done.error} (prompt {program.session.task.uid})")
        program.playing.end(done)
        if self._end.done() and not self._running:
            self._all_ended.set()

    def _outcome(self, program: Program, reason: str) -> EpisodeDone:
        answer = program.answer
        if program.fault:
            return EpisodeDone(error=f"the program {program.fault}")
        if answer is None:
            # Its keeper has died, which the program cannot have done by honest means.
            return EpisodeDone(error=f"the process that keeps the program {reason}", blame="host")
        if "error" in answer:
            return EpisodeDone(error=f"the program {answer['error']}", blame=answer["blame"])
        if answer["code"] != 0:
            lines = program.process.output.tail.decode(errors="replace").strip().splitlines()[-LAST_LINES:]
            said = f": {' | '.join(line.strip() for line in lines)}" if lines else ", and printed nothing"
            return EpisodeDone(
                error=f"the program ended with {describe_exit(answer['code'])}{said}", user_s=answer["user_s"]
            )
        try:
            outcome = outcome_of(answer["last_line"])
        except BadOutcome as error:
            return EpisodeDone(error=f"the program {error}, by the last line of its output", user_s=answer["user_s"])
        reward, components = outcome if outcome is not None else (None, {})
        return EpisodeDone(reward=reward, components=components, user_s=answer["user_s"])

    def _printed(self, key: str) -> None:
        """Have output handed out soon, with all that comes right behind it."""
        program = self._running[key]
        if program.telling is None:
            program.telling = self._loop.call_later(GATHER_S, self._hand_out, program)

    def _hand_out(self, program: Program, *, at_end: bool = False) -> None:
        if program.telling is not None:
            program.telling.cancel()
            program.telling = None
        text, dropped = program.process.output.take(end_of_call=at_end)
        self.counts.output_dropped_bytes += dropped
        if text or dropped:
            self._on_output(program.session.task.uid, text, dropped)

    def _look_at_memory(self) -> None:
        """Look at the next few programs, in turn: each look takes a fraction of a millisecond."""
        limit = self._config.max_memory_bytes
        for key in list(self._running)[:MOST_LOOKED_AT]:
            # Moved to the end, so that the next look begins with others.
            program = self._running[key] = self._running.pop(key)
            if program.fault or program.process.ended:
                continue
            if (found := held_beyond(program.process.pid, limit)) is not None:
                self.counts.out_of_memory += 1
                told = f"took more than {limit} bytes of memory (episode.max_memory_bytes; it held {found[0]})"
                self._kill(program, f"{told}; it was killed")
        self._look = self._loop.call_later(LOOK_S, self._look_at_memory)
