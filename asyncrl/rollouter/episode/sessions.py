"""The sessions of a rollouter. A session is one attempt at one trajectory, in which the user's agent calls the policy.

``Sessions.chat`` answers a call. It renders the messages on a thread, waits for a slot of the engine, and samples. Then
it parses the answer and adds it to the session's conversation as a node. The caller does not notice weight updates and
deaths of engines meanwhile.

Invariants: a call is answered once. A repeated call waits for the first call and gets the same answer. The repeat of a
cancelled call continues after the tokens sampled so far. Nothing is added to a session that has ended. Fails with
EpisodeOver if the session has ended or belongs to another host, and with ChatRefused for a request that the policy
cannot answer. The agent receives both errors.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from asyncrl.config import Config
from asyncrl.core.errors import ChatRefused, EpisodeOver
from asyncrl.messages.episodes import Chat, ChatDelta, ChatReply
from asyncrl.messages.groups import Lease
from asyncrl.rollouter.episode.conversation import Conversation, Prompt
from asyncrl.rollouter.episode.episode_metrics import EpisodeMetrics
from asyncrl.rollouter.episode.hosts import EpisodeHosts
from asyncrl.rollouter.episode.stages import Stages
from asyncrl.rollouter.serving.generation import (
    CallWatch,
    Phase,
    PolicyRequest,
    Response,
    TrajectoryFailed,
    TurnPolicy,
)
from asyncrl.rollouter.serving.group_events import CallEvents, SampleEvents
from asyncrl.rpc.services import Clock
from asyncrl.text.chat.chat_messages import normalise_messages, normalise_tools
from asyncrl.text.chat.parsers import Parsed
from asyncrl.text.chat.renderer import Renderer
from asyncrl.text.stops import Stops, with_strings
from asyncrl.text.tokenizer import Tokenizer

T = TypeVar("T")
KEY_BYTES = 16
MOST_CHARACTERS = 256
"""Most characters per token of the longest context. Messages with more characters are refused without rendering."""


class Session:
    """One attempt at one trajectory."""

    def __init__(self, lease: Lease, events: SampleEvents, host: str, config: Config, clock: Clock) -> None:
        self.key = secrets.token_hex(KEY_BYTES)
        """Name of the session, which cannot be guessed."""
        self.lease, self.events, self.host = lease, events, host
        self.attempt = events.attempts
        """Number of earlier episodes of the sample."""
        self.conversation = Conversation(history=config.chat.history)
        self.began = clock.now()
        """Time (s, monotonic) when the session began."""
        self.stages = Stages(config.episode, self.began)
        self.changed = asyncio.Event()
        """Set when a deadline may have changed."""
        self._call_ended = asyncio.Event()
        """Set when a call may have ended."""
        self.failure: TrajectoryFailed | None = None
        """The failure after which no attempt at the lease can succeed."""
        self.is_orphan = False
        """Whether the session's host has died."""
        self.cut: set[int] = set()
        """Ids of the nodes whose answers a limit of the run has cut."""
        self.rendering = asyncio.Lock()
        """Held while a call is rendered, so that calls are rendered and named in the order of their arrival."""
        self.resumes = 0
        """Number of submissions beyond the first of each answer."""
        self.version = -1
        """The newest version under which an engine has computed tokens of the session."""
        self.sleeps = 0
        """Number of the engine's sleeps before the newest submission; each later sleep loses the computed tokens."""
        self.calls: dict[str, _Call] = {}
        """All calls, by the names that the episode host gives them; a repeat has the name of its first call."""
        self._now = clock.now
        self._prompt_counts: Counter[bytes] = Counter()
        """Number of calls so far with each prompt, by its digest."""

    def key_of(self, prompt: Prompt) -> str:
        """Make the name of a call from its prompt, and count how often that prompt came.

        So the name, which gives the seed, does not depend on the timing of parallel calls.
        """
        digest = hashlib.blake2b(np.array(prompt.ids, np.int32).tobytes(), digest_size=8).digest()
        self._prompt_counts[digest] += 1
        where = f"{self.lease.uid}/{self.events.sample}/{self.attempt}"
        return f"{where}/{digest.hex()}/{self._prompt_counts[digest]}"

    def note(self) -> None:
        """Wake the waiters after a change of the stages or of ``failure``."""
        self.changed.set()
        self._call_ended.set()

    async def wait_for_turn(self) -> None:
        """Wait until a turn is left that no call under way will use, or until the attempt is over or has failed."""
        while self.failure is None and self.stages.all_turns_asked:
            self._call_ended.clear()
            await self._call_ended.wait()

    def end_by_length(self, reason: str) -> EpisodeOver:
        """End the attempt because the context is full; returns the error to raise."""
        self.stages.end_by("length", reason, self._now())
        self.note()
        return EpisodeOver(reason)

    def fail(self, failure: TrajectoryFailed) -> EpisodeOver:
        """Note why no attempt at the lease can succeed; returns the error to raise."""
        self.failure = failure
        self.note()
        return EpisodeOver(str(failure))


