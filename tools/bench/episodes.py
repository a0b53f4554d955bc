"""``python -m tools.bench episodes``: the cost of a call from an episode, and the step time without barriers.

Calls are compared with the engine alone. The rollouter and the stubs of its peers are in this process, the episode host
and its worker in processes of their own, as they are in a run; all use TCP. The agent (episode_agent.py) measures a
call from its side: through its client, or over HTTP. The other side has the same engine generate the same tokens for
the same context. The engine is a timing model, so both sides sample for the same time; the chat template is jinja's,
the tokenizer a real one.

Steps are those of whole simulated runs: an asynchronous run is compared with ``staleness.max = 0``, where all episodes
of a step end before it is trained. The time of tools is lognormal with sigma 1.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.launcher.run_folder.folders import create_run_folder, private_folder
from asyncrl.learner.backends.sim import SimTrainer
from asyncrl.observe.logging import configure_logging
from asyncrl.rollouter.actor import Rollouter
from asyncrl.rollouter.engines.base import GenerationRequest
from asyncrl.rpc.actor import ActorContext
from asyncrl.rpc.process import SWITCH_S
from asyncrl.rpc.wire.keys import load_credentials
from asyncrl.text.tokenizer import tokenizer_of
from tools.bench.counterparts import Exchange, make_lease, serving_rollouter
from tools.bench.paired import Side, median_interval, ratio_of_means
from tools.bench.processes import actor_context, lines_of_run
from tools.bench.report import Report, Target
from tools.bench.scale import Processes
from tools.learn.chat_model import make_tokenizer
from tools.live_run import simulated

ANSWER_TOKENS = 40
STEP_S = 0.005
READY_S = 60.0
OVERHEAD_MS = 5.0
"""Target for the cost of a call without the engine, median."""
SAMPLES = 8
RUN_S = 1800.0
TURNS, TOOL_S, TOOL_SIGMA = 4.0, 1.0, 1.0
STALENESS_MAX = 4
ASYNC_SHARE = 5
"""Asynchronous steps for each synchronous one."""
FILL_STEPS = STALENESS_MAX + 1
FASTER = 3.0


def config(folder: Path, socket: Path) -> Config:
    """Each answer takes a fifth of a second."""
    episode = {
        "function": "tools.bench.episode_agent:play",
        "options": {"socket": str(socket)},
        "workers": 1,
        "max_turns": 1 << 20,
        "max_context_tokens": 1 << 14,
        "turn_timeout_s": 3600.0,
        "start_timeout_s": 3600.0,
        "timeout_s": 36000.0,
    }
    sim = {
        "length": "constant",
        "length_median": ANSWER_TOKENS,
        "decode_step_s": STEP_S,
        # A context that is in the prefix cache already would favour the side that comes second.
        "prefill_tokens_per_s": 1e12,
    }
    return validate_config(
        simulated(
            {
                "run": {"name": "calls", "dir": str(folder)},
                "model.path": str(folder / "tokenizer"),
                "data": {"source": "synthetic", "max_prompt_tokens": 64, "template": "chat"},
                "episode": episode,
                "rollout.samples_per_prompt": 2,
                "rollout.max_tokens": ANSWER_TOKENS,
                "rollout.sim": sim,
                "learner.sim.publish_bytes": 4096,
                # No heartbeats in this process.
                "supervision.silence_s": 1e6,
            }
        )
    )


class Agent:
    """The agent's end of the socket, and the engine behind it."""

    def __init__(self) -> None:
        self._streams: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._generate: Any = None
        self._requests: list[GenerationRequest] = []
        self._direct = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._streams.put_nowait((reader, writer))

    async def close(self) -> None:
        """Hang up, which ends the episodes."""
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()

    async def begin(self, rollouter: Rollouter) -> None:
        """Take the first episode, and look at what is asked of the engine."""
        async with asyncio.timeout(READY_S):
            self._reader, self._writer = await self._streams.get()
        engine: Any = rollouter._manager._engine
        generate = self._generate = engine.generate

        def watched(request: GenerationRequest) -> Any:
            self._requests.append(request)
            return generate(request)

        engine.generate = watched

    async def call(self, way: str) -> float:
        """Seconds of a call by the ``client`` or by ``http``, as the agent measures them."""
        self._writer.write(f"{way}\n".encode())
        async with asyncio.timeout(READY_S):
            return float(await self._reader.readline())

    async def direct(self) -> float:
        """Seconds in which the engine gives the same answer to the same context as to the newest call."""
        if not self._requests:
            await self.call("client")
        self._direct += 1
        request = replace(self._requests[-1], id=f"direct/{self._direct}")
        tokens: list[int] = []
        began = time.perf_counter()
        async with aclosing(self._generate(request)) as deltas:
            async for delta in deltas:
                tokens += delta.tokens
        seconds = time.perf_counter() - began
        assert len(tokens) == ANSWER_TOKENS
        return seconds


