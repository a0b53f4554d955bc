"""Find a reward function as a worker of the pool does: ``python -m asyncrl.doctor.rewarding``.

The section ``reward`` comes as JSON on standard input; a JSON list of problems goes to standard output, whatever the
function's module prints meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from asyncrl.config.training import RewardConfig
from asyncrl.reward.frames import Setup
from asyncrl.reward.resolve import NotCallable, resolve


def main() -> int:
    """Always 0, unless the module ends the process."""
    reward = RewardConfig.model_validate(msgspec.json.decode(sys.stdin.buffer.read()))
    answers = os.dup(1)
    os.dup2(2, 1)
    problems: list[str] = []
    with asyncio.Runner() as runner:
        try:
            resolve(Setup(reward.function, reward.per, reward.options, reward.max_memory_bytes), runner)
        except NotCallable as error:
            problems = error.problems
    os.write(answers, msgspec.json.encode(problems))
    sys.stderr.flush()
    # Threads of the module's own must not keep it.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
