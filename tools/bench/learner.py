"""``python -m tools.bench learner``: tokens/s of a training step against a padded plain loop of torch, and TRL's.

The sides are processes of their own with the same model, batch, loss, optimizer and threads (learner_side.py and
trl_side.py); their losses before the first step are equal, or the measurement is an error. Lengths are lognormal;
memory is the most that each process has held resident. Each is measured with all weights trained, and with adapters of
low rank on every linear layer of the decoder.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from tools.bench import learner_batch
from tools.bench.processes import Worker, environment, without_python_settings, worker
from tools.bench.report import Report, Target

TARGETS = {0.9: 1.5, 0.3: 1.0}
"""Sigma of the lengths, and the ratio that is wanted."""
TRL = ("trl==1.16.*", "torch==2.13.*", "transformers==5.17.*", "peft==0.19.*")
SAME_LOSS = 1e-3
"""Largest relative difference of the two losses that is rounding."""


async def measure(report: Report, *, pairs: int = 10, vs: Literal["trl"] | None = None) -> None:
    """``vs``: also measure against TRL's GRPO. Raises ValueError when the sides do not train the same."""
    report.settings |= {
        "model": learner_batch.SETTINGS,
        "sequences": learner_batch.GROUPS * learner_batch.SAMPLES,
        "budget": learner_batch.BUDGET,
        "threads": learner_batch.THREADS,
    }
    trl = await asyncio.to_thread(environment, "trl", TRL) if vs else None
    ours = [sys.executable, "-m", "tools.bench.learner_side"]
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as name:
        model = Path(name) / "model"
        await asyncio.to_thread(learner_batch.make_model, model)
        for weights, (sigma, wanted) in itertools.product(("full", "lora"), TARGETS.items()):
            async with AsyncExitStack() as stack:
                sides = {
                    of: await stack.enter_async_context(worker(of, [*ours, of, weights, str(model)]))
                    for of in ("learner", "padded")
                }
                if trl is not None:
                    batch = Path(name)
                    arguments = learner_batch.write_padded(sigma, batch, model, lora=weights == "lora")
                    command = [str(trl), "-I", str(Path(__file__).with_name("trl_side.py")), *arguments]
                    sides["trl"] = await stack.enter_async_context(worker("trl", command, without_python_settings()))
                await _compare(report, sides, weights, sigma, wanted, pairs)


async def _compare(
    report: Report, sides: dict[str, Worker], weights: str, sigma: float, wanted: float, pairs: int
) -> None:
    losses = {name: (await each.ask(sigma=sigma))["loss"] for name, each in sides.items()}
    if max(abs(loss - losses["padded"]) for loss in losses.values()) > SAME_LOSS * abs(losses["padded"]):
        raise ValueError(f"the sides do not train the same: losses {losses} at sigma {sigma}, {weights}")
    tokens = int((learner_batch.lengths(sigma) + learner_batch.PROMPT).sum())
    peaks: dict[str, int] = {}

    def rate(name: str) -> Callable[[], Awaitable[float]]:
        async def once() -> float:
            answer = await sides[name].ask(sigma=sigma)
            peaks[name] = answer["peak_bytes"]
            return float(tokens / answer["seconds"])

        return once

    key = f"learner_{weights}_sigma_{sigma:g}"
    rates = {"learner": rate("learner"), "padded loop": rate("padded")}
    await report.measure(key, rates, pairs, unit="tokens/s", target=Target(">=", wanted))
    if "trl" in sides:
        rates = {"learner": rate("learner"), "TRL": rate("trl")}
        await report.measure(f"{key}_vs_trl", rates, pairs, unit="tokens/s", control=False)
    report.figures[f"{key}_peak_bytes"] = peaks
    memory = ", ".join(f"{name} {peak / 1e6:,.0f} MB" for name, peak in peaks.items())
    report.say(f"{'':24} memory at most: {memory}")