def measure(report: Report, *, pairs: int = 30, steps: int = 8) -> None:
    """``steps``: synchronous ones; ASYNC_SHARE times as many are measured without barriers."""
    uvloop.run(measure_calls(report, pairs=pairs))
    measure_steps(report, steps=steps)


async def measure_calls(report: Report, *, pairs: int) -> None:
    report.settings |= {"answer_tokens": ANSWER_TOKENS, "decode_step_s": STEP_S, "pairs": pairs}
    configure_logging("warning")
    # As in an actor's process: rendering is done in threads.
    sys.setswitchinterval(SWITCH_S)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as folder:
        async with living(Path(folder)) as agent:
            for way in ("client", "http"):
                name = f"call_by_{way}"
                sides: dict[str, Side] = {way: partial(agent.call, way), "engine alone": agent.direct}
                found = await report.measure(name, sides, pairs, unit="s")
                over = median_interval([1e3 * (call - engine) for call, engine in found])
                report.figures[name]["overhead_ms"] = asdict(over)
                report.ratio(f"{name}_overhead_ms", over.median, Target("<=", OVERHEAD_MS))


@asynccontextmanager
async def living(folder: Path) -> AsyncIterator[Agent]:
    """The agent of an episode that is played."""
    agent, socket = Agent(), folder / "agent"
    # One token a character, with a chat template.
    await asyncio.to_thread(lambda: make_tokenizer().save_pretrained(folder / "tokenizer"))
    chosen = config(folder, socket)
    listener = await asyncio.start_unix_server(agent.connected, socket)
    run = create_run_folder(chosen)
    with private_folder(run, chosen):

        def context(name: str, controller: str | None) -> ActorContext:
            credentials = load_credentials(run.private, name, 0)
            return actor_context(chosen, name, run.path, credentials, controller=controller)

        trainer = SimTrainer(chosen, 0)
        with trainer.publish(0).result() as publication:
            exchange, processes = Exchange(publication.manifest), Processes(run)
            try:
                async with serving_rollouter(
                    context, exchange, READY_S, lambda controller: processes.actor("episodes/0", controller)
                ) as rollouter:
                    tokenizer = tokenizer_of(chosen)
                    text = tokenizer.render_chat([{"role": "user", "content": "Find it out."}])
                    exchange.leases = [make_lease(chosen, 0, text, tokenizer.encode(text))]
                    exchange.parked.wake()
                    await agent.begin(rollouter)
                    yield agent
                    await agent.close()
            finally:
                await asyncio.to_thread(processes.close, 0.0)
                listener.close()


def tree(staleness: int, steps: int) -> dict[str, Any]:
    return simulated(
        {
            "data": {"source": "synthetic", "size": 1 << 16, "template": "chat", "max_prompt_tokens": 64},
            "episode": {
                "function": "asyncrl.episodes.rehearsal:play",
                "options": {"turns": TURNS, "tool_s": TOOL_S, "tool_sigma": TOOL_SIGMA},
                "workers": 2,
                "max_context_tokens": 8192,
                "turn_timeout_s": 600.0,
                "timeout_s": 3600.0,
            },
            "rollout.replicas": 1,
            "rollout.samples_per_prompt": SAMPLES,
            "rollout.episodes": 256,
            "rollout.concurrency": 64,
            "rollout.max_tokens": 128,
            "rollout.stream_interval": 32,
            "rollout.sim.decode_step_s": 0.015,
            "rollout.sim.decode_step_per_request_s": 0.0001,
            "rollout.sim.length_median": 32.0,
            "rollout.sim.length_sigma": 0.5,
            "learner.steps": steps,
            "learner.groups_per_step": 4,
            "learner.sim": {"step_s": 1.0, "publish_bytes": 1 << 20},
            "staleness": {"max": staleness, "adapt": False},
            "checkpoint.every_versions": 0,
        }
    )


def measure_steps(report: Report, *, steps: int) -> None:
    report.settings["async"] = {"staleness_max": STALENESS_MAX, **tree(0, 1)["episode"]["options"]}
    times = {}
    for name, staleness, unmeasured, count in (
        ("synchronous", 0, 1, steps),
        ("asynchronous", STALENESS_MAX, FILL_STEPS, ASYNC_SHARE * steps),
    ):
        lines = lines_of_run(tree(staleness, unmeasured + count), RUN_S)["train"]
        times[name] = [line["time/step_s"] for line in lines[unmeasured:]]
        mean, middle = float(np.mean(times[name])), float(np.median(times[name]))
        report.figures[name] = {"steps": len(times[name]), "step_s": {"mean": mean, "median": middle}}
        report.say(f"{name:13} {len(times[name])} steps, mean {mean:.2f} s, median {middle:.2f} s")
    found = ratio_of_means(times["synchronous"], times["asynchronous"])
    report.figures["synchronous_vs_asynchronous"] = asdict(found)
    report.say(f"asynchronous episodes    {found.median:.2f} times as fast [{found.low:.2f}, {found.high:.2f}]")
    report.ratio("synchronous_vs_asynchronous", found.median, Target(">=", FASTER))
