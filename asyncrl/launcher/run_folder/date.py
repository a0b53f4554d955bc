"""The date that chat templates of a run are told: fixed at its first start, so that prompts are the same ever after."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.launcher.run_folder.begun import CONFIG, read_tree


def with_date(config: Config, resumed: Path | None) -> Config:
    """The configuration with chat.date: the user's, else that of the run folder that is resumed, else today's."""
    if config.chat.date is not None:
        return config
    date = None
    if resumed is not None:
        # Runs of earlier releases have none.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            date = read_tree(resumed / CONFIG)["chat"]["date"]
    tree = config.model_dump(mode="json")
    tree["chat"]["date"] = date or datetime.date.today().isoformat()
    return validate_config(tree)
