"""The dataloader gets all reports of the learner in the end, also after it has lost some."""

import asyncio

import pytest
from services import services
from structlog.testing import capture_logs
from virtual import LoopClock, run_virtual

from asyncrl.config import LearnerConfig
from asyncrl.core.errors import DeadlineExceeded, RemoteError, RestoreNeeded
from asyncrl.learner.groups.dataloader_link import DataloaderLink
from asyncrl.learner.groups.evals import EvalCollector
from asyncrl.learner.groups.intake import Intake
from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.messages.dataloader import DataloaderStatus, Outcomes, OutcomesSeen, Restored, Resumed, WatchDataloader
from asyncrl.rpc.calls.retry import DEADLINE

RESUMED = Resumed(fingerprint="f", seed=1, limit=2.0, first_epoch=0, prompts=3)


def link_to(call, **parts):
    """The link of a learner that calls the dataloader by ``call``; ``parts`` replace some."""
    alone = {"progress": TrainingProgress(version=0), "intake": Intake(LearnerConfig()), "evals": EvalCollector()}
    return DataloaderLink(call, LearnerConfig(), services(clock=LoopClock()), **(alone | parts))


class Dataloader:
    """Takes reports in order; those in ``lost`` it never hears of, though they are acknowledged by what it has seen."""

    def __init__(self, lost=()):
        self.lost, self.number, self.versions, self.restored = set(lost), 0, [], []

    def call(self, request, patience=1.0):
        answer = asyncio.get_running_loop().create_future()
        if isinstance(request, Restored):
            self.restored.append(request.version)
            self.number = request.outcomes_number
            answer.set_result(RESUMED)
            return answer
        assert isinstance(request, Outcomes)
        if request.version not in self.lost and request.number == self.number + 1:
            self.number = request.number
            self.versions.append(request.version)
        answer.set_result(OutcomesSeen(number=self.number, limit=1.0))
        return answer


class StartingAgain:
    """Has just started: asks for the state of the run, and takes two seconds to restore it."""

    def __init__(self):
        self.number, self.words, self.up, self.finished = 0, 0, False, False

    def call(self, request, patience=1.0):
        return asyncio.ensure_future(self._answer(request))

    async def _answer(self, request):
        if isinstance(request, Restored):
            self.words += 1
            await asyncio.sleep(2.0)
            self.up, self.number, self.finished = True, request.outcomes_number, request.finished
            return RESUMED
        await asyncio.sleep(0.1)
        if not self.up:
            raise RemoteError("dataloader/0", RestoreNeeded.code, "where does the run stand?", retryable=True)
        if isinstance(request, WatchDataloader):
            await asyncio.sleep(0.0 if request.seen < 0 else 30.0)
            return DataloaderStatus(number=1, exhausted=True, outstanding=0)
        assert isinstance(request, Outcomes)
        if request.number == self.number + 1:
            self.number = request.number
            self.finished |= request.finished
        return OutcomesSeen(number=self.number, limit=1.0)


@pytest.mark.parametrize("lost", [set(), {1}, {1, 2}, {0, 1, 2, 3}])
def test_a_dataloader_that_acknowledges_too_few_reports_gets_the_state_of_the_run(lost):
    async def main():
        dataloader, intake, progress = Dataloader(lost), Intake(LearnerConfig()), TrainingProgress(version=0)
        link = link_to(dataloader.call, progress=progress, intake=intake)
        reporting = asyncio.create_task(link.report())
        for version in range(4):
            progress.version = version
            intake.outcomes.published(version, 0)
            await link.all_acknowledged()
        reporting.cancel()
        known = sorted(dataloader.versions + dataloader.restored)
        assert known == [0, 1, 2, 3]
        assert set(dataloader.restored) == lost

    with capture_logs():
        run_virtual(main())


@pytest.mark.parametrize("at_s", [0.5, 1.0, 1.5])
def test_outcomes_during_the_restore_of_a_dataloader_are_reported_after_it(at_s):
    """At the end of the training: without further steps no later report would follow."""

    async def main():
        dataloader, intake, progress = StartingAgain(), Intake(LearnerConfig()), TrainingProgress(version=9)
        link = link_to(dataloader.call, progress=progress, intake=intake)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            loops = [tasks.create_task(work) for work in (link.watch(), link.report())]
            await asyncio.sleep(at_s)
            progress.finished = True
            intake.outcomes.finished()
            await link.all_acknowledged()
            known = dataloader.finished
            for loop in loops:
                loop.cancel()
        assert known
        assert dataloader.words == 1

    with capture_logs():
        run_virtual(main())


@pytest.mark.parametrize("late", [RemoteError("dataloader/0", DEADLINE, "late"), DeadlineExceeded("a", "b", "c", 30.0)])
def test_a_dataloader_with_large_data_gets_the_time_that_it_needs(late):
    given = []

    async def look(request, patience):
        given.append(patience)
        if patience < 5.0:
            raise late
        return RESUMED

    async def main():
        await link_to(lambda request, patience=1.0: asyncio.ensure_future(look(request, patience))).restore()

    with capture_logs():
        run_virtual(main())
    assert given == [1.0, 2.0, 4.0, 8.0]
