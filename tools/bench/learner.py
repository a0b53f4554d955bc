"""``python -m tools.bench learner``: tokens/s of a training step against a padded plain loop of torch.

Both sides are processes of their own with the same model, batch, loss, optimizer and threads (learner_side.py); their
losses before the first step are equal, or the measurement is an error. Lengths are lognormal; memory is the most that
each process has held resident.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from asyncrl.errors import ActorFailed
from tools.bench import learner_batch
from tools.bench.paired import compare, measure_pairs
from tools.bench.report import Report, Target

TARGETS = {0.9: 1.5, 0.3: 1.0}
"""Sigma of the lengths, and the ratio that is wanted."""
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
async def side(name: str, model: Path, threads: int) -> AsyncIterator[Side]:
    """A running process of ``name``, gone when the context ends."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.bench.learner_side", name, str(model), str(threads)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
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


async def measure(report: Report, *, pairs: int, threads: int) -> None:
    """Fill the report. Raises ValueError when the two sides do not train the same."""
    report.settings |= {
        "model": learner_batch.SETTINGS,
        "sequences": learner_batch.GROUPS * learner_batch.SAMPLES,
        "budget": learner_batch.BUDGET,
        "threads": threads,
    }
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model = Path(name) / "model"
        await asyncio.to_thread(learner_batch.make_model, model)
        for sigma, wanted in TARGETS.items():
            tokens = int((learner_batch.lengths(sigma) + learner_batch.PROMPT).sum())
            async with side("learner", model, threads) as ours, side("padded", model, threads) as plain:
                losses = [(await each.step(sigma))["loss"] for each in (ours, plain)]
                if abs(losses[0] - losses[1]) > SAME_LOSS * abs(losses[1]):
                    raise ValueError(f"the sides do not train the same: losses {losses} at sigma {sigma}")

                def rate(of: Side, sigma: float = sigma, tokens: int = tokens) -> Any:
                    async def once() -> float:
                        return float(tokens / (await of.step(sigma))["seconds"])

                    return once

                found = compare(await measure_pairs(rate(ours), rate(plain), pairs))
                key = f"learner_sigma_{sigma:g}"
                sides = ("learner", "padded loop")
                report.comparison(key, found, unit="tokens/s", sides=sides, target=Target(">=", wanted))
                report.figures[f"{key}_peak_bytes"] = {"learner": ours.peak_bytes, "padded loop": plain.peak_bytes}
                memory = f"{ours.peak_bytes / 1e6:,.0f} MB against {plain.peak_bytes / 1e6:,.0f} MB"
                report.say(f"{'':24} at most {memory}")
                found = compare(await measure_pairs(rate(ours), rate(ours), max(2, pairs // 2)))
                report.same(key, found)
