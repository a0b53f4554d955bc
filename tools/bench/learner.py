"""``python -m tools.bench learner``: tokens/s of a training step against a padded plain loop of torch, and TRL's.

The sides are processes of their own with the same model, batch, loss, optimizer and threads (learner_side.py and
trl_learner.py); their losses before the first step are equal, or the measurement is an error. Lengths are lognormal;
memory is the most that each process has held resident. Each is measured with all weights trained, and with adapters of
low rank on every linear layer of the decoder.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.core.errors import ActorFailed
from tools.bench import learner_batch
from tools.bench.environments import environment, without_python_settings
from tools.bench.paired import compare, measure_pairs
from tools.bench.report import Report, Target

TARGETS = {0.9: 1.5, 0.3: 1.0}
"""Sigma of the lengths, and the ratio that is wanted."""
TRL = ("trl==1.16.*", "torch==2.13.*", "transformers==5.17.*", "peft==0.19.*")
SAME_LOSS = 1e-3
"""Largest relative difference of the two losses that is rounding."""
ANSWER_S, CLOSE_S = 600.0, 20.0


class Side:
    """A process that trains."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self._name, self._process = name, process
        self.peak_bytes = 0

    async def step(self, sigma: float) -> dict[str, Any]:
        """One step. Raises ActorFailed when the process is gone, TimeoutError when it does not answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"sigma": sigma}).encode() + b"\n")
        async with asyncio.timeout(ANSWER_S):
            line = await self._process.stdout.readline()
        if not line:
            raise ActorFailed(self._name, "ended while it trained; its words are above")
        told: dict[str, Any] = json.loads(line)
        self.peak_bytes = told["peak_bytes"]
        return told


@asynccontextmanager
async def side(name: str, command: Sequence[str], variables: Mapping[str, str] | None = None) -> AsyncIterator[Side]:
    """A running process of ``name``, gone when the context ends."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=variables
    )
    try:
        yield Side(name, process)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(CLOSE_S):
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def measure(report: Report, *, pairs: int, threads: int, vs_trl: bool) -> None:
    """Fill the report. Raises ValueError when the sides do not train the same."""
    report.settings |= {
        "model": learner_batch.SETTINGS,
        "sequences": learner_batch.GROUPS * learner_batch.SAMPLES,
        "budget": learner_batch.BUDGET,
        "threads": threads,
    }
    trl = await asyncio.to_thread(environment, "trl", TRL) if vs_trl else None
    ours = [sys.executable, "-m", "tools.bench.learner_side"]
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model = Path(name) / "model"
        await asyncio.to_thread(learner_batch.make_model, model)
        for weights, (sigma, wanted) in itertools.product(("full", "lora"), TARGETS.items()):
            async with AsyncExitStack() as stack:
                sides = {
                    of: await stack.enter_async_context(side(of, [*ours, of, weights, str(model), str(threads)]))
                    for of in ("learner", "padded")
                }
                if trl is not None:
                    batch = Path(name)
                    arguments = learner_batch.write_padded(sigma, batch, model, threads, lora=weights == "lora")
                    command = [str(trl), "-I", str(Path(__file__).with_name("trl_learner.py")), *arguments]
                    sides["trl"] = await stack.enter_async_context(side("trl", command, without_python_settings()))
                await _compare(report, sides, weights, sigma, wanted, pairs)


async def _compare(
    report: Report, sides: dict[str, Side], weights: str, sigma: float, wanted: float, pairs: int
) -> None:
    losses = {name: (await each.step(sigma))["loss"] for name, each in sides.items()}
    if max(abs(loss - losses["padded"]) for loss in losses.values()) > SAME_LOSS * abs(losses["padded"]):
        raise ValueError(f"the sides do not train the same: losses {losses} at sigma {sigma}, {weights}")
    tokens = int((learner_batch.lengths(sigma) + learner_batch.PROMPT).sum())

    def rate(name: str) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            return float(tokens / (await sides[name].step(sigma))["seconds"])

        return once

    key = f"learner_{weights}_sigma_{sigma:g}"
    for name in sides:
        found = compare(await measure_pairs(rate("learner"), rate(name), pairs))
        if name == "learner":
            report.same(key, found)
        elif name == "padded":
            target = Target(">=", wanted)
            report.comparison(key, found, unit="tokens/s", sides=("learner", "padded loop"), target=target)
        else:
            report.comparison(f"{key}_vs_trl", found, unit="tokens/s", sides=("learner", "TRL"))
    report.figures[f"{key}_peak_bytes"] = {name: each.peak_bytes for name, each in sides.items()}
    memory = ", ".join(f"{name} {each.peak_bytes / 1e6:,.0f} MB" for name, each in sides.items())
    report.say(f"{'':24} memory at most: {memory}")
