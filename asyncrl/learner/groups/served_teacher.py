"""Scores groups with a teacher on a server, during training: each group as soon as it is in the buffer.

A score is a log-prob of the teacher for each sampled token. Invariant: a group is scored once, however often it returns
to the buffer. At most ``learner.teacher_server.concurrency`` requests are open. Each trained step
drops the scores of all groups outside the buffer, whose size the dataloader's gate bounds. Not thread-safe: it runs on
the event loop of rank 0.

Fails with ActorFailed, which names the URL, after ``learner.teacher_server.tries`` requests for a sequence, or after a
failure that a repetition cannot mend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from asyncrl.config.algorithm import TeacherServerConfig
from asyncrl.core.errors import ActorFailed
from asyncrl.learner.algorithm.batch import GroupScores
from asyncrl.learner.algorithm.scoring import by_group, sampled_sequences
from asyncrl.learner.groups.teacher import TeacherClient, TeacherFailed
from asyncrl.learner.groups.training_progress import News
from asyncrl.messages.groups import Group, sampled_positions
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.rpc.calls.retry import backoff
from asyncrl.rpc.services import ActorServices

REQUESTS, FAILED = "teacher/requests", "teacher/failed_requests"
"""Names of counters."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""First and longest pause between two requests for a sequence; each is twice the one before (s)."""


class ServedTeacher:
    """Scores groups with a teacher on a server, in tasks of ``tasks``."""

    def __init__(
        self,
        url: str,
        config: TeacherServerConfig,
        services: ActorServices,
        *,
        tasks: asyncio.TaskGroup,
        news: News,
    ) -> None:
        """``news`` announces each scored group."""
        self._client = TeacherClient(url, config)
        self._config, self._name, self._tasks = config, services.name, tasks
        self._counters, self._awaits, self._log = services.counters, services.awaits, services.log
        self._news = news
        self._request_slots = asyncio.Semaphore(config.concurrency)
        self._scores: dict[str, asyncio.Future[GroupScores]] = {}
        """Scores by the uid of their group; a future that is not done is being computed."""

    def begin(self, group: Group) -> None:
        """Begin to score a group in a task, unless it is scored or being scored."""
        uid = group.lease.uid
        if uid not in self._scores:
            self._scores[uid] = answer = asyncio.get_running_loop().create_future()
            self._tasks.create_task(self._score(group, answer))

    def has_done(self, groups: Iterable[Group]) -> bool:
        """Whether each of these groups is scored, or has failed."""
        return all((scores := self._scores.get(group.lease.uid)) is not None and scores.done() for group in groups)

    async def scores(self, groups: Sequence[Group]) -> list[GroupScores]:
        """Wait for the scores of these groups: log-probs in nats, at temperature 1. Raises ActorFailed."""
        for group in groups:
            self.begin(group)
        return [await self._scores[group.lease.uid] for group in groups]

    def keep(self, uids: Collection[str]) -> None:
        """Forget the scores of all groups but these."""
        held = set(uids)
        self._scores = {uid: scores for uid, scores in self._scores.items() if uid in held}

    async def close(self) -> None:
        """Close the connections; requests under way have been cancelled by their owner."""
        await self._client.close()

    async def _score(self, group: Group, answer: asyncio.Future[GroupScores]) -> None:
        """Score a group, put the result or the first failure into ``answer``, and announce it."""
        requests = [self._ask(group, sequence) for _, sequence in sampled_sequences([group])]
        results = await asyncio.gather(*requests, return_exceptions=True)
        failed = next((each for each in results if isinstance(each, BaseException)), None)
        # Only a cancelled future is done here: the step that awaited it was cancelled.
        if answer.done():
            return
        if failed is not None:
            answer.set_exception(failed)
            # Mark the error as retrieved, so that asyncio logs nothing if no step needs the group. A step that needs
            # the group still raises the error.
            answer.exception()
        else:
            (scores,) = by_group([group], [each for each in results if isinstance(each, np.ndarray)])
            answer.set_result(scores)
        self._news.announce()

    async def _ask(self, group: Group, sequence: TokenSequence) -> np.ndarray:
        """Log-probs of a sequence's sampled tokens, float64 [S]; repeats requests that may succeed."""
        prompt = group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids
        positions = sampled_positions(sequence) + len(prompt)
        # Tokens behind the last sampled token change no log-prob, so they are not sent.
        ids = np.concatenate([prompt, sequence.tokens])[: int(positions[-1]) + 1].tolist()
        for attempt in range(1, self._config.tries + 1):
            try:
                async with self._request_slots:
                    self._counters.add(REQUESTS)
                    with self._awaits.on(self._client.url, "log-probs by the teacher"):
                        return await self._client.logprobs(ids, positions)
            except TeacherFailed as error:
                self._counters.add(FAILED)
                self._log.warning("the teacher did not score", uid=group.lease.uid, attempt=attempt, error=str(error))
                if not error.passing or attempt == self._config.tries:
                    times = f" ({attempt} times; learner.teacher_server.tries)" if error.passing else ""
                    raise ActorFailed(self._name, f"learner.teacher: {error.reason}{times}") from error
            await asyncio.sleep(backoff(FIRST_PAUSE_S, attempt - 1, LONGEST_PAUSE_S))
        raise AssertionError("tries is above 0")
