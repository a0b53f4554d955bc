"""Episodes that are programs: each runs as a process of its own and finds the policy's address in its environment.

The program's exit ends the episode. After exit code 0 the last line of its standard output is the reward. The line is a
finite number or a JSON object of components; another line is no reward. Invariant: when an episode has a result,
nothing of the program is left, even if this process has died (workers/keeper.py). The program of a cancelled episode
has close_timeout_s to end. The program receives the variables that any program needs, the variables that the user
names (workers/confinement.py), and the key of its own session.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from asyncrl.config.episode import EpisodeConfig
from asyncrl.core.errors import AsyncRLError, EpisodeWorkersEnded
from asyncrl.episodes.episode_pool import UNOBSERVED, EpisodeCounts, EpisodeObserver
from asyncrl.episodes.playing.client import Task
from asyncrl.episodes.session import Playing, PolicySession
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.messages.reward import BadOutcome, Outcome, read_outcome
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rpc.lifecycle.supervision import describe_exit
from asyncrl.workers.confinement import UNISOLATED, Confinement
from asyncrl.workers.process import WorkerProcess
from asyncrl.workers.worker_pool import Place, WorkerPool

MOST_LOOKED_AT = 32
"""Most programs whose memory one check measures: each takes a fraction of a millisecond."""
MOST_ANSWER_BYTES = 1 << 20
"""Largest report of a keeper on the end of its program (bytes)."""
OURS = "ASYNCRL_"
"""Prefix of asyncrl's own environment variables."""
LARGEST_TASK = 64 << 10
"""Largest task that is put into the environment (bytes). The kernel allows 128 KiB for one variable."""


def environment(inherited: Mapping[str, str], task: str, *, base_url: str, key: str) -> dict[str, str]:
    """Make the environment of a program: ``inherited`` without ASYNCRL_*, and the policy's address and key. Pure.

    ``task`` is added unless it is longer than LARGEST_TASK.
    """
    env = {name: value for name, value in inherited.items() if not name.startswith(OURS)}
    env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": key}
    # Anthropic's client puts the version into its paths.
    env |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    return env | ({"ASYNCRL_TASK": task} if len(task.encode()) <= LARGEST_TASK else {})


def described(task: Task) -> str:
    """A task as JSON. Pure."""
    return json.dumps({**asdict(task), "episode_id": task.episode_id}, default=str)


def outcome_of(line: str) -> Outcome | None:
    """Read the outcome from the last line of a program's output; None for any other line, such as one of a log.

    Raises BadOutcome for an invalid number and for an object with an invalid "reward": both were meant as outcomes.
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


@dataclass(eq=False, slots=True, kw_only=True)
class Program(Place):
    """A running program, with its keeper: the process that starts and ends it (workers/keeper.py)."""

    ledger: StateLedger = field(default_factory=lambda: StateLedger(time.monotonic, "player"))
    session: PolicySession
    playing: Playing
    answer: dict[str, Any] | None = None
    """The keeper's report on the end of the program; None before that."""
    fault: str = ""
    """Reason that the pool killed the program; empty if it did not."""
    timer: asyncio.TimerHandle | None = None
    """Timer that kills the program if it ignores SIGTERM."""


