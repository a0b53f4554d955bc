"""The controller's shell around ``Membership``: hosts that join and leave during the run.

Each change is written to the run's private folder before it is sent or answered, so that a successor of the controller
admits the same actors. A new host may start once every actor that it may call has taken in its keys, because an actor
that is refused does not connect again.

Fails with InvalidRequest for what cannot be done, and with NotKept for what is not on disk in time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgspec

from asyncrl.controller.joining.known_hosts import KnownHost, KnownHosts
from asyncrl.controller.joining.membership import Membership, can_serve
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.core.errors import InvalidRequest, NotKept
from asyncrl.core.files import replace_file
from asyncrl.core.roles import ROLES, role_of
from asyncrl.messages.actors import ActorEnded
from asyncrl.messages.hosts import Join, Joined, Leave, MemberHost, Members, WatchMembers
from asyncrl.rpc.actor import Actor, Caller, handler
from asyncrl.rpc.lifecycle.registry import Registry
from asyncrl.rpc.lifecycle.supervision import describe_exit
from asyncrl.rpc.parking import ParkingLot

MEMBERS_FILE = "members.json"
"""File in the run's private folder; absent until a host joins or leaves."""
WRITE_AGAIN_S = 1.0


class HostChanges:
    """The shell, made by the controller ``actor``; ``changed`` is called after each change of the run."""

    def __init__(
        self, actor: Actor, registry: Registry, run: RunStateMachine, hosts: KnownHosts, *, changed: Callable[[], None]
    ) -> None:
        self._membership = Membership(curve=actor.context.credentials.curve)
        self._start_timeout_s = actor.config.supervision.start_timeout_s
        self._actor, self._registry, self._run, self._hosts = actor, registry, run, hosts
        self._run_changed, self._now, self._log = changed, actor.clock.now, actor.log
        self._path = actor.context.run_dir / "private" / MEMBERS_FILE
        self.members = self._membership.members
        """Members that every actor may know: those that this controller has taken in itself."""
        self._kept = 0
        """Number of the members on disk, as a successor would know them."""
        self._taken_in: dict[str, tuple[int, int]] = {}
        """Incarnation of each actor, and the number of the members that it knows. An actor may say so before it
        registers again with a successor of the controller."""
        self._waiting_since: dict[str, float] = {}
        """Time since when this controller waits for a rollouter of a joined host, by agent."""
        self._given_up: dict[str, ActorEnded] = {}
        """Ends of actors that are not started again, on hosts that do not serve yet."""
        self._changed = asyncio.Event()
        self._watchers = ParkingLot()

    # --- its life ---

    def recall(self) -> None:
        """Restore what an earlier controller has kept, before any actor is admitted. Raises OSError."""
        try:
            self._membership.recall(msgspec.json.decode(self._path.read_bytes(), type=Members))
        except FileNotFoundError:
            return
        self.members = self._membership.members
        self._kept = self.members.number
        for name in self._membership.belonging():
            self._run.joined(name)
        departed = [name for host in self.members.hosts if not host.takes_part for name in host.actors]
        self._run.left(departed, self._now())
        self._run.tell_members(self.members.number, self._membership.leaving)

    async def run(self) -> None:
        """Keep and send each change, and let hosts go that do not get ready in time. Until cancelled."""
        while True:
            now, limit_s, waiting = self._now(), self._start_timeout_s, self._membership.at("joining")
            left_s = [self._waiting_since.setdefault(host.agent, now) + limit_s - now for host in waiting]
            for host, left in zip(waiting, left_s, strict=True):
                if left <= 0:
                    self._dismiss(host, f"not ready {limit_s:g} s after it joined (supervision.start_timeout_s)")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(left_s)) if left_s else None):
                    await self._changed.wait()
            self._changed.clear()
            if self._membership.members is not self.members:
                await self._keep_and_send()

    async def _keep_and_send(self) -> None:
        # Read before the write: a change during the write sets ``_changed``, and is kept and sent next.
        members, leaving = self._membership.members, self._membership.leaving
        left_while_lost = self._run.lost_hosts.keys() - set(map(str, self._hosts.lost.values()))
        text = msgspec.json.encode(members).decode()
        while True:
            try:
                await asyncio.to_thread(replace_file, self._path, text, mode=0o600)
                break
            except OSError as error:
                self._log.error("cannot write the members, so they are not sent", error=str(error))
                await asyncio.sleep(WRITE_AGAIN_S)
        self._kept = members.number
        self._watchers.wake()
        # Calls that wait for the write are answered first: a host that has left is not spoken to any more.
        await asyncio.sleep(0)
        self._actor.take_in(members)
        self.members = members
        # In one step, so that a lost host that leaves is not reported as back.
        for host in left_while_lost:
            self._run.lost_host_left(host)
        self._run.tell_members(members.number, leaving)
        self._watchers.wake()
        self._run_changed()

    # --- events of the run ---

    def taken_in(self, name: str, incarnation: int, number: int) -> None:
        """An actor knows the members of this number."""
        if number >= 0 and self._taken_in.get(name) != (incarnation, number):
            self._taken_in[name] = (incarnation, number)
            self._watchers.wake()

    def is_gone(self, name: str) -> bool:
        """Whether an actor or agent has left for good."""
        return name in self._membership.gone

    def ready(self, names: set[str]) -> None:
        """``names`` are all ready actors."""
        new = self._membership.ready(names)
        if not new:
            return
        self._log.info("joined actors serve", actors=new)
        belonging = self._membership.belonging()
        for name in belonging:
            if name not in self._run.expected:
                self._run.joined(name)
        for name in self._given_up.keys() & belonging:
            self._set_aside(self._given_up.pop(name))
        self._changed.set()

    def given_up(self, end: ActorEnded) -> bool:
        """An actor is not started again. False if it has served, so that its end is one like any other in the run.

        Otherwise it is set aside, or its host has to leave if no rollouter there can serve.
        """
        host = self._membership.on_trial(end.name)
        if host is None:
            return False
        if host.stage == "serving":
            self._set_aside(end)
            return True
        self._given_up[end.name] = end
        if not can_serve(host, self._given_up):
            self._dismiss(host, f"{end.name}: {end.reason}")
        return True

    def _set_aside(self, end: ActorEnded) -> None:
        reason = end.reason or describe_exit(end.exit_code)
        # As after any other failure: an exit that no restart mends fails the run only if the actor has served.
        self._run.ended(end.name, 1, True, reason, end.log, self._now(), incarnation=end.incarnation)

    def host_lost(self, host: KnownHost) -> bool:
        """True if this host had to leave, so that the run does not wait for it."""
        member = self._membership.find(host.agent)
        if member is None or member.takes_part:
            return False
        self._forget_lost(member)
        return True

    async def host_left(self, agent: str, park_s: float) -> None:
        """The agent reports that everything on its host has ended. Returns once that is kept. Raises NotKept."""
        host = self._membership.find(agent)
        if host is None or host.takes_part:
            return
        incarnations = self._incarnations(host)
        # This is the agent's last message, so it may not have reported the end of each actor.
        for name in incarnations.keys() - {agent}:
            self._registry.ended(name, incarnations[name], self._now())
        if self._membership.left(agent, incarnations):
            self._log.info("host has left", host=host.host, agent=agent, reason=host.reason)
            self._hosts.forget(agent)
            self._changed.set()
        await self._until_kept(park_s)

    # --- requests ---

    @handler
    async def join(self, request: Join, caller: Caller) -> Joined:
        """Let hosts take part. Raises InvalidRequest."""

        def joined() -> Joined | None:
            answer = self._join(request)
            return None if answer.waiting_for else answer

        return await self._watchers.until(joined, caller.park_s) or self._join(request)

    def _join(self, request: Join) -> Joined:
        self._check_run("join")
        if self._run.phase == "starting":
            return Joined(hosts=[], waiting_for=self._run.waiting_for)
        before, peers = self._membership.members, self._actor.roster.peers
        taken = [*self._run.expected, *self._hosts.known, *self._registry.entries, *peers]
        hosts = self._membership.join(request, self._known(), taken)
        if self._membership.members is not before:
            self._log.info("hosts join", hosts={host.host: host.actors for host in hosts})
            self._changed.set()
        number = max(host.number for host in hosts)
        return Joined(hosts=hosts, peers=peers, waiting_for=self._not_up_to_date(number))

    @handler
    async def leave(self, request: Leave, caller: Caller) -> MemberHost:
        """Let a host go; answered once that is kept. Raises InvalidRequest, NotKept."""
        if self._membership.departure(request.host) is None:
            self._check_run("leave")
        before, serving = self._membership.members, self._run.expected & self._registry.ready()
        host = self._membership.leave(request, self._known(), serving, self._run.awaited)
        if self._membership.members is not before:
            self._log.info("host leaves", host=host.host, actors=host.actors, within_s=request.within_s)
            self._part_with(host)
        await self._until_kept(caller.park_s)
        # A host whose agent never registered, or is lost, has left by now.
        return self._membership.find(host.agent) or host

    @handler
    async def watch_members(self, request: WatchMembers, caller: Caller) -> Members:
        """Park until the members are others."""

        def news() -> Members | None:
            return self.members if self.members.number != request.seen else None

        return await self._watchers.until(news, caller.park_s) or self.members

    def wake(self) -> None:
        """The run or the registry has changed."""
        self._watchers.wake()

    # --- within ---

    def _dismiss(self, host: MemberHost, reason: str) -> None:
        self._log.error("joined host does not serve, so it has to leave", host=host.host, reason=reason)
        self._part_with(self._membership.let_go(host, 0.0, reason))

    def _part_with(self, host: MemberHost) -> None:
        """The run continues without this host."""
        self._run.left(host.actors, self._now())
        if host.agent not in self._hosts.known:
            # Its agent has never registered, so it will not report that it has left.
            self._membership.left(host.agent, {})
        elif host.agent in self._hosts.lost:
            self._forget_lost(host)
        self._changed.set()

    def _forget_lost(self, host: MemberHost) -> None:
        self._hosts.forget(host.agent)
        if self._membership.left(host.agent, self._incarnations(host), lost=True):
            self._changed.set()

    async def _until_kept(self, park_s: float) -> None:
        number = self._membership.members.number
        if not await self._watchers.until(lambda: self._kept >= number or None, park_s):
            raise NotKept(str(self._path))

    def _check_run(self, what: str) -> None:
        if self._run.phase not in ("starting", "running"):
            state = "being preempted" if self._run.phase == "preempting" else "ending"
            raise InvalidRequest(f"no host can {what} any more: the run is {state}")

    def _not_up_to_date(self, number: int) -> list[str]:
        """Actors that may be called and have not taken in the members of this number, or of a later one."""
        if self.members.number < number:
            return [f"{MEMBERS_FILE} of the controller"]
        # An actor that has not spoken takes the members in before it can be called. An agent needs none.
        spoken = [
            (name, entry.record.incarnation)
            for name, entry in self._registry.entries.items()
            if role_of(name) in ROLES and entry.heard_of and entry.spoken
        ]
        return [name for name, incarnation in spoken if self._taken_in.get(name, (0, -1)) < (incarnation, number)]

    def _known(self) -> list[KnownHost]:
        found = dict(self._hosts.known)
        for host in self._membership.members.hosts:
            also = frozenset({host.address} - {""})
            if (known := found.get(host.agent)) is not None:
                found[host.agent] = replace(known, also=known.also | also)
            elif host.stage not in ("lost", "left"):
                # A joined host may start, and be named again, before its agent registers.
                found[host.agent] = KnownHost(host.agent, host.host, frozenset(host.actors), also)
        return sorted(found.values(), key=lambda known: int(known.agent.partition("/")[2]))

    def _incarnations(self, host: MemberHost) -> dict[str, int]:
        entries = self._registry.entries
        return {name: entries[name].record.incarnation for name in host.names if name in entries}
