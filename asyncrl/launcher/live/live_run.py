"""Connects a command to a live run: finds the run folder, loads the keys and calls the controller.

Users who can read the private folder on the head's machine may call the controller as ``launcher/0``, several commands
at once. Calls have a deadline, except in ``members_of``. Fails with UsageError if there is no such run, it is only just
starting, it has ended, or this user cannot read its private folder. If the controller refuses a request, the error has
its reason.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.load import config_from_json
from asyncrl.core.errors import ConfigError, UsageError
from asyncrl.launcher.run_folder.folders import RunFolder, last_attempt
from asyncrl.launcher.run_folder.private import CONFIG, LOCK, is_live
from asyncrl.messages.hosts import Members, WatchMembers
from asyncrl.rpc.controller_client import ADDRESS_FILE, ControllerClient, read_address_file
from asyncrl.rpc.wire.keys import LAUNCHER, Credentials, load_credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A live run: its folder, and what a command needs to call its controller."""

    folder: RunFolder
    config: Config
    address: str
    """Address of the controller."""
    credentials: Credentials

    @property
    def lives(self) -> bool:
        """Whether the run still lives."""
        return is_live(self.folder.path)

    def must_live(self) -> None:
        """Raise UsageError if the run has ended."""
        if not self.lives:
            raise UsageError(f"{self.folder.path}: the run in it has ended")

    def connect(self) -> ControllerClient:
        """Make a connection to its controller, whose calls have the timeout network.call_timeout_s."""
        timeout_s = self.config.network.call_timeout_s
        return ControllerClient(
            self.address, self.credentials, LAUNCHER, call_timeout_s=timeout_s, must_live=self.must_live
        )


def find_live_run(place: str) -> LiveRun:
    """Find the live run in this folder, and load its configuration, address and keys. Raises UsageError."""
    path = Path(place).absolute()
    private = path / "private"
    try:
        if not (path / CONFIG).exists():
            raise UsageError(f"{place} holds no run: name a run folder, on the machine of the run's head")
        text, last = (path / CONFIG).read_text(), last_attempt(path)
        if not is_live(path):
            raise UsageError(
                f"{path}: the run in it has ended, or its head is another machine; call this there, while it lives"
            )
        found = read_address_file(private / ADDRESS_FILE)
        # Loaded before a missing address is reported: if the private folder has vanished, the run has just ended.
        credentials = load_credentials(private, LAUNCHER, 0)
        if found is None:
            raise UsageError(f"{path}: the run in it is only just starting; try again")
        config = config_from_json(text)
    except UsageError:
        raise
    except PermissionError:
        raise UsageError(f"{path}: only who can read {private} may stop this run, or change who serves it") from None
    except ConfigError as error:
        raise UsageError(f"{path / CONFIG} is not that of this version of asyncrl: {error}") from None
    except (OSError, ValueError):
        if not (private / LOCK).exists():
            raise UsageError(f"{path}: the run in it has just ended") from None
        raise UsageError(f"{private} is not that of a run which can be called") from None
    folder = RunFolder(path=path, run_id=credentials.run_id, attempt=last)
    return LiveRun(folder=folder, config=config, address=found.address, credentials=credentials)


async def members_of(run: LiveRun, controller: ControllerClient) -> AsyncIterator[Members]:
    """Yield the members now and at each change until the run ends. Waits for a controller that is away."""
    seen = -1
    while True:
        try:
            members: Members = await controller.ask(WatchMembers(seen=seen), timeout=math.inf)
        except UsageError:
            if run.lives:
                raise
            return
        if members.number != seen:
            seen = members.number
            yield members
