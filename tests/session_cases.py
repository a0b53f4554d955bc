"""The rollouter's side of episodes, over a real chat template and engine manager; the engine follows a script."""

import asyncio
import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
from chat_models import FAMILIES, write_chat_model
from harness import replace
from made_group import make_group
from published_weights import stage
from run_settings import sim_config
from virtual import LoopClock

from asyncrl.config.load import validate_config
from asyncrl.messages.episodes import Chat
from asyncrl.messages.groups import VersionSpan
from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.observe.state_ledger import StateLedger
from asyncrl.rollouter.engines.base import TokenDelta
from asyncrl.rollouter.episode.episode_metrics import EpisodeMetrics
from asyncrl.rollouter.episode.player import EpisodeFailed, EpisodePlayer
from asyncrl.rollouter.episode.sessions import Sessions
from asyncrl.rollouter.serving.admission import Slots
from asyncrl.rollouter.serving.engine_manager import EngineManager
from asyncrl.rollouter.serving.generation import PolicyCall
from asyncrl.rollouter.serving.group_events import GroupEvents
from asyncrl.rpc.awaits import Awaits
from asyncrl.text.chat.renderer import make_renderer
from asyncrl.text.stops import Stops
from asyncrl.text.tokenizer import load_tokenizer

HOST = "episodes/0"


class Speaker:
    """An engine that says ``world.say(prompt text)``, token by token, while ``world.speaks`` is set.

    The log-prob of each token is the negative of its version. A word that was begun is continued after an abort.
    """

    name, workers, kv_use, returns_routes = "rollouter/0", 1, None, True

    def __init__(self, world):
        self.world, self.version, self.running = world, -1, set()

    async def start(self):
        pass

    close = resume = sleep = wake = start

    async def generate(self, request):
        world, version, held = self.world, self.version, request.held
        prompt = list(request.prompt_ids[: len(request.prompt_ids) - held])
        world.submitted.append((prompt, held, request.max_tokens))
        words = world.tokenizer.encode(world.say(world.tokenizer.decode(prompt, keep_special=True)))
        ids = [*words, *world.tokenizer.eos_ids]
        tokens, finish = 0, "length"
        # The route of a token is its id; it comes once the token is fed.
        unrouted = list(request.prompt_ids[request.routed :])
        self.running.add(request.id)
        for id in ids[held : held + request.max_tokens]:
            await world.until(lambda: world.speaks.is_set() or request.id not in self.running)
            if request.id not in self.running:
                finish = "abort"
                break
            tokens += 1
            world.spoken += 1
            routes = np.array(unrouted, np.uint16).reshape(-1, 1, 1) if unrouted else None
            unrouted = [id]
            yield TokenDelta(tokens=[id], logprobs=[-float(version)], routes=routes)
            if id in world.tokenizer.eos_ids or id in request.stop_token_ids:
                finish = "stop"
                break
            if world.pause_after is not None and world.spoken >= world.pause_after:
                world.pause_after = None
                world.speaks.clear()
        spans = [VersionSpan(version, 0, tokens)] if tokens else []
        yield TokenDelta(tokens=[], logprobs=[], finish_reason=finish, spans=spans)

    async def abort(self, ids):
        self.running.difference_update(ids)

    async def pause(self, mode):
        self.running.clear()

    async def load(self, weights, *, recompute_kv):
        self.version = weights.version


