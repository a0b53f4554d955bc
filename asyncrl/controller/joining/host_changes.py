"""The controller's shell around ``Membership``: hosts that join and leave during the run.

Each change is written to the run's private folder before it is sent or answered, so that a successor of the controller
admits the same actors. A new host may start once every actor that it may call has taken in its keys, because an actor
that is refused does not connect again.

Fails with InvalidRequest for what cannot be done, and with NotKept for what is not on disk in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import replace

from asyncrl.controller.joining.known_hosts import KnownHost, KnownHosts
from asyncrl.controller.joining.membership import Member, Membership, can_serve
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
        self._membership = Membership(actor.context.credentials.curve)
        self._start_timeout_s = actor.config.supervision.start_timeout_s
        self._actor, self._registry, self._run, self._hosts = actor, registry, run, hosts
        self._run_changed, self._now, self._log = changed, actor.clock.now, actor.log
        self._path = actor.context.run_dir / "private" / MEMBERS_FILE
        self.members = Members(number=0)
        """Members that every actor may know: those that were sent."""
        self._kept = 0
        """Number of the members on disk, as a successor would know them."""
        self._given_up: dict[str, ActorEnded] = {}
        """Ends of actors that are not started again, on hosts that do not serve yet."""
        self._taken_in: dict[str, tuple[int, int]] = {}
        """Incarnation of each actor, and the number of the members that it knows."""
        self._changed = asyncio.Event()
        self._watchers = ParkingLot()

    # --- its life ---

    def recall(self) -> None:
        """Restore what an earlier controller has kept, before any actor is admitted. Raises OSError."""
        try:
            described = json.loads(self._path.read_text())
        except FileNotFoundError:
            return
        self._membership.recall(described, self._now())
        for name in self._membership.belonging():
            self._run.joined(name)
        departed = [member for member in self._membership.hosts.values() if member.stage != "joined"]
        self._run.left([name for member in departed for name in member.actors], self._now())
        self.members = self._membership.members
        self._kept = self.members.number
        self._run.tell_members(self.members.number, self._membership.leaving)

    async def run(self) -> None:
        """Keep and send each change, and let hosts go that do not get ready in time. Until cancelled."""
        while True:
            limit_s = self._start_timeout_s
            for host in self._membership.waiting():
                if self._now() >= host.since + limit_s:
                    self._dismiss(host, f"not ready {limit_s:g} s after it joined (supervision.start_timeout_s)")
            left_s = [host.since + limit_s - self._now() for host in self._membership.waiting()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(left_s)) if left_s else None):
                    await self._changed.wait()
            self._changed.clear()
            if self._membership.number != self.members.number:
                await self._keep_and_send()

    async def _keep_and_send(self) -> None:
        # Read before the write: a change during the write sets ``_changed``, and is kept and sent next.
        members, leaving = self._membership.members, self._membership.leaving
        left_while_lost = self._run.lost_hosts.keys() - set(map(str, self._hosts.lost.values()))
        text = json.dumps(self._membership.describe())
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
        member = self._membership.on_trial(end.name)
        if member is None:
            return False
        if member not in self._membership.waiting():
            self._set_aside(end)
            return True
        self._given_up[end.name] = end
        if not can_serve(member, self._given_up):
            self._dismiss(member, f"{end.name}: {end.reason}")
        return True

    def _set_aside(self, end: ActorEnded) -> None:
        reason = end.reason or describe_exit(end.exit_code)
        # As after any other failure: an exit that no restart mends fails the run only if the actor has served.
        self._run.ended(end.name, 1, True, reason, end.log, self._now(), incarnation=end.incarnation)

    def host_lost(self, host: KnownHost) -> bool:
        """True if this host had to leave, so that the run does not wait for it."""
        member = self._membership.hosts.get(host.agent)
        if member is None or member.stage == "joined":
            return False
        self._forget_lost(member)
        return True

    async def host_left(self, agent: str, park_s: float) -> None:
        """The agent reports that everything on its host has ended. Returns once that is kept. Raises NotKept."""
        member = self._membership.hosts.get(agent)
        if member is None or member.stage == "joined":
            return
        # This is the agent's last message, so it may not have reported the end of each actor.
        for name, incarnation in self._incarnations(member.actors).items():
            self._registry.ended(name, incarnation, self._now())
        if self._membership.left(agent, self._incarnations([agent, *member.actors])):
            self._log.info("host has left", host=member.host, agent=agent, reason=member.reason)
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
        membership, before = self._membership, self._membership.number
        hosts = membership.join(request, self._known(), self._names(), self._now())
        if membership.number != before:
            self._log.info("hosts join", hosts={host.host: host.actors for host in hosts})
            self._changed.set()
        return Joined(
            hosts=[membership.described(host) for host in hosts],
            peers=self._actor.roster.peers,
            waiting_for=self._without(max(host.number for host in hosts)),
        )

    @handler
    async def leave(self, request: Leave, caller: Caller) -> MemberHost:
        """Let a host go; answered once that is kept. Raises InvalidRequest, NotKept."""
        if self._membership.departure(request.host) is None:
            self._check_run("leave")
        before = self._membership.number
        serving = self._run.expected & self._registry.ready()
        member = self._membership.leave(request, self._known(), serving, self._run.awaited)
        if self._membership.number != before:
            self._log.info("host leaves", host=member.host, actors=member.actors, within_s=request.within_s)
            self._part_with(member)
        await self._until_kept(caller.park_s)
        return self._membership.described(member)

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

    def _dismiss(self, member: Member, reason: str) -> None:
        self._log.error("joined host does not serve, so it has to leave", host=member.host, reason=reason)
        self._part_with(self._membership.let_go(member, 0.0, reason))

    def _part_with(self, member: Member) -> None:
        """The run continues without this host."""
        self._run.left(member.actors, self._now())
        if member.agent not in self._hosts.known:
            # Its agent has never registered, so it will not report that it has left.
            self._membership.left(member.agent, {})
        elif member.agent in self._hosts.lost:
            self._forget_lost(member)
        self._changed.set()

    def _forget_lost(self, member: Member) -> None:
        self._hosts.forget(member.agent)
        if self._membership.left(member.agent, self._incarnations(member.actors), lost=True):
            self._changed.set()

    async def _until_kept(self, park_s: float) -> None:
        number = self._membership.number
        if not await self._watchers.until(lambda: self._kept >= number or None, park_s):
            raise NotKept(str(self._path))

    def _check_run(self, what: str) -> None:
        if self._run.phase not in ("starting", "running"):
            state = "being preempted" if self._run.phase == "preempting" else "ending"
            raise InvalidRequest(f"no host can {what} any more: the run is {state}")

    def _without(self, number: int) -> list[str]:
        """Actors that may be called and have not taken in these members."""
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
        for agent, member in self._membership.hosts.items():
            also = frozenset({member.address} - {""})
            if (host := found.get(agent)) is not None:
                found[agent] = replace(host, also=host.also | also)
            elif member.stage in ("joined", "leaving"):
                # A joined host may start, and be named again, before its agent registers.
                found[agent] = KnownHost(agent, member.host, frozenset(member.actors), also)
        return sorted(found.values(), key=lambda host: int(host.agent.partition("/")[2]))

    def _names(self) -> list[str]:
        """All names of the run."""
        return [*self._run.expected, *self._hosts.known, *self._registry.entries, *self._actor.roster.peers]

    def _incarnations(self, names: Iterable[str]) -> dict[str, int]:
        entries = self._registry.entries
        return {name: entries[name].record.incarnation for name in names if name in entries}
