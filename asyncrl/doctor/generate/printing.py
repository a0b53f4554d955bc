"""The command behind ``--dry-run --generate N``: a process makes the samples, under a deadline, and they are printed.

Invariant: the process and its descendants have ended when ``print_generated`` returns, and their temporary files are
gone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile

import msgspec

from asyncrl.checks.process import ask_process
from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.doctor.generate.generator import Answer, Order
from asyncrl.errors import ConfigError
from asyncrl.telemetry.sample_text import sample_page
from asyncrl.text.printable import say

MODULE = "asyncrl.doctor.generate.generator"
SAMPLE_S = 120.0
"""Time for a response (s); the configuration bounds rewards and episodes."""


def print_generated(config: Config, count: int) -> None:
    """Print the samples. Raises ConfigError where one of them could not be made, after the others."""
    limit_s = longest_s(config, count)
    say(f"sampling {count} prompts with the engine {config.rollout.engine}, within {limit_s:g} s", sys.stderr)
    order = msgspec.msgpack.encode(Order(config_to_json(config), count))
    try:
        # A process that is killed leaves its temporary files.
        with tempfile.TemporaryDirectory(prefix="asyncrl-", ignore_cleanup_errors=True) as folder:
            data, ended = asyncio.run(ask_process(MODULE, (), order, limit_s, env={"TMPDIR": folder}))
        answer = msgspec.msgpack.decode(data, type=Answer)
    except TimeoutError:
        engine = config.rollout.engine
        raise ConfigError(
            [f"--generate: {count} prompts were not answered within {limit_s:g} s by the engine {engine}"], found=True
        ) from None
    except msgspec.DecodeError:
        # It is killed where the model does not fit into memory.
        raise ConfigError([f"--generate: the process that samples ended: {ended}"], found=True) from None
    for line in ["", *sample_page(answer.groups)] if answer.groups else []:
        say(line, sys.stdout)
    if answer.printed:
        say("the last lines that the engine, the agent and the reward printed:", sys.stderr)
        say(answer.printed.removesuffix("\n"), sys.stderr)
    if answer.problems:
        raise ConfigError([f"--generate: {problem}" for problem in answer.problems], found=True)


def longest_s(config: Config, count: int) -> float:
    """Seconds for the start, the load and so many prompts."""
    episode = config.episode
    each_s = SAMPLE_S + config.reward.timeout_s
    if episode.kind != "single":
        each_s += episode.start_timeout_s + episode.timeout_s + episode.close_timeout_s
    return config.supervision.start_timeout_s + config.weights.deadline_s + count * each_s
