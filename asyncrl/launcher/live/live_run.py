"""Connects a command to a live run: finds the run folder, loads the keys and calls the controller.

Users who can read the private folder on the head's machine may call the controller as ``launcher/0``, several commands
at once. Every call has a deadline. Fails with UsageError if there is no such run, it has ended, or this user cannot
read its private folder. If the controller refuses a request, the error has its reason.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.config.load import config_from_json
from asyncrl.core.errors import ConfigError, DeadlineExceeded, ProtocolError, Refused, RemoteError, UsageError
from asyncrl.launcher.run_folder.folders import RunFolder, last_attempt
from asyncrl.launcher.run_folder.private import CONFIG, LOCK, is_live
from asyncrl.messages import Request
from asyncrl.messages.hosts import Members, WatchMembers
from asyncrl.rpc.calls.server import CROWDED
from asyncrl.rpc.controller_client import ADDRESS_FILE, ControllerClient, read_address_file
from asyncrl.rpc.wire.keys import LAUNCHER, Credentials, load_credentials

INCARNATION = 1
"""Incarnation of every command that calls as the launcher. With different ones only the newest could call."""
LOOK_S = 10.0
"""Seconds of waiting for an answer after which a command looks whether the run still lives, and calls again.

A request that is not idempotent is not repeated; the command looks at its deadline."""
AGAIN_S = 0.5
"""Seconds before a call is repeated."""


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


class LiveController(ControllerClient):
    """The connection of a command to the controller of a live run."""

    def __init__(self, run: LiveRun) -> None:
        network = run.config.network
        super().__init__(
            run.address,
            run.credentials,
            LAUNCHER,
            INCARNATION,
            call_timeout_s=network.call_timeout_s,
            max_message_bytes=network.max_message_bytes,
        )
        self._run = run

    async def ask(self, request: Request, timeout: float | None = None) -> Any:
        """Send a request and return its reply; repeats a request that was refused only for now.

        ``timeout`` (s), by default network.call_timeout_s, covers all repeats. Raises UsageError if the controller
        refuses the request, too many commands are connected or the run has ended. Raises DeadlineExceeded with the
        whole time if a live run does not answer.
        """
        loop, path = asyncio.get_running_loop(), self._run.folder.path
        began, look_s = loop.time(), LOOK_S if request.idempotent else math.inf
        until = began + (self._run.config.network.call_timeout_s if timeout is None else timeout)
        while True:
            try:
                return await self.peer.call(request, timeout=min(until - loop.time(), look_s))
            except RemoteError as error:
                if not error.retryable or loop.time() + AGAIN_S >= until:
                    raise UsageError(error.message) from None
                await asyncio.sleep(AGAIN_S)
            except ProtocolError as error:
                raise UsageError(str(error)) from None
            except Refused as error:
                if error.code != CROWDED:
                    raise
                raise UsageError(
                    f"{path}: the run serves {error.theirs}, and as many commands speak to it already: end one of "
                    "them, or wait until one has ended"
                ) from None
            except DeadlineExceeded as error:
                if not self._run.lives:
                    raise UsageError(f"{path}: the run in it has ended") from None
                if loop.time() >= until:
                    waited_s = loop.time() - began
                    raise DeadlineExceeded(error.who, error.peer, error.what, waited_s, error.hint) from None

    async def members(self) -> AsyncIterator[Members]:
        """Yield the members now and at each change until the run ends. Waits for a controller that is away."""
        seen = -1
        while True:
            try:
                members: Members = await self.ask(WatchMembers(seen=seen), timeout=math.inf)
            except UsageError:
                if self._run.lives:
                    raise
                return
            if members.number != seen:
                seen = members.number
                yield members
