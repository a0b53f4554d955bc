"""Reports of the learner are known to the dataloader in the end, whatever that has lost."""

import asyncio

import pytest
from services import services
from structlog.testing import capture_logs
from virtual import LoopClock, run_virtual

from asyncrl.config import LearnerConfig
from asyncrl.learner.groups.dataloader_link import DataloaderLink, Stand
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Intake
from asyncrl.messages.dataloader import Outcomes, OutcomesSeen, Restored, Resumed


class Dataloader:
    """Takes reports in order; those in ``lost`` it never hears of, though they are acknowledged by what it has seen."""

    def __init__(self, lost=()):
        self.lost, self.number, self.versions, self.restored = set(lost), 0, [], []

    def call(self, request):
        answer = asyncio.get_running_loop().create_future()
        if isinstance(request, Restored):
            self.restored.append(request.version)
            self.number = request.outcomes_number
            answer.set_result(Resumed(fingerprint="f", seed=1, limit=2.0, first_epoch=0, prompts=3))
            return answer
        assert isinstance(request, Outcomes)
        if request.version not in self.lost and request.number == self.number + 1:
            self.number = request.number
            self.versions.append(request.version)
        answer.set_result(OutcomesSeen(number=self.number, limit=1.0))
        return answer


@pytest.mark.parametrize("lost", [set(), {1}, {1, 2}, {0, 1, 2, 3}])
def test_a_dataloader_that_acknowledges_less_than_was_reported_is_told_where_the_run_stands(lost):
    async def main():
        dataloader, intake, version = Dataloader(lost), Intake(LearnerConfig()), 0
        link = DataloaderLink(
            dataloader.call,
            intake,
            EvalCollector(),
            services(clock=LoopClock()),
            stand=lambda: Stand(version=version, trained_at_version=0, groups_left=9, finished=False),
            news=lambda: None,
        )
        reporting = asyncio.create_task(link.report())
        for version in range(4):
            intake.outcomes.published(version, 0)
            await link.all_acknowledged()
        reporting.cancel()
        known = sorted(dataloader.versions + dataloader.restored)
        assert known == [0, 1, 2, 3]
        assert set(dataloader.restored) == lost

    with capture_logs():
        run_virtual(main())