class _Call:
    """A call of a session, from its first arrival to its answer."""

    def __init__(self, events: CallEvents) -> None:
        self.events = events
        self.lock = asyncio.Lock()
        """Held by the request that is getting the answer; repeats wait for it."""
        self.prompt: Prompt | None = None
        """The prompt, kept for a repeat of the call; None before it is made and after the answer."""
        self.response: Response | None = None
        """The tokens sampled so far, kept like ``prompt``."""
        self.limited = False
        """Whether a limit of the run, not the agent, sets the longest answer."""
        self.key = ""
        """The call's name by ``Session.key_of``, which gives its seed."""
        self.reply: ChatReply | None = None
        """The answer, which each repeat of the call gets; None before."""


class _SessionWatch(CallWatch):
    """Notes the progress of a call in its session; with a ``text`` it also sends the host the answer's growing text."""

    def __init__(
        self, session: Session, request: Chat, clock: Clock, hosts: EpisodeHosts, text: GrowingText | None
    ) -> None:
        self._session, self._call, self._clock, self._hosts, self._text = session, request.call, clock, hosts, text
        self._sent = 0
        """Number of characters already sent to the host."""

    def entered(self, phase: Phase) -> None:
        self._session.stages.enter(self._call, phase, self._clock.now())
        self._session.note()

    def submitted(self, version: int, sleeps: int) -> None:
        self._session.version = max(self._session.version, version)
        self._session.sleeps = sleeps

    def sampled(self, response: Response) -> None:
        if self._text is not None and (more := self._text.more(response.tokens)):
            session = self._session
            self._hosts.send(
                session.host, ChatDelta(session=session.key, call=self._call, offset=self._sent, text=more)
            )
            self._sent += len(more)


