"""Weights & Biases, offline or online: one W&B run for a run, across resumes.

The id is kept in RUN/monitor/wandb.json. Steps are a figure like the others and the axis of all, for a learner that
goes on from a checkpoint repeats some. The key is found by W&B itself, in the environment or the user's netrc.
Its service is a process of its own; when that has died, the library must be set up anew.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.config.monitor import WandbConfig
from asyncrl.files import replace_file
from asyncrl.sinks.figures import Entries, Line
from asyncrl.snapshot import Snapshot

ID_FILE = "monitor/wandb.json"
INIT_S = 60.0


class WandbSink:
    """The W&B run as a sink; the module tells its rules. ``config`` is the whole configuration, as JSON has it."""

    name: ClassVar[str] = "wandb"

    def __init__(self, run_dir: Path, wandb: WandbConfig, config: dict[str, Any]) -> None:
        self._run_dir, self._wandb, self._config = run_dir, wandb, config
        self._entries = Entries()
        self._run: Any = None
        self._made_id = secrets.token_hex(4)
        self.address = ""

    def open(self) -> None:
        """Begin the W&B run, or go on with it."""
        import wandb

        online = self._wandb.mode == "online"
        self._run = wandb.init(
            project=self._wandb.project,
            entity=self._wandb.entity,
            id=self._id(),
            name=self._run_dir.name,
            dir=str(self._run_dir),
            config=self._config,
            mode="online" if online else "offline",
            # Offline there is nothing to resume, and W&B warns of it.
            resume="allow" if online else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, init_timeout=INIT_S
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self.address = (self._run.url if online else self._run.dir) or ""

    def write(self, record: Line | Snapshot) -> None:
        """Log a line as one entry of the history; the latest snapshot goes along with the next line of a step."""
        if (entry := self._entries.take(record)) is not None:
            self._run.log({"step": entry.step, **entry.figures})

    def close(self) -> None:
        """Hand everything to the service and let it end."""
        if self._run is None:
            return
        import wandb

        run, self._run, self.address = self._run, None, ""
        try:
            run.finish()
        finally:
            # It raises when its service is dead, and has forgotten it then.
            with contextlib.suppress(Exception):
                wandb.teardown()

    def _id(self) -> str:
        path = self._run_dir / ID_FILE
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(path.read_text())["id"])
        # Where it cannot be kept, only a later attempt is another run to W&B.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, json.dumps({"id": self._made_id, "project": self._wandb.project}) + "\n")
        return self._made_id
