"""Versions of the weights without a parameter server and without weights: their schedule and their numbers."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

from asyncrl.config import Config
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.publishing.versions import Versions
from asyncrl.rpc.services import ActorServices


class LoneVersions(Versions):
    """Each version is whole and held at once; there is no memory for those that are tried ``before`` a time, s."""

    spoiled = False  # type: ignore[assignment]

    def __init__(
        self, config: Config, services: ActorServices, *, progress: TrainingProgress, intake: Intake, dataloader: Any
    ) -> None:
        self.before = float("-inf")
        self._given = SimpleNamespace(version=-1)
        super().__init__(
            config,
            services,
            SimpleNamespace(on_gpu=False, engines_in_turn=int(config.placement.share == "time_slice")),  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            self._given,  # type: ignore[arg-type]
            host="",
            call=None,  # type: ignore[arg-type]
            tasks=None,  # type: ignore[arg-type]
            progress=progress,
            intake=intake,
            dataloader=dataloader,
            published=lambda version: None,
            track=None,  # type: ignore[arg-type]
            assemblies=None,  # type: ignore[arg-type]
        )

    async def _begin(self) -> int:
        if self._clock.now() < self.before:
            raise OSError(errno.ENOMEM, "no memory")
        self._given.version += 1
        self.whole = int(self._given.version)
        return self.whole

    async def handed_over(self) -> None:
        """It holds every version at once."""
