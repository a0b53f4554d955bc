"""Plays one episode of the user's agent outside a run, with a scripted policy (script.py) or an engine.

Endpoint, sessions, conversation, renderer, deadlines and the processes that run the agent are those of a run. Without
a model, tokens are bytes, and the chat template extends every answer, so that each fork (played.py) is caused by the
agent.

Invariant: no process of the agent is left when ``LoneEpisode.play`` returns. Raises ConfigError if the user's code
cannot be found, and CannotPlay if its import fails, the episode does not end, or there is no task. Every fault of the
agent is in the result.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from asyncrl.config import Config
from asyncrl.config.episode import OWN_REASONING_PARSERS
from asyncrl.config.load import validate_config
from asyncrl.core.errors import ChatRefused, ConfigError, DeadlineExceeded, EpisodeWorkersEnded
from asyncrl.episodes.episode_pool import EpisodeObserver, EpisodePool
from asyncrl.episodes.http.endpoint import PolicyEndpoint
from asyncrl.episodes.programs import Programs
from asyncrl.episodes.session import PolicySession
from asyncrl.launcher.checks.inputs import check_inputs
from asyncrl.launcher.doctor.played import Played, PlayedTurn
from asyncrl.launcher.doctor.script import Script, ScriptedPolicy, asked
from asyncrl.messages import Message, Request
from asyncrl.messages.episodes import (
    Chat,
    ChatDelta,
    ChatReply,
    EpisodeBegan,
    EpisodeDone,
    RunEpisode,
    TurnReward,
    TurnRewarded,
)
from asyncrl.messages.groups import Lease, Trajectory
from asyncrl.messages.groups import Sequence as TokenSequence
from asyncrl.observe.catalogue import Counters, Histograms
from asyncrl.rollouter.episode.episode_metrics import EpisodeMetrics
from asyncrl.rollouter.episode.player import EpisodeFailed, EpisodePlayer
from asyncrl.rollouter.episode.sessions import Session, Sessions
from asyncrl.rollouter.serving.generation import TrajectoryFailed
from asyncrl.rollouter.serving.group_events import GroupEvents
from asyncrl.rpc.services import Clock
from asyncrl.text.chat.renderer import Renderer, hidden_tools, make_renderer
from asyncrl.text.stops import resolve_stops
from asyncrl.text.tokenizer import Tokenizer, tokenizer_of
from asyncrl.workers.confinement import Confinement

if TYPE_CHECKING:
    from asyncrl.episodes.session import OnDelta

HOST = "episodes/0"
ROOM = 1 << 20
"""Limit of the tokens of an episode without a model."""
MOST_PRINTED = 2000
"""Number of characters of the agent's output that are kept: the last ones."""
RETRY_S = 0.05
"""Pause before an episode whose worker died starts again (s)."""
MOST_BEGUN = 5
"""Most starts of an episode, which starts again if its worker dies."""
SPARE_S = 60.0
"""Time that an episode gets in addition to its own deadlines (s)."""

QUESTION = "What is the weather in Bern?"


class CannotPlay(Exception):
    """No episode can be played; the text is the reason."""


def for_script(config: Config, command: Sequence[str], longest_s: float) -> Config:
    """Return the configuration with which an agent plays against a scripted policy.

    ``command``, if there is one, replaces the configured agent. The start and each turn of the agent end within
    ``longest_s``. Raises ConfigError.
    """
    if not command and config.episode.kind == "single":
        raise ConfigError(["episode: no function, env, tools or command is set; there is no agent to play with"])
    tree = config.model_dump(mode="json")
    episode, chat = tree["episode"], tree["chat"]
    if command:
        episode |= {"function": None, "env": None, "tools": [], "options": {}, "command": list(command)}
    for key in ("start_timeout_s", "turn_timeout_s"):
        episode[key] = min(episode[key], longest_s)
    episode["workers"] = 1
    # The script writes calls in the form of our own parser; vLLM's parsers need vLLM.
    if chat["tool_parser"] != "none":
        chat["tool_parser"] = "json"
    if chat["reasoning_parser"] not in OWN_REASONING_PARSERS:
        chat["reasoning_parser"] = "think"
    tree["rollout"]["retry_backoff_s"] = RETRY_S
    if config.model.path is None:
        episode["max_context_tokens"] = tree["rollout"]["max_tokens"] = ROOM
    return validate_config(tree)


