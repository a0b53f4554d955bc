"""The sessions of a rollouter: each is one attempt at one trajectory, whose agent calls the policy.

A call is rendered in a thread, takes a slot of the engine for itself alone, and becomes a node of the session's
conversation. Weights change and engines die under an open call, which notices neither.

Invariants: a call is answered once; its repeat joins it or is given the same answer, and a cancelled one continues
from its tokens. Nothing is added to a session that has ended. Fails with EpisodeOver where the session has
ended or is not the caller's, with ChatRefused where the policy cannot be asked so. The agent receives either.
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
from asyncrl.rollouter.episode.figures import EpisodeFigures
from asyncrl.rollouter.episode.hosts import EpisodeHosts
from asyncrl.rollouter.episode.stages import Stages
from asyncrl.rollouter.serving.generation import CallWatch, Phase, Response, TrajectoryFailed, TurnPolicy
from asyncrl.rollouter.serving.group_events import CallAccount, SampleAccount
from asyncrl.rpc.services import Clock
from asyncrl.text.chat.messages import normalise_messages, normalise_tools
from asyncrl.text.chat.parsers import Parsed
from asyncrl.text.chat.renderer import Renderer
from asyncrl.text.stops import Stops, with_strings
from asyncrl.text.tokenizer import Tokenizer

T = TypeVar("T")
KEY_BYTES = 16
MOST_CHARACTERS = 256
"""Characters of a token, on average over a context: one with more for each token of its room is not even rendered."""


class Session:
    """One attempt at one trajectory."""

    def __init__(self, lease: Lease, account: SampleAccount, host: str, config: Config, clock: Clock) -> None:
        self.key = secrets.token_hex(KEY_BYTES)
        self.lease, self.account, self.host = lease, account, host
        self.attempt = account.attempts
        self.conversation = Conversation(history=config.chat.history)
        self.began = clock.now()
        """Time of its beginning: monotonic, s."""
        self.stages = Stages(config.episode, self.began)
        self.changed = asyncio.Event()
        """Set when a deadline may have moved."""
        self._left = asyncio.Event()
        """Set when a call may have left."""
        self.failure: TrajectoryFailed | None = None
        """Failure after which nothing can come of the lease any more."""
        self.is_orphan = False
        """Whether its host has died."""
        self.cut: set[int] = set()
        """Answers that a limit of the run's has cut, by node."""
        self.rendering = asyncio.Lock()
        """Lock for rendering in the order of the calls' arrival, which distinguishes calls that ask the same."""
        self.resumes = 0
        self.version = -1
        """The newest version under which an engine has computed any of it."""
        self.calls: dict[str, _Call] = {}
        self._now = clock.now
        self._asked: Counter[bytes] = Counter()

    def key_of(self, prompt: Prompt) -> str:
        """Name of a call in the run by its question and how often that was asked, not by when parallel calls come."""
        digest = hashlib.blake2b(np.array(prompt.ids, np.int32).tobytes(), digest_size=8).digest()
        self._asked[digest] += 1
        where = f"{self.lease.uid}/{self.account.sample}/{self.attempt}"
        return f"{where}/{digest.hex()}/{self._asked[digest]}"

    def note(self) -> None:
        """Note that its stages, or its failure, have changed."""
        self.changed.set()
        self._left.set()

    async def may_ask(self) -> None:
        """Wait until a turn is left that no call under way may take, or the attempt is over."""
        while self.failure is None and self.stages.all_turns_asked:
            self._left.clear()
            await self._left.wait()

    def end_by_length(self, reason: str) -> EpisodeOver:
        """End the attempt: the context is full."""
        self.stages.end_by("length", reason, self._now())
        self.note()
        return EpisodeOver(reason)

    def fail(self, failure: TrajectoryFailed) -> EpisodeOver:
        """Fail the lease: the policy cannot be asked any more."""
        self.failure = failure
        self.note()
        return EpisodeOver(str(failure))


class _Call:
    """A call from its first arrival to its answer."""

    def __init__(self, account: CallAccount) -> None:
        self.account = account
        self.lock = asyncio.Lock()
        """Lock of the request that has it answered; repeats wait for it."""
        self.prompt: Prompt | None = None
        self.response: Response | None = None
        self.limited = False
        """Whether its answer may be no longer by a limit of the run's, rather than by the agent's wish."""
        self.key = ""
        self.reply: ChatReply | None = None