class Programs(WorkerPool[Program]):
    """Runs a program for each episode, each in a lone place (workers/worker_pool.py). Arguments as of EpisodePool."""

    owner = "the episode host"
    section = "episode"
    module = "asyncrl.workers.keeper"
    own_session = True
    counters: EpisodeCounts
    _observer: EpisodeObserver

    def __init__(
        self,
        config: EpisodeConfig,
        *,
        base_url: str,
        confined: Confinement = UNISOLATED,
        observer: EpisodeObserver = UNOBSERVED,
    ) -> None:
        super().__init__(
            config,
            code=" ".join(config.command),
            setup=b"",
            max_frame_bytes=MOST_ANSWER_BYTES,
            start_timeout_s=0.0,
            confined=confined,
            observer=observer,
        )
        self._config, self._base_url = config, base_url
        self._next = 0
        """Index in the list of programs where the next check of memory begins."""
        self.counters = EpisodeCounts()
        self.waiting = self.suspects = 0
        """Always 0: each program starts at once, in a process of its own. EpisodePool has these attributes too."""

    async def start(self) -> None:
        """Begin to check memory; no program runs before the first episode."""
        self._check_workers()

    def play(self, session: PolicySession) -> Playing:
        """Start a program for an episode and return the future of the episode's result.

        If the future is cancelled, the program receives SIGTERM. After close_timeout_s it is killed with all its
        descendants.
        """
        playing = Playing(loop=self._loop)
        # A keeper sends no frame before the end of its program.
        program = Program(
            lone=True, session=session, playing=playing, ready=True, memory_limit=self._config.max_memory_bytes
        )
        playing.on_stop = lambda: self._stop(program)
        self._add(program)
        if program.process is not None:
            session.begin()
        return playing

    @property
    def open(self) -> int:
        """Programs that run."""
        return len(self._lone)

    # --- what the pool of workers asks ---

    def _new_places(self, count: int) -> list[Program]:
        return []

    def _setup_of(self, place: Program) -> bytes:
        """Return the keeper's first frame: the command, its environment, and the task as a file."""
        task, key = described(place.session.task), place.session.key
        env = environment(self._confined.env(), task, base_url=self._base_url, key=key)
        setup = {"argv": self._config.command, "env": env, "files": {"ASYNCRL_TASK_FILE": task}}
        return json.dumps(setup).encode()

    def _uid(self, place: Program) -> str:
        return place.session.task.uid

    def _failure(self, reason: str) -> AsyncRLError:
        return EpisodeWorkersEnded(self._code, reason)

    def _places_to_check(self) -> Iterable[Program]:
        """Return the programs whose memory this check measures: the next MOST_LOOKED_AT, in turn."""
        begin = self._next % max(1, len(self._lone))
        self._next = begin + MOST_LOOKED_AT
        return list(itertools.islice(itertools.chain(self._lone[begin:], self._lone[:begin]), MOST_LOOKED_AT))

    def _kill(self, place: Program, reason: str) -> None:
        """Hang up on the keeper, which then ends the program with all its descendants. The first ``reason`` is kept."""
        place.fault = place.fault or reason
        assert place.process is not None
        place.process.hang_up()

    def _handle_frame(self, place: Program, frame: bytes | bytearray) -> None:
        """Keep the report on the program's end, and hang up, so that the keeper ends."""
        place.answer = json.loads(frame)
        assert place.process is not None
        place.process.hang_up()

    def _on_worker_end(self, place: Program, reason: str, *, was_ready: bool) -> None:
        """Handle the end of a keeper: count its episode, report a failure of the program, and answer the caller."""
        if place.timer is not None:
            place.timer.cancel()
        done = self._outcome(place, reason)
        if not place.playing.done():
            self.counters.played += 1
            self.counters.failed += bool(done.error)
            if done.error and done.blame == "episode":
                kind = done.error.partition(":")[0]
                self._observer.failed(kind, f"{done.error} (prompt {place.session.task.uid})")
        place.playing.end(done)

    def _count_end(self, process: WorkerProcess) -> None:
        # A keeper ends after each program, so its end does not count as that of a worker.
        pass

    # --- programs ---

    def _stop(self, program: Program) -> None:
        """Send SIGTERM to the program of a cancelled episode, and kill it after close_timeout_s.

        A program that could not be started is only counted.
        """
        self.counters.stopped += 1
        if program.process is not None:
            program.process.send(b"terminate")
            program.timer = self._loop.call_later(self._config.close_timeout_s, self._kill, program, "did not end")

    def _outcome(self, program: Program, reason: str) -> EpisodeDone:
        """Make the result of an episode whose program has ended.

        If the pool killed the program, the result is the error in ``program.fault``. Else it follows from the report of
        the keeper, the process that runs the program (``program.answer``). A keeper that ended without a report, for
        ``reason``, has failed itself: then the error blames the host, not the program.
        """
        answer = program.answer
        if program.fault:
            return EpisodeDone(error=f"the program {program.fault}")
        if answer is None:
            return EpisodeDone(error=f"the process that keeps the program {reason}", blame="host")
        if "error" in answer:
            return EpisodeDone(error=f"the program {answer['error']}", blame=answer["blame"])
        if answer["code"] != 0:
            lines = answer["last_lines"]
            printed = f": {' | '.join(lines)}" if lines else ", and printed nothing"
            return EpisodeDone(error=f"the program ended with {describe_exit(answer['code'])}{printed}")
        try:
            outcome = outcome_of(answer["last_line"])
        except BadOutcome as error:
            return EpisodeDone(error=f"the program {error}, by the last line of its output")
        reward, components = outcome if outcome is not None else (None, {})
        return EpisodeDone(reward=reward, components=components)