async def play_scripted(config: Config, *, with_data: bool) -> Played:
    """Play one attempt with the scripted policy, at the first task of the data or at QUESTION, and report it.

    Raises ConfigError, CannotPlay.
    """
    prompt, row, source = await _task(config) if with_data else (QUESTION, {"prompt": QUESTION}, "")
    tokenizer = tokenizer_of(config)
    renderer = make_renderer(config, tokenizer)
    episode = LoneEpisode(config, tokenizer, renderer, Clock())
    await episode.play(lone_lease(config, 0, np.zeros(1, np.int32), prompt, row, source=source))
    return episode.played()


async def _task(config: Config) -> tuple[str, dict[str, Any], str]:
    """Return prompt, row and source of the first training task. Raises CannotPlay."""
    inputs = await check_inputs(config)
    task = next((sample for sample in inputs.samples if sample.key in config.training_sets), None)
    if task is None:
        problems = [finding.text for finding in inputs.findings if finding.result != "ok"]
        raise CannotPlay(f"the data have no usable task: {'; '.join(problems) or 'no row fits'}")
    return task.prompt, task.row, task.source


def lone_lease(
    config: Config,
    number: int,
    prompt_ids: np.ndarray,
    prompt: str,
    row: dict[str, Any],
    *,
    samples: int = 1,
    source: str = "",
) -> Lease:
    """Make the lease (the right to generate one group) of a group outside a run. ``prompt_ids``: int32 [P]."""
    return Lease(
        uid=f"0-{number}",
        number=1,
        purpose="train",
        epoch=0,
        index=number,
        param_version=0,
        prompt_ids=prompt_ids,
        prompt=prompt,
        row=row,
        samples=samples,
        temperature=config.rollout.temperature,
        truncation=config.rollout.truncation,
        max_tokens=config.rollout.max_tokens,
        source=source,
    )


