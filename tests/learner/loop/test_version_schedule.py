"""The notice about a version that cannot be published."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from learner.learner_cases import make_config
from services import services
from structlog.testing import capture_logs

from asyncrl.learner.groups.training_progress import TrainingProgress
from asyncrl.learner.loop.version_schedule import VersionSchedule

MARK = "/no/such/folder/version_mark.json"


@pytest.mark.parametrize(
    ("error", "to_do", "waits_for"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", MARK),
            "free space in /no/such/folder; a few KiB are enough for this",
            "room on /no/such/folder",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "free memory on this host: a version takes 3.0 GiB of it",
            "memory for the weights",
        ),
        (OSError(errno.EIO, "Input/output error", MARK), "mend what is named", ""),
    ],
)
def test_a_version_that_cannot_be_published_says_what_helps(error, to_do, waits_for):
    told: dict[str, Any] = {}

    def notify(key: str, text: str, **more: Any) -> None:
        told.update(more, text=text)

    schedule = VersionSchedule(
        make_config(),
        services(notify=notify, log=structlog.get_logger()),
        progress=TrainingProgress(),
        intake=None,  # type: ignore[arg-type]
        dataloader=None,  # type: ignore[arg-type]
        published=lambda version: None,
    )
    schedule.use(SimpleNamespace(whole=7, metrics={"weights/publish_bytes": 3 << 30}))  # type: ignore[arg-type]
    with capture_logs():
        schedule.failed(error)
    assert told["text"].startswith("no version of the weights after 7 could be published: ")
    assert told["meanwhile"].endswith(f"for 300 s (checkpoint.room_wait_s). To do: {to_do}")
    assert told["waits_for"] == waits_for
