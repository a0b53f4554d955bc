"""The episode host at work, real processes and sockets, for a rollouter whose answers are written down."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import harness
import psutil
import structlog
from harness import Net, actor_context
from run_settings import simulated_run

from asyncrl.config import Config
from asyncrl.episodes.actor import EpisodesActor
from asyncrl.messages import Done
from asyncrl.messages.actors import Register, Resolve, Resolved, RunState, WatchRun
from asyncrl.messages.episodes import (
    Chat,
    ChatDelta,
    ChatReply,
    EpisodeBegan,
    EpisodeDone,
    RunEpisode,
    ToolCall,
    TurnReward,
    TurnRewarded,
)
from asyncrl.messages.hosts import Members, WatchMembers
from asyncrl.rpc.actor import ActorContext, Caller, handler
from asyncrl.rpc.calls.call import CallFuture
from asyncrl.rpc.calls.peer import Peer
from tools.live_run import lives, title

DEADLINE_S = 60.0
until = partial(harness.until, within_s=DEADLINE_S)


class Rollouter:
    """Answers each call with the next of ``answers`` (the last for ever): text, tool calls, an error, or a callable."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers) or ["yes"]
        self.chats: list[Chat] = []
        self.rewards: list[tuple[str, int | None, float]] = []
        self.order: list[str] = []
        self.began: list[str] = []
        self.cancelled = 0
        self.host: Any = None
        self.refusal: Exception | None = None
        """The answer to rewards of turns."""

    @handler
    async def chat(self, request: Chat, caller: Caller) -> ChatReply:
        self.order.append("chat")
        answer = self.answers[min(len(self.chats), len(self.answers) - 1)]
        self.chats.append(request)
        if callable(answer):
            try:
                answer = await answer(self, request)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if isinstance(answer, Exception):
            raise answer
        node = len(self.chats) - 1
        asked = [] if isinstance(answer, str) else answer
        calls = [ToolCall(id=f"call_{node}_{k}", name=name, arguments=said) for k, (name, said) in enumerate(asked)]
        return ChatReply(
            node=node,
            content="" if calls else answer,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop",
            prompt_tokens=3,
            completion_tokens=2,
        )

    @handler
    async def turn_reward(self, request: TurnReward, caller: Caller) -> TurnRewarded:
        if self.refusal is not None:
            raise self.refusal
        self.order.append("reward")
        self.rewards.append((request.session, request.node, request.value))
        return TurnRewarded(node=request.node or 0)

    @handler
    def episode_began(self, request: EpisodeBegan, caller: Caller) -> None:
        self.began.append(request.session)

    def delta(self, request: Chat, offset: int, text: str) -> None:
        self.host.cast(ChatDelta(session=request.session, call=request.call, offset=offset, text=text))


async def waits(rollouter: Rollouter, request: Chat) -> str:
    """An answer that never comes."""
    await asyncio.Event().wait()
    return ""


class Controller:
    """The controller of an endless run that knows the addresses of its actors."""

    def __init__(self, net: Net) -> None:
        self.net = net

    @handler
    def register(self, request: Register, caller: Caller) -> Done:
        if request.record.address:
            self.net.register(request.record)
        return Done()

    @handler
    async def resolve(self, request: Resolve, caller: Caller) -> Resolved:
        records = self.net.records
        await until(lambda: request.name in records and records[request.name].incarnation > request.above)
        return Resolved(record=records[request.name])

    @handler
    def watch_members(self, request: WatchMembers, caller: Caller) -> Members:
        return Members(number=0)

    @handler
    async def watch_run(self, request: WatchRun, caller: Caller) -> RunState:
        if request.seen >= 0:
            await asyncio.Event().wait()
        return RunState(number=0, phase="running")


class Host(EpisodesActor):
    """The actor, whose notices and log are kept for the test."""

    def __init__(self, context: ActorContext) -> None:
        super().__init__(context)
        self.reported: dict[str, tuple[int, str]] = {}
        """Count and text of each notice since they were last looked at."""
        self.outputs: list[tuple[str, str, int]] = []
        self.url = ""
        self._said = self.log
        self.log = structlog.wrap_logger(
            None, processors=[self._write], wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET)
        )

    def notify(self, key: str, text: str, *, count: int = 1, **more: str) -> None:
        self.reported[key] = (count, text)
        super().notify(key, text, count=count, **more)

    def _write(self, _logger: Any, method: str, line: Any) -> Any:
        if line["event"] == "printed":
            self.outputs.append((line["uid"], line["text"], line["dropped_bytes"]))
        self.url = line.get("endpoint", self.url)
        getattr(self._said, method)(**line)
        raise structlog.DropEvent


def config_with(*, supervision: Any = None, **episode: Any) -> Config:
    return simulated_run(supervision=supervision or {}, episode={"workers": 2, **episode})


class Hosted:
    """The actor, and the rollouter that it plays for."""

    def __init__(self, actor: Host, rollouter: Rollouter, peer: Peer, net: Net) -> None:
        self.actor, self.rollouter, self.peer, self.net = actor, rollouter, peer, net

    def run(self, prompt: str = "p", *, timeout: float = DEADLINE_S, **changes: Any) -> CallFuture:
        fields: dict[str, Any] = {
            "session": secrets.token_hex(16),
            "uid": "0-1",
            "sample": 0,
            "attempt": 0,
            "purpose": "train",
            "prompt": prompt,
            "messages": [{"role": "user", "content": prompt}],
            "row": {"answer": "1"},
            "seed": 7,
        }
        return self.peer.call(RunEpisode(**{**fields, **changes}), timeout=timeout)

    async def play(self, prompt: str = "p", **changes: Any) -> EpisodeDone:
        done: EpisodeDone = await self.run(prompt, **changes)
        return done

    @property
    def base_url(self) -> str:
        """The endpoint's, for OpenAI's clients."""
        return f"{self.actor.url}/v1"

    def figure(self, name: str) -> float:
        return self.actor.metrics()[f"episodes/{name}"]

    def watch_output(self) -> list[tuple[str, str, int]]:
        """Output in the log from now on: uid, text, bytes dropped."""
        self.actor.outputs = []
        return self.actor.outputs

    def notices(self) -> dict[str, tuple[int, str]]:
        reported, self.actor.reported = self.actor.reported, {}
        return reported


def below() -> list[psutil.Process]:
    """Living descendants of this process."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if lives(process) and "resource_tracker" not in title(process)]


def worker_pids() -> list[int]:
    return [process.pid for process in below() if "asyncrl episodes worker" in title(process)]


def listening() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


@asynccontextmanager
async def hosting(
    config: Config, run_dir: Path, rollouter: Rollouter | None = None, *, name: str = "episodes/0"
) -> AsyncIterator[Hosted]:
    """Afterwards neither a process nor a port nor a file is left."""
    rollouter = rollouter or Rollouter()
    before, ports = {process.pid for process in below()}, listening()
    files = set(os.listdir("."))
    async with Net() as net, asyncio.TaskGroup() as tasks:
        net.serve(Controller(net), "controller/0")
        actor = Host(actor_context(config, name, run_dir, controller=net.records["controller/0"].address))
        life = tasks.create_task(actor.main())
        await until(lambda: actor.ready or life.done())
        net.serve(rollouter, "rollouter/0")
        peer = rollouter.host = net.client(name, "rollouter/0")
        yield Hosted(actor, rollouter, peer, net)
        actor.begin_drain()
    assert [process for process in below() if process.pid not in before] == []
    assert listening() <= ports
    assert set(os.listdir(".")) - files <= {"__pycache__"}
