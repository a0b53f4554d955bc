"""The code that plays episodes, found as the episode host finds it, in a worker of its own; nothing is played.

So the import of the user's module can cost that worker and nothing else. A command's program is looked for, and the
script that an interpreter is given.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from asyncrl.config import Config
from asyncrl.episodes.workers import Workers
from asyncrl.errors import ConfigError, DeadlineExceeded, EpisodeWorkersEnded
from asyncrl.preflight.findings import Finding, fail, listed, ok, warn
from asyncrl.runtime.workers.confinement import Confinement

IMPORT_S = 45.0
"""Longest time for importing the user's module; the episode host has more, so that this is no error."""
NOWHERE = "http://127.0.0.1:9/v1"
"""Address of an endpoint of which nothing is asked."""


async def check_episode(config: Config, *, import_s: float = IMPORT_S) -> Finding:
    """Whether the configured episode can be played."""
    episode = config.episode
    if importlib.util.find_spec("aiohttp") is None:
        fix = "pip install 'asyncrl[episodes]', on each host that plays episodes"
        return fail("episode", "the endpoint of episodes needs aiohttp, which is not installed", fix)
    key = f"episode.{episode.kind}"
    if episode.kind == "command":
        return check_command(episode.command)
    one = episode.model_copy(update={"workers": 1})
    confined = Confinement(config.security.user_environment)
    workers = Workers(one, model="", base_url=NOWHERE, confined=confined, start_timeout_s=import_s)
    code = ", ".join(episode.tools) or episode.function or episode.env
    try:
        await workers.start()
    except ConfigError as error:
        fix = f"correct {key} and episode.options; modules have to be installed or lie where you launch"
        return fail("episode", listed(error.problems), fix)
    except EpisodeWorkersEnded as error:
        return fail("episode", f"importing {code}: it {error.reason}", f"mend what {code} does when imported", key=key)
    except DeadlineExceeded:
        told = f"importing {code} takes more than {import_s:g} s"
        return warn("episode", told, "see what its module does when it is imported; each worker does it", key=key)
    finally:
        await workers.close()
    return ok("episode", f"{code} can be played", key=key)


def check_command(command: list[str]) -> Finding:
    """Whether the program and its script are there."""
    program = shutil.which(command[0])
    if program is None:
        there = "is no program that can be run" if os.path.exists(command[0]) else "is not there"
        fix = "install it where you launch, on each host with rollouters, or give its path"
        return fail("episode", f"{command[0]} {there}", fix, key="episode.command")
    script = next((word for word in command[1:2] if word.endswith((".py", ".sh", ".js"))), None)
    if script is not None and not Path(script).exists():
        fix = f"correct it: paths count from where you launch ({os.getcwd()})"
        return fail("episode", f"{script} is not there", fix, key="episode.command")
    return ok("episode", f"{program} is there", key="episode.command")
