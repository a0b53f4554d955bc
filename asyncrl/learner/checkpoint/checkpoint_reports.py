"""Reports about checkpoints: counters, notices to the user, and each new checkpoint to the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

from asyncrl.learner.checkpoint.failed_writes import FailedWrite, Kept, checkpoint_complete_again, checkpoint_failed
from asyncrl.messages import Request
from asyncrl.messages.actors import CheckpointWritten
from asyncrl.observe.trace import Track
from asyncrl.rpc.services import ActorServices


class CheckpointReports:
    """Reports what CheckpointWriter did: a ``Kept`` is a complete checkpoint, a ``FailedWrite`` one that failed."""

    def __init__(
        self,
        services: ActorServices,
        report: Callable[[Request], Coroutine[None, None, None]],
        *,
        tasks: asyncio.TaskGroup,
        track: Track,
    ) -> None:
        """``report`` sends a message to the controller until it is answered."""
        self.is_trained = False
        """Whether the last step is trained. Then FinalWrites notifies the user of a failed write, not ``failed``."""
        self._counters, self._log, self._notify = services.counters, services.log, services.notify
        self._clock, self._report, self._tasks, self._track = services.clock, report, tasks, track
        self._failures = 0
        """Number of failed checkpoints since the last complete one."""
        self._sending: set[asyncio.Task[None]] = set()
        """Tasks whose message the controller has not answered."""

    def restored(self, kept: Kept, damaged: Mapping[str, str]) -> None:
        """Report the checkpoint ``kept``, from which the run continues.

        ``damaged`` has the name of each newer, damaged checkpoint with the text of its notice.
        """
        for name, text in damaged.items():
            self._notify(f"damaged {name}", text)
        if damaged:
            # The controller may still name a damaged one as the newest.
            self._announce(kept)

    def written(self, kept: Kept, *, staged_s: float, seconds: float) -> None:
        """Report a complete checkpoint: counters, timeline, log, and a message to the controller.

        It took ``seconds`` from its beginning; training waited for the first ``staged_s`` of them.
        """
        self._counters["checkpoint/version"] = kept.version
        self._counters["checkpoint/stage_s"] = staged_s
        self._counters["checkpoint/write_s"] = seconds
        self._track.add(
            f"checkpoint v{kept.version}",
            self._clock.now() - seconds,
            step=kept.step,
            version=kept.version,
            staged_s=round(staged_s, 6),
        )
        if self._failures:
            self._notify("checkpoint", checkpoint_complete_again(self._failures, kept.path, kept.step))
            self._failures = 0
        self._log.info("checkpoint is complete", version=kept.version, step=kept.step, path=str(kept.path))
        self._announce(kept)

    def failed(self, failed: FailedWrite, kept: Kept | None) -> None:
        """Report a checkpoint that could not be written; ``kept`` is the newest complete one, or None."""
        self._counters.add("checkpoint/failed")
        self._failures += 1
        self._log.error("no checkpoint; the last complete one stays", version=failed.version, error=failed.reason)
        if not self.is_trained:
            text, meanwhile = checkpoint_failed(failed, kept)
            self._notify("checkpoint", text, count=self._failures, meanwhile=meanwhile)

    def _announce(self, kept: Kept) -> None:
        message = CheckpointWritten(version=kept.version, step=kept.step, path=str(kept.path))
        sending = self._tasks.create_task(self._report(message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def all_sent(self) -> None:
        """Wait until the controller knows every checkpoint: the exit code of the run depends on them."""
        await asyncio.gather(*self._sending)