class Sessions:
    """The open sessions of a rollouter, by key; ``policy`` answers their calls."""

    def __init__(
        self,
        config: Config,
        *,
        renderer: Renderer,
        tokenizer: Tokenizer,
        stops: Stops,
        policy: TurnPolicy,
        hosts: EpisodeHosts,
        metrics: EpisodeMetrics,
        clock: Clock,
    ) -> None:
        self.metrics = metrics
        self._config = config
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._stops = stops
        self._policy = policy
        self._hosts = hosts
        self._clock = clock
        self._threads = ThreadPoolExecutor(max(1, config.chat.render_threads), "render")
        self._sessions: dict[str, Session] = {}
        self.at: Counter[str] = Counter()
        """Number of open sessions at each host."""

    def open(self, lease: Lease, events: SampleEvents, host: str) -> Session:
        """Open a session for an attempt that the episode host ``host`` will play."""
        session = Session(lease, events, host, self._config, self._clock)
        events.began_episode(host)
        self._sessions[session.key] = session
        self.at[host] += 1
        return session

    def seal(self, session: Session, reason: str) -> None:
        """End a session: refuse further calls and rewards, and count the time that it spent in each state."""
        session.conversation.seal(reason)
        session.stages.end(self._clock.now())
        session.note()
        self.metrics.spent(session.stages.seconds(self._clock.now()))
        del self._sessions[session.key]
        self.at[session.host] -= 1

    def began(self, key: str, host: str) -> None:
        """Note that the user's code of a session has begun at its host."""
        session = self._sessions.get(key)
        if session is not None and session.host == host:
            session.stages.begin(self._clock.now())
            session.note()

    def host_died(self, host: str) -> None:
        """Mark the sessions of a dead host as orphans, and wake their players."""
        for session in self._sessions.values():
            if session.host == host:
                session.is_orphan = True
                session.note()

    def close(self) -> None:
        """End the rendering threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        return len(self._sessions)

    def gauges(self, scoring: int = 0) -> dict[str, float]:
        """Return metrics of the open sessions, and of ``scoring`` episodes being scored. Callable from any thread."""
        sessions, now = list(self._sessions.values()), self._clock.now()
        oldest_s = max((now - session.began for session in sessions), default=0.0)
        return self.metrics.gauges((session.stages.state for session in sessions), oldest_s, scoring)

    def find(self, key: str, host: str) -> Session:
        """Return the session of a key. Raises EpisodeOver if ``host`` does not play it, or if it has failed."""
        session = self._sessions.get(key)
        if session is None or session.host != host:
            raise EpisodeOver("there is no such session, or no more")
        if session.failure is not None:
            raise EpisodeOver(str(session.failure))
        return session

    async def chat(self, request: Chat, host: str) -> ChatReply:
        """Answer a call with the assistant's next message. Raises EpisodeOver, ChatRefused."""
        session = self.find(request.session, host)
        call = session.calls.get(request.call)
        if call is None:
            call = session.calls[request.call] = _Call(session.events.call(len(session.calls)))
        async with call.lock:
            if call.reply is None:
                await session.wait_for_turn()
                # The session may have ended during the waits above.
                self.find(request.session, host)
                call.reply = await self._answer(session, call, request)
                # Freed, because otherwise each call would keep a copy of the whole history.
                call.prompt = call.response = None
        return call.reply

    def credit(self, key: str, host: str, node: int | None, value: float) -> int:
        """Set the reward of a turn, and return the turn's number; see ``Conversation.reward``.

        Raises EpisodeOver, InvalidRequest.
        """
        session = self.find(key, host)
        rewards = session.conversation.rewards
        known = len(rewards)
        turn = session.conversation.reward(node, value)
        # A repeated reward of 0 is no event: environments that reward only the last step send many.
        if value or len(rewards) == known:
            session.events.credited(turn, value)
        return turn

    async def _answer(self, session: Session, call: _Call, request: Chat) -> ChatReply:
        """Make the prompt, sample the answer and commit it. A repeated call keeps its prompt and sampled tokens.

        Raises EpisodeOver and ChatRefused, which the agent receives. If engines have died of the prompt too often, the
        whole session fails, and this call and every later one raise EpisodeOver.
        """
        stages, now = session.stages, self._clock.now
        events = call.events
        try:
            stages.call(request.call, now())
        except EpisodeOver as over:
            events.refused(over.reason)
            raise
        finally:
            session.note()
        try:
            tools = normalise_tools(request.tools)
            options = self._config.chat.template_options | request.template_options
            if call.prompt is None:
                messages = normalise_messages(request.messages)
                # Before the lock, so that a call that is refused for its size does not delay others.
                self._require_renderable(session, messages)
                async with session.rendering:
                    prompt = await self._prompt(session, messages, tools, options)
                    room = self._require_room(session, prompt)
                    call.response = Response(
                        max_tokens=min(room, request.max_tokens or room),
                        stops=with_strings(self._stops, request.stop, self._tokenizer),
                        # An earlier call had these tokens computed; after an update they are computed again.
                        computed=prompt.shared,
                        computed_at=session.version,
                        computed_sleeps=session.sleeps,
                        # The last token of a path was never fed to an engine.
                        routed=prompt.parent.length - 1 if prompt.parent is not None else 0,
                    )
                    call.limited = request.max_tokens is None or room <= request.max_tokens
                    call.prompt, call.key = prompt, session.key_of(prompt)
                    parent = prompt.parent.id if prompt.parent is not None else None
                    events.prompted(prompt.cause, parent, len(prompt.ids), len(prompt.ids) - prompt.shared)
                    self.metrics.prompted(len(prompt.ids))
            assert call.response is not None
            streamed = self._streamed_text(request, tools, call.response)
            await self._policy.generate(
                PolicyRequest(
                    lease=session.lease,
                    events=events,
                    ids=call.prompt.ids,
                    response=call.response,
                    key=call.key,
                    watch=_SessionWatch(session, request, self._clock, self._hosts, streamed),
                )
            )
            parsed = await self._in_thread(self._renderer.parse, call.response.tokens, tools, options)
            reply = self._commit(session, call, request, parsed)
        except TrajectoryFailed as failure:
            raise session.fail(failure) from failure
        except BaseException as error:
            if isinstance(error, (ChatRefused, EpisodeOver)):
                events.refused(str(error))
            # ``call`` keeps its prompt and response, so a repeat continues after the tokens sampled so far.
            stages.dropped(request.call, now())
            session.note()
            raise
        # Tools that the call did not declare are left out of the events and the state.
        known = {tool["function"]["name"] for tool in tools}
        called = [each.name for each in reply.tool_calls if each.name in known]
        events.answered(reply.node, called, parsed.malformed)
        stages.answered(request.call, now(), tools=called)
        session.note()
        return reply

    async def _prompt(
        self, session: Session, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> Prompt:
        """Render a call's messages on a thread, and make its prompt.

        Renders only the new messages if the template can extend the last answer, else all.
        """
        conversation, renderer = session.conversation, self._renderer
        resolved = conversation.resolve(messages, tools, options)
        if resolved.extends:
            parent = resolved.parent
            assert parent is not None
            extension = await self._in_thread(
                lambda: renderer.extension(resolved.tail, tools, options, last_ids=parent.ids.tolist())
            )
            if extension is not None:
                return conversation.extend(resolved, extension)
        # ``resolved.messages`` has the policy's answers as it gave them; agents often drop the reasoning.
        ids = await self._in_thread(renderer.render, resolved.messages, tools, options)
        return conversation.branch(resolved, ids)

    def _require_renderable(self, session: Session, messages: Sequence[Mapping[str, Any]]) -> None:
        """End the attempt if messages are too long to render: tens of megabytes take minutes. Raises EpisodeOver."""
        longest = self._config.longest_context(session.lease.purpose)
        characters = sum(len(message.get("content") or "") for message in messages)
        if characters > longest * MOST_CHARACTERS:
            raise session.end_by_length(
                f"its messages have {characters} characters, and its context with an answer may have {longest} tokens "
                "(episode.max_context_tokens)"
            )

    def _require_room(self, session: Session, prompt: Prompt) -> int:
        """Return the longest answer (tokens) that the run allows after this prompt.

        If the context leaves no token, it ends the attempt by the limit ``length`` and raises EpisodeOver.
        """
        longest = self._config.longest_context(session.lease.purpose)
        room = longest - len(prompt.ids)
        if room < 1:
            raise session.end_by_length(
                f"its context has {len(prompt.ids)} tokens, and with an answer may have {longest} "
                "(episode.max_context_tokens)"
            )
        return min(room, session.lease.max_tokens)

    def _commit(self, session: Session, call: _Call, request: Chat, parsed: Parsed) -> ChatReply:
        """Add the finished answer to the conversation as a node, and make the reply to the agent.

        The reply's ``stop_sequence`` is the agent's own stop string that ended the answer, "" without one.
        """
        prompt, response = call.prompt, call.response
        assert prompt is not None
        assert response is not None
        assert response.finish_reason is not None
        content, stop = _before_stop(parsed.content, response.stops.strings)
        node = session.conversation.commit(
            prompt,
            tokens=response.tokens,
            logprobs=response.logprobs,
            spans=response.spans,
            sets=response.sets,
            routes=response.final_routes(len(prompt.ids)),
            finish=response.finish_reason,
            content=content,
            reasoning=parsed.reasoning,
            calls=[(each.name, each.arguments) for each in parsed.calls],
            untrained=request.untrained,
        )
        if response.finish_reason == "length" and call.limited:
            session.cut.add(node.id)
        session.resumes += response.submissions - 1
        self.metrics.malformed(parsed.malformed)
        return ChatReply(
            node=node.id,
            content=node.message["content"],
            reasoning=parsed.reasoning,
            tool_calls=list(node.tool_calls),
            finish_reason="tool_calls" if node.tool_calls else response.finish_reason,
            prompt_tokens=len(prompt.ids),
            completion_tokens=len(response.tokens),
            stop_sequence=stop if stop in request.stop else "",
        )

    def _streamed_text(self, request: Chat, tools: Sequence[Any], response: Response) -> GrowingText | None:
        """Return a decoder if the answer's text is sent while it is sampled; None if only the whole answer is sent.

        The agent gets only the whole answer if it did not ask to stream. The same follows if the answer may have tool
        calls or reasoning, and if the run or the call has stops.
        """
        if not request.stream or tools or response.stops != Stops() or self._renderer.report.reasoning_parser != "none":
            return None
        return GrowingText(self._renderer.text)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class GrowingText:
    """Decodes a growing list of tokens piece by piece; together the pieces are the text of all tokens.

    A character may need several tokens. Until its last token arrives, the character decodes to a replacement character,
    which is held back.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context = 0
        """Index of the first token to decode: the previous ``_read``, because text depends on the tokens before."""
        self._read = 0
        """Number of tokens, counted from the first, whose text ended with a whole character and was returned."""
        self._returned = 0
        """Number of characters returned of the text of the tokens after ``_read``."""

    def more(self, tokens: Sequence[int]) -> str:
        """Return the text that was not returned before. ``tokens`` are all tokens so far."""
        known = len(self._decode(tokens[self._context : self._read])) + self._returned
        text = self._decode(tokens[self._context :])
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[known:]
        if len(whole) == len(text):
            self._context, self._read, self._returned = self._read, len(tokens), 0
        else:
            self._returned += len(new)
        return new


def _before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Cut the text at its first stop string; returns the text before it, and the stop string ("" without one).

    The agent does not see the stop string, but its tokens were sampled and are trained.
    """
    matches = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not matches:
        return text, ""
    at, stop = min(matches)
    return text[:at], stop