class _SessionWatch(CallWatch):
    """Notes in a session the progress of one of its calls, and sends the host the call's ``text``, if there is any."""

    def __init__(
        self, session: Session, request: Chat, clock: Clock, hosts: EpisodeHosts, text: GrowingText | None
    ) -> None:
        self._session, self._call, self._clock, self._hosts, self._text = session, request.call, clock, hosts, text
        self._sent = 0
        """Characters of the answer that were sent to the host."""

    def entered(self, phase: Phase) -> None:
        self._session.stages.enter(self._call, phase, self._clock.now())
        self._session.note()

    def submitted(self, version: int) -> None:
        self._session.version = max(self._session.version, version)

    def sampled(self, response: Response) -> None:
        if self._text is not None and (more := self._text.more(response.tokens)):
            session = self._session
            self._hosts.tell(
                session.host, ChatDelta(session=session.key, call=self._call, offset=self._sent, text=more)
            )
            self._sent += len(more)


class Sessions:
    """All sessions of a rollouter, whose calls ``policy`` answers."""

    def __init__(
        self,
        config: Config,
        *,
        renderer: Renderer,
        tokenizer: Tokenizer,
        stops: Stops,
        policy: TurnPolicy,
        hosts: EpisodeHosts,
        figures: EpisodeFigures,
        clock: Clock,
    ) -> None:
        self.figures = figures
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
        """Sessions by their host."""

    def open(self, lease: Lease, account: SampleAccount, host: str) -> Session:
        """Begin an attempt, to be played at the episode host ``host``."""
        session = Session(lease, account, host, self._config, self._clock)
        account.began_episode(host)
        self._sessions[session.key] = session
        self.at[host] += 1
        return session

    def seal(self, session: Session, reason: str) -> None:
        """End a session: nothing is added to it any more."""
        session.conversation.seal(reason)
        session.stages.end(self._clock.now())
        session.note()
        self.figures.spent(session.stages.seconds(self._clock.now()))
        del self._sessions[session.key]
        self.at[session.host] -= 1

    def began(self, key: str, host: str) -> None:
        """The user's code of a session has begun."""
        session = self._sessions.get(key)
        if session is not None and session.host == host:
            session.stages.begin(self._clock.now())
            session.note()

    def host_died(self, host: str) -> None:
        """Mark the sessions that a dead host was playing."""
        for session in self._sessions.values():
            if session.host == host:
                session.is_orphan = True
                session.note()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def __len__(self) -> int:
        return len(self._sessions)

    def gauges(self, scoring: int = 0) -> dict[str, float]:
        """Figures of the open sessions, and of ``scoring`` more that are scored. Callable from any thread."""
        sessions, now = list(self._sessions.values()), self._clock.now()
        oldest_s = max((now - session.began for session in sessions), default=0.0)
        return self.figures.gauges((session.stages.state for session in sessions), oldest_s, scoring)

    def find(self, key: str, host: str) -> Session:
        """The session of a key, if it is played at ``host``. Raises EpisodeOver."""
        session = self._sessions.get(key)
        if session is None or session.host != host:
            raise EpisodeOver("there is no such session, or no more")
        if session.failure is not None:
            raise EpisodeOver(str(session.failure))
        return session

    async def chat(self, request: Chat, host: str) -> ChatReply:
        """The assistant's next message. Raises EpisodeOver, ChatRefused."""
        session = self.find(request.session, host)
        call = session.calls.get(request.call)
        if call is None:
            call = session.calls[request.call] = _Call(session.account.call(len(session.calls)))
        async with call.lock:
            if call.reply is None:
                await session.may_ask()
                # It may have ended while another had this call answered.
                self.find(request.session, host)
                call.reply = await self._answer(session, call, request)
                # A conversation of many turns would hold its history once for each.
                call.prompt = call.response = None
        return call.reply

    def credit(self, key: str, host: str, node: int | None, value: float) -> int:
        """Reward a turn of a session. Gives its number. Raises EpisodeOver, InvalidRequest."""
        session = self.find(key, host)
        rewards = session.conversation.rewards
        known = len(rewards)
        turn = session.conversation.reward(node, value)
        # Environments that say 0 of every step but the last are not worth an event each.
        if value or len(rewards) == known:
            session.account.credited(turn, value)
        return turn

    async def _answer(self, session: Session, call: _Call, request: Chat) -> ChatReply:
        stages, now = session.stages, self._clock.now
        account = call.account
        try:
            stages.call(request.call, now())
        except EpisodeOver as over:
            account.refused(over.reason)
            raise
        finally:
            session.note()
        try:
            tools = normalise_tools(request.tools)
            options = self._config.chat.template_options | request.template_options
            if call.prompt is None:
                messages = normalise_messages(request.messages)
                # Before the lock, and before a thread: a call that is refused for its size holds no other up.
                self._require_renderable(session, messages)
                async with session.rendering:
                    prompt = await self._prompt(session, messages, tools, options)
                    most = self._room(session, prompt)
                    call.response = Response(
                        max_tokens=min(most, request.max_tokens or most),
                        stops=with_strings(self._stops, request.stop, self._tokenizer),
                        computed=prompt.shared,
                        computed_at=session.version,
                    )
                    call.limited = request.max_tokens is None or most <= request.max_tokens
                    call.prompt, call.key = prompt, session.key_of(prompt)
                    parent = prompt.parent.id if prompt.parent is not None else None
                    account.prompted(prompt.cause, parent, len(prompt.ids), len(prompt.ids) - prompt.shared)
                    self.figures.prompted(len(prompt.ids))
            assert call.response is not None
            await self._policy.generate(
                session.lease,
                account,
                call.prompt.ids,
                call.response,
                call.key,
                _SessionWatch(session, request, self._clock, self._hosts, self._text_of(request, tools, call.response)),
            )
            parsed = await self._in_thread(self._renderer.parse, call.response.tokens, tools, options)
            reply = self._commit(session, call, request, parsed)
        except TrajectoryFailed as failure:
            raise session.fail(failure) from failure
        except BaseException as error:
            if isinstance(error, (ChatRefused, EpisodeOver)):
                account.refused(str(error))
            # Prompt and response stay with the call: the same call made again continues from the tokens that it has.
            stages.dropped(request.call, now())
            session.note()
            raise
        known = {tool["function"]["name"] for tool in tools}
        called = [each.name for each in reply.tool_calls if each.name in known]
        account.answered(reply.node, called, parsed.malformed)
        stages.answered(request.call, now(), tools=called)
        session.note()
        return reply

    async def _prompt(
        self, session: Session, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]
    ) -> Prompt:
        conversation, renderer = session.conversation, self._renderer
        resolved = conversation.resolve(messages, tools, options)
        if resolved.extends:
            parent = resolved.parent
            assert parent is not None
            extension = await self._in_thread(
                lambda: renderer.extension(
                    resolved.tail, tools, options, last_ids=parent.ids.tolist(), finish=parent.finish
                )
            )
            if extension is not None:
                return conversation.extend(resolved, extension)
        # With our answers as they were given: agents drop the reasoning of theirs.
        ids = await self._in_thread(renderer.render, resolved.messages, tools, options)
        return conversation.branch(resolved, ids)

    def _require_renderable(self, session: Session, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse messages too long to render: tens of megabytes take minutes of a thread. Raises EpisodeOver."""
        longest = self._config.longest_context(session.lease.purpose)
        characters = sum(len(message.get("content") or "") for message in messages)
        if characters > longest * MOST_CHARACTERS:
            raise session.end_by_length(
                f"its messages have {characters} characters, and its context with an answer may have {longest} tokens "
                "(episode.max_context_tokens)"
            )

    def _room(self, session: Session, prompt: Prompt) -> int:
        """The longest answer that the run allows. Raises EpisodeOver."""
        longest = self._config.longest_context(session.lease.purpose)
        room = longest - len(prompt.ids)
        if room < 1:
            raise session.end_by_length(
                f"its context has {len(prompt.ids)} tokens, and with an answer may have {longest} "
                "(episode.max_context_tokens)"
            )
        return min(room, session.lease.max_tokens)

    def _commit(self, session: Session, call: _Call, request: Chat, parsed: Parsed) -> ChatReply:
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
            finish=response.finish_reason,
            content=content,
            reasoning=parsed.reasoning,
            calls=[(each.name, each.arguments) for each in parsed.calls],
            untrained=request.untrained,
        )
        if response.finish_reason == "length" and call.limited:
            session.cut.add(node.id)
        session.resumes += response.submissions - 1
        self.figures.malformed(parsed.malformed)
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

    def _text_of(self, request: Chat, tools: Sequence[Any], response: Response) -> GrowingText | None:
        """The decoder for the text of a call that is sent as it is sampled; None if only the whole answer is sent.

        The whole answer is sent if the agent did not ask to stream, or if it may hold tool calls, reasoning or stop
        strings.
        """
        if not request.stream or tools or response.stops != Stops() or self._renderer.report.reasoning_parser != "none":
            return None
        return GrowingText(self._renderer.text)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


class GrowingText:
    """The text that ``decode`` makes of tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context = 0
        """The first token that is decoded."""
        self._read = 0
        """The first token behind the last one that ended with a whole character."""
        self._returned = 0
        """Characters behind that token that were returned."""

    def more(self, tokens: Sequence[int]) -> str:
        """The text that is new with ``tokens``, all there are by now."""
        before = len(self._decode(tokens[self._context : self._read])) + self._returned
        text = self._decode(tokens[self._context :])
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new = whole[before:]
        if len(whole) == len(text):
            self._context, self._read, self._returned = self._read, len(tokens), 0
        else:
            self._returned += len(new)
        return new


def _before_stop(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Text for the agent, and the stop string behind it, which is sampled and trained and no part of the text."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, ""
    at, stop = min(found)
    return text[:at], stop