class LoneEpisode(EpisodeObserver):
    """Connects the parts of a run that play an episode, in one process; in a run, two actors hold them.

    The rollouter has the player and the sessions, the episode host has the endpoint and the agent's processes. To the
    player this object is the only episode host; to the endpoint and the agent it is the rollouter and the endpoint's
    Core. ``policy`` answers the calls; by default it is scripted.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        renderer: Renderer,
        clock: Clock,
        policy: Any = None,
    ) -> None:
        self.model = config.run.name
        self._config, self._tokenizer, self._renderer, self._clock = config, tokenizer, renderer, clock
        self._sessions = Sessions(
            config,
            renderer=renderer,
            tokenizer=tokenizer,
            stops=resolve_stops(config.rollout, tokenizer),
            policy=policy or ScriptedPolicy(Script(thinks=renderer.report.reasoning_parser != "none"), tokenizer),
            hosts=self,
            metrics=EpisodeMetrics(Counters(), Histograms()),
            clock=clock,
        )
        self._agent_sessions: dict[str, PolicySession] = {}
        """The agent's end of its sessions, by key: one for each start of the episode."""
        self._session: Session | None = None
        """The policy's end of the newest session; None before the first start."""
        self.failure = ""
        """Why the attempt gave no trajectory; empty if it gave one."""
        self.trajectory: Trajectory | None = None
        """The trajectory of the attempt; None until ``play`` ends, and after a failure."""
        self._notices: dict[str, str] = {}
        """Texts of the endpoint about the agent's requests, by KIND/NAME."""
        self._refused: dict[str, str] = {}
        """By field of a call: the first reason for which the session refused it."""
        self._hidden_tools: list[str] = []
        self._printed = ""
        self._times: dict[str, float] = {}
        """Time of the events that ``_spans`` names, in the newest start of the episode."""
        self._last_error = ""
        """Error of the last start of the episode that ended; empty if it had none."""

    async def play(self, lease: Lease) -> None:
        """Play one attempt to its end, and set ``trajectory`` or ``failure``. Raises ConfigError, CannotPlay."""
        player = EpisodePlayer(self._config, self._sessions, self, clock=self._clock)
        events = GroupEvents(lease, self._clock.now, self._clock.wall).samples[0]
        episode = self._config.episode
        longest_s = SPARE_S + episode.start_timeout_s + episode.timeout_s + episode.close_timeout_s
        try:
            async with self._hosting(), asyncio.timeout(longest_s):
                self.trajectory = await player.play(lease, events)
        except TimeoutError:
            state = self._session.stages.state if self._session else "start"
            raise CannotPlay(f"the episode did not end within {longest_s:g} s (state: {state})") from None
        except (EpisodeFailed, TrajectoryFailed) as failed:
            self.failure = str(failed)
        finally:
            self._sessions.close()

    @asynccontextmanager
    async def _hosting(self) -> AsyncIterator[None]:
        """Start the endpoint and the processes of the agent; end them with the context.

        Raises CannotPlay or ConfigError.
        """
        episode = self._config.episode
        self._endpoint = PolicyEndpoint(
            self,
            max_request_bytes=episode.max_request_bytes,
            notify=self._add_notice,
            log=structlog.wrap_logger(structlog.PrintLogger(sys.stderr)),
        )
        base_url = f"{await self._endpoint.start()}/v1"
        watch = asyncio.create_task(self._endpoint.calls.cancel_abandoned())
        confined = Confinement(self._config.security.user_environment)
        self._agents: Programs | EpisodePool
        if episode.kind == "command":
            self._agents = Programs(episode, base_url=base_url, confined=confined, observer=self)
        else:
            self._agents = EpisodePool(
                episode,
                model=self.model,
                base_url=base_url,
                confined=confined,
                start_timeout_s=episode.start_timeout_s,
                observer=self,
            )
        try:
            try:
                await self._agents.start()
            except (EpisodeWorkersEnded, DeadlineExceeded) as error:
                raise CannotPlay(f"the user's code cannot be loaded: {error}") from error
            yield
        finally:
            await self._agents.close()
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await self._endpoint.close()

    # --- the player's interface to episode hosts ---

    def choose(self, at: Mapping[str, int], *, prefer: str, avoid: Collection[str]) -> str:
        """Return the only host."""
        return HOST

    def send(self, host: str, delta: ChatDelta) -> None:
        """Pass on new text of a call that is being answered."""
        if agent_session := self._agent_sessions.get(delta.session):
            agent_session.hear(delta)

    def run(self, host: str, request: RunEpisode, timeout: float) -> asyncio.Future[EpisodeDone]:
        """Start the episode on the host; cancelling the future ends it."""
        return asyncio.ensure_future(self._run(request, timeout))

    async def _run(self, request: RunEpisode, timeout: float) -> EpisodeDone:
        """Run the agent once, as an episode host does. Raises CannotPlay after MOST_BEGUN starts.

        If the agent reports no error but its session cannot be settled, the host is to blame.
        """
        self._session = self._sessions.find(request.session, HOST)
        agent_session = PolicySession(request, self, asyncio.get_running_loop().time() + timeout, 0)
        self._agent_sessions[agent_session.key] = agent_session
        self._times = {"begin": self._clock.now()}
        if len(self._agent_sessions) > MOST_BEGUN:
            raise CannotPlay(f"the agent cannot be run here: {self._last_error}")
        try:
            done = await self._agents.play(agent_session)
            self._last_error = done.error
            self._times["end"] = self._clock.now()
            fault = await agent_session.settle()
            return EpisodeDone(error=fault, blame="host") if fault and not done.error else done
        finally:
            agent_session.end("it has ended")

    # --- the episode host's interface to the rollouter ---

    name = "rollouter/0"

    def call(self, request: Request, timeout: float | None = None) -> asyncio.Future[Any]:
        """Answer a request, as Peer.call does."""
        return asyncio.ensure_future(self._answer(request))

    def cast(self, message: Message) -> bool:
        """Take a message, as Peer.cast does."""
        if isinstance(message, EpisodeBegan):
            self._sessions.began(message.session, HOST)
        return True

    async def _answer(self, request: Request) -> Message:
        """Answer a reward for a turn, or a call of the policy, as the rollouter does. Raises ChatRefused."""
        self._times.setdefault("first call", self._clock.now())
        if isinstance(request, TurnReward):
            session = self._sessions.find(request.session, HOST)
            return TurnRewarded(node=session.conversation.reward(request.node, request.value))
        assert isinstance(request, Chat)
        # Each request has a task, and so a context, of its own. So only this call sees the value.
        asked.set(request)
        try:
            self._hidden_tools += hidden_tools(self._renderer, request.tools, request.template_options)
            reply = await self._sessions.chat(request, HOST)
        except ChatRefused as refused:
            self._refused.setdefault(refused.field, str(refused))
            raise
        self._times["last answer"] = self._clock.now()
        return reply

    # --- the endpoint's Core (episodes/http/calls.py) ---

    def knows(self, key: str) -> bool:
        return key in self._agent_sessions

    async def chat(self, key: str, call: Chat, on_delta: OnDelta) -> ChatReply:
        return await self._agent_sessions[key].chat(call, on_delta)

    async def turn_reward(self, key: str, node: int | None, value: float) -> int:
        return await self._agent_sessions[key].turn_reward(node, value)

    # --- notices and result ---

    def _add_notice(self, key: str, text: str, **_: Any) -> None:
        """Keep the first text for each ``key``, which is "agents: KIND/NAME" as PolicyEndpoint gives it."""
        self._notices.setdefault(key.removeprefix("agents: "), text)

    def printed(self, uid: str, text: str, dropped: int) -> None:
        self._printed = (self._printed + text)[-MOST_PRINTED:]

    def _notices_of(self, kind: str) -> dict[str, str]:
        """Return the texts of one kind (refused, ignored or relaxed), by the name of the field."""
        names = sorted(name for name in self._notices if name.startswith(f"{kind}/"))
        return {name.partition("/")[2]: self._notices[name] for name in names}

    def played(self) -> Played:
        """Return the attempt as the report shows it, with the refusals of both the endpoint and the session."""
        session, counts = self._session, self._endpoint.counts
        assert session is not None
        conversation = session.conversation
        token_counts = conversation.counts()
        refused = self._notices_of("refused")
        for field, text in self._refused.items():
            # A refusal that came over the endpoint is in a notice already.
            if not any(text in noticed for noticed in refused.values()):
                refused[field] = text
        paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
        return Played(
            failure=self.failure,
            outcome=session.stages.outcome,
            reward=self.trajectory.reward if self.trajectory is not None else None,
            turn_rewards=len(conversation.rewards),
            turns=[
                PlayedTurn(
                    cause=node.cause,
                    goes_on=node.parent is not None,
                    context_tokens=node.length - len(node.ids),
                    new_tokens=node.length - len(node.ids) - node.shared,
                    sampled_tokens=len(node.ids),
                    calls=[call.name for call in node.tool_calls],
                    trained=node.trained,
                )
                for node in conversation.nodes
            ],
            sequences=[_total_tokens(each) for each in conversation.sequences()],
            cost_factor=token_counts.cost_factor,
            dialects={path: counts[path] for path in paths if counts[path]},
            streamed=counts["streamed"],
            retries=counts["joined"] + counts["replayed"] + counts["resumed"],
            ignored=list(self._notices_of("ignored")),
            relaxed=list(self._notices_of("relaxed")),
            refused=refused,
            hidden_tools=list(dict.fromkeys(self._hidden_tools)),
            seconds=_spans(self._times),
            printed=self._printed,
        )


def _total_tokens(sequence: TokenSequence) -> int:
    return len(sequence.tokens) + (0 if sequence.prompt_ids is None else len(sequence.prompt_ids))


def _spans(times: dict[str, float]) -> dict[str, float]:
    """Return the seconds between events, by the later one; an event that is missing in ``times`` is left out."""
    present = [(name, times[name]) for name in ("begin", "first call", "last answer", "end") if name in times]
    return {later: round(later_at - at, 3) for (_, at), (later, later_at) in itertools.pairwise(present)}
