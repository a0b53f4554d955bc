"""The episode host at work, real processes and sockets, for a rollouter whose answers are written down."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from harness import RUN_ID, SECRET, Net

from asyncrl.config import Config
from asyncrl.config.load import validate_config
from asyncrl.episodes.actor import EpisodesActor
from asyncrl.episodes.workers import Workers
from asyncrl.messages.actors import ActorRecord
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
from asyncrl.runtime.actor import ActorContext, Caller, handler
from asyncrl.runtime.calls.call import CallFuture
from asyncrl.runtime.calls.peer import Peer
from asyncrl.wire.keys import Credentials
from asyncrl.wire.zeromq import ZmqTransport

DEADLINE_S = 60.0


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


def config_with(**episode: Any) -> Config:
    simulated = {"data": {"source": "synthetic"}, "rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}
    return validate_config({**simulated, "episode": {"workers": 2, **episode}})


class Hosted:
    """The actor, and the rollouter that it plays for."""

    def __init__(self, actor: EpisodesActor, rollouter: Rollouter, peer: Peer, net: Net) -> None:
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
        return str(self.actor._players._setup.base_url)

    def keeper_pid(self) -> int:
        """The process that keeps the one program that runs."""
        (program,) = self.actor._players._running.values()
        return int(program.process.pid)

    def figure(self, name: str) -> float:
        return self.actor.figures()[f"episodes/{name}"]

    def watch_output(self) -> list[tuple[str, str, int]]:
        """Output from now on: uid, text, bytes dropped."""
        printed: list[tuple[str, str, int]] = []
        assert self.actor._players is not None
        self.actor._players._on_output = lambda *said: printed.append(said)
        return printed

    def slots(self) -> list[Any]:
        assert isinstance(self.actor._players, Workers)
        return self.actor._players._slots

    def start_within(self, seconds: float) -> None:
        """Seconds that a worker may take until it is ready, from now on."""
        assert isinstance(self.actor._players, Workers)
        self.actor._players._start_timeout_s = seconds

    def notices(self) -> dict[str, tuple[int, str]]:
        return {each.key: (each.count, each.text) for each in self.actor._notices.take()}


async def until(state: Callable[[], Any], what: str = "") -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not state():
            await asyncio.sleep(0.01)


def below() -> list[psutil.Process]:
    """All that this process has started and that lives."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def worker_pids() -> list[int]:
    return [process.pid for process in below() if "asyncrl episodes worker" in " ".join(process.cmdline())]


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
    credentials = Credentials(RUN_ID, SECRET)
    context = ActorContext(
        config=config,
        name=name,
        incarnation=1,
        run_dir=run_dir,
        transport=ZmqTransport(credentials, max_message_bytes=1 << 30),
        credentials=credentials,
        controller=None,
    )
    actor = EpisodesActor(context)
    async with Net() as net, asyncio.TaskGroup() as tasks:
        actor._endpoint.resolve = net._resolve
        life = tasks.create_task(actor.main())
        await until(lambda: actor.ready or life.done())
        net.serve(rollouter, "rollouter/0")
        net.register(ActorRecord(name=name, incarnation=1, address=actor.address))
        peer = rollouter.host = net.client(name, "rollouter/0")
        yield Hosted(actor, rollouter, peer, net)
        actor.begin_drain()
    assert [process for process in below() if process.pid not in before] == []
    assert listening() <= ports
    assert set(os.listdir(".")) - files <= {"__pycache__"}