class World:
    """Sessions and a player. ``say`` gives the answer to a prompt; ``agent(session key)`` plays an episode.

    With ``model``, a folder, a real ``engine`` can speak: ``engine(config)`` builds it, and ``publish(version)`` gives
    the manifest of a version's weights. ``choose`` gives the host of an episode. ``slices`` are those of the engine.
    """

    def __init__(
        self,
        folder,
        *,
        say=lambda prompt: "Hello.",
        agent=None,
        model=None,
        engine=None,
        publish=None,
        stops=None,
        choose=lambda **_: HOST,
        slices=None,
        **sections,
    ):
        template, eos = FAMILIES["tools first"]
        model = model or write_chat_model(folder / "model", template, eos=eos)
        rollout = sections.pop("rollout", {})
        tree = sim_config(rollout=rollout, model={"path": str(model)}).model_dump(mode="json")
        tree["episode"] |= {"function": "nobody:plays"} | sections.pop("episode", {})
        for name, section in sections.items():
            tree[name] |= section
        self.config = validate_config(tree)
        self.tokenizer = load_tokenizer(str(model))
        self.renderer = make_renderer(self.config, self.tokenizer)
        self.say, self.agent, self.publish = say, agent, publish
        self.submitted, self.deltas, self.ran, self.hosts, self.ended = [], [], [], [], []
        self.spoken, self.pause_after = 0, None
        self.calls = 0
        self.clock = LoopClock()
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.slots = Slots(self.config.rollout.concurrency_bounds[1])
        self.counters, self.histograms = Counters(), Histograms()
        self.manager = EngineManager(
            self.config,
            lambda: engine(self.config) if engine else Speaker(self),
            self.clock,
            StateLedger(self.clock.now, "engine"),
            Awaits(self.clock.now),
            slices,
        )
        self.sessions = Sessions(
            self.config,
            renderer=self.renderer,
            tokenizer=self.tokenizer,
            stops=stops or Stops(),
            policy=self,
            hosts=self,
            metrics=EpisodeMetrics(self.counters, self.histograms),
            clock=self.clock,
        )
        self.failures, self._choose = [], choose
        faults = SimpleNamespace(add=lambda *reported: self.failures.append(reported))
        self.player = EpisodePlayer(self.config, self.sessions, self, clock=self.clock, faults=faults)
        self.lease = replace(
            make_group("0-1", samples=2).lease,
            prompt_ids=np.array([5], np.int32),
            max_tokens=self.config.rollout.max_tokens,
        )
        self.events = GroupEvents(self.lease, self.clock.now, self.clock.wall).samples[0]

    async def generate(self, request):
        async with self.slots.take():
            await PolicyCall(self.manager, self.tokenizer, self.config, request).generate()

    def choose(self, at, **wishes):
        return self._choose(**wishes)

    def run(self, host, request, timeout):
        """The part of an episode host: the agent plays, and a cancellation ends it."""
        return asyncio.ensure_future(self._play(host, request))

    async def _play(self, host, request):
        self.ran.append(request)
        self.hosts.append(host)
        self.sessions.began(request.session, host)
        try:
            return await self.agent(self, request.session)
        finally:
            self.ended.append(request.session)

    async def staged(self):
        """The next version, which the engine has accepted."""
        version = self.manager.version + 1
        if not self.publish:
            return SimpleNamespace(version=version, close=lambda: None)
        weights = await asyncio.to_thread(stage, self.publish(version))
        await self.manager.engine.accept(weights)
        return weights

    async def update(self, staged=None):
        """New weights, while calls may run."""
        with closing(staged or await self.staged()) as weights:
            if self.publish:
                assert await self.manager.quiesced(60.0)
            await self.manager.pause(weights.version)
            await self.manager.load(weights)
            await self.manager.commit()

    async def update_every(self, tokens):
        """New weights whenever this many tokens were sampled under the last ones."""
        while True:
            enough = self.manager.sampled_tokens + tokens
            # Staged while calls run: little time is between the tokens and the pause.
            staged = await self.staged()
            try:
                await self.until(lambda: self.manager.sampled_tokens >= enough)  # noqa: B023
            except asyncio.CancelledError:
                staged.close()
                raise
            await self.update(staged)

    async def __aenter__(self):
        await self.manager.start()
        await self.update()
        return self

    async def __aexit__(self, *error):
        self.sessions.close()
        await self.manager.close()

    async def until(self, state):
        while not state():
            await asyncio.sleep(0.001)

    def send(self, host, delta):
        """Text of a call in flight."""
        self.deltas.append((delta.offset, delta.text))

    def open(self):
        return self.sessions.open(self.lease, self.events, HOST)

    async def chat(self, key, messages, *, call=None, host=HOST, **more):
        """One call of the policy."""
        self.calls += 1
        request = Chat(session=key, call=call or f"c{self.calls}", messages=messages, **more)
        return await self.sessions.chat(request, host)


def user(content):
    return {"role": "user", "content": content}


def echoed(reply):
    """An answer as an agent sends it back."""
    message = {"role": "assistant", "content": reply.content}
    if reply.tool_calls:
        message["tool_calls"] = [call.in_message() for call in reply.tool_calls]
    return message


def result(reply, content, number=0):
    return {"role": "tool", "tool_call_id": reply.tool_calls[number].id, "content": content}


def call_of(name, **arguments):
    """How the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


def played(folder, agent, **options):
    """The world of an ended episode, and its trajectory or the failure; nothing outlives an attempt."""

    async def play():
        async with asyncio.timeout(20.0), World(folder, agent=agent, **options) as world:
            try:
                return await world.player.play(world.lease, world.events), world
            except EpisodeFailed as failure:
                return failure, world

    found, world = asyncio.run(play())
    assert len(world.sessions) == 0 and len(world.ended) == len(world.ran)
    return found, world
