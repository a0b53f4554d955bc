"""Weights & Biases, offline or online: one W&B run for a run and all of its resumes.

RUN/monitor/wandb.json holds the id. ``step`` is a metric and the axis of all others, because a learner that resumes
from a checkpoint repeats steps. W&B finds its key in the environment or the user's netrc. Its service is a process of
its own; if it dies, the library must be initialised again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import Any, ClassVar

from asyncrl.config.monitor import WandbConfig
from asyncrl.core.files import replace_file
from asyncrl.messages.snapshot import Snapshot
from asyncrl.observe.sinks.entries import Entries, Line

ID_FILE = "monitor/wandb.json"
INIT_S = 60.0


class WandbSink:
    """The W&B run as a sink; see the module. ``config`` is the whole configuration as a JSON object."""

    name: ClassVar[str] = "wandb"

    def __init__(self, run_dir: Path, wandb: WandbConfig, config: dict[str, Any]) -> None:
        self._run_dir, self._wandb, self._config = run_dir, wandb, config
        self._entries = Entries()
        self._run: Any = None
        self._made_id = secrets.token_hex(4)
        self.address = ""

    def open(self) -> None:
        """Create the W&B run, or resume it."""
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
            # W&B warns if an offline run shall resume.
            resume="allow" if online else None,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True, init_timeout=INIT_S
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self.address = (self._run.url if online else self._run.dir) or ""

    def write(self, record: Line | Snapshot) -> None:
        """Log a line as one entry, with the newest snapshot on the line of a step."""
        if (entry := self._entries.take(record)) is not None:
            self._run.log({"step": entry.step, **entry.values})

    def close(self) -> None:
        """Hand everything to the service and end it."""
        if self._run is None:
            return
        import wandb

        run, self._run, self.address = self._run, None, ""
        try:
            run.finish()
        finally:
            # It raises if its service is dead, and resets its state all the same.
            with contextlib.suppress(Exception):
                wandb.teardown()

    def _id(self) -> str:
        path = self._run_dir / ID_FILE
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(path.read_text())["id"])
        # If the file cannot be written, a later attempt becomes another W&B run.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            replace_file(path, json.dumps({"id": self._made_id, "project": self._wandb.project}) + "\n")
        return self._made_id
