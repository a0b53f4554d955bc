"""The command ``--dry-run --generate N``: a process makes the samples under a deadline, and the command prints them.

Invariant: when ``print_generated`` returns, the process and its descendants have ended and their temporary files are
gone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import msgspec

from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.core.errors import ConfigError
from asyncrl.core.printable import say
from asyncrl.launcher.checks.process import ask_process
from asyncrl.launcher.doctor.generate.generator import Answer, Order
from asyncrl.observe.sample_text import sample_page

MODULE = "asyncrl.launcher.doctor.generate.generator"
SAMPLE_S = 120.0
"""Longest time of a response (s); the configuration bounds rewards and episodes."""


def print_generated(config: Config, count: int) -> None:
    """Print the samples. Raises ConfigError after them if one could not be made."""
    limit_s = longest_s(config, count)
    say(f"sampling {count} prompts with the engine {config.rollout.engine} (at most {limit_s:g} s)", sys.stderr)
    order = msgspec.msgpack.encode(Order(config_to_json(config), count))
    try:
        # The folder removes temporary files of a process that is killed.
        with tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True) as folder:
            data, ended = asyncio.run(ask_process(MODULE, (), order, limit_s, env={"TMPDIR": folder}))
        answer = msgspec.msgpack.decode(data, type=Answer)
    except TimeoutError:
        engine = config.rollout.engine
        raise ConfigError(
            [f"--generate: the engine {engine} did not answer {count} prompts within {limit_s:g} s"], found=True
        ) from None
    except msgspec.DecodeError:
        # The kernel kills it if the model does not fit into memory.
        raise ConfigError([f"--generate: the process that samples ended: {ended}"], found=True) from None
    for line in ["", *sample_page(answer.groups)] if answer.groups else []:
        say(line, sys.stdout)
    if answer.printed:
        say("last output of the engine, the agent and the reward:", sys.stderr)
        say(answer.printed.removesuffix("\n"), sys.stderr)
    if answer.problems:
        raise ConfigError([f"--generate: {problem}" for problem in answer.problems], found=True)


def longest_s(config: Config, count: int) -> float:
    """Longest time of the start, the load and so many prompts (s)."""
    episode = config.episode
    each_s = SAMPLE_S + config.reward.timeout_s
    if episode.kind != "single":
        each_s += episode.start_timeout_s + episode.timeout_s + episode.close_timeout_s
    return config.supervision.start_timeout_s + config.weights.deadline_s + count * each_s
