"""Hosts that join and leave during the run: the controller's handlers around ``Membership``, which decides.

Each change is *kept*, that is written to the run's private folder, before the controller sends it or answers the
request. So a successor of the controller admits the same actors. An actor that was refused once does not connect again.
So a new host may start only once every actor that it may call has admitted its keys.

Fails with InvalidRequest for a request that cannot be met, and with NotKept if a change is not on disk in time.
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
    """Handles hosts that join and leave, for the controller ``actor``; calls ``changed`` after each change."""

    def __init__(
        self, actor: Actor, registry: Registry, run: RunStateMachine, hosts: KnownHosts, *, changed: Callable[[], None]
    ) -> None:
        self._membership = Membership(curve=actor.context.credentials.curve)
        self._start_timeout_s = actor.config.supervision.start_timeout_s
        self._actor, self._registry, self._run, self._hosts = actor, registry, run, hosts
        self._run_changed, self._now, self._log = changed, actor.clock.now, actor.log
        self._path = actor.context.run_dir / "private" / MEMBERS_FILE
        self.members = self._membership.members
        """Members that are sent to actors: kept on disk, and taken in by this controller itself."""
        self._kept_number = 0
        """Number of the members on disk, from which a successor would continue."""
        self._taken_in: dict[str, tuple[int, int]] = {}
        """Incarnation of each actor, and the number of the members that it knows. An entry may precede the actor's
        registration with a successor of the controller."""
        self._waiting_since: dict[str, float] = {}
        """By agent of a joining host: time since which this controller waits for a rollouter there to be ready."""
        self._last_ends: dict[str, ActorEnded] = {}
        """By actor of a joining host: its end, if its agent does not start it again."""
        self._changed = asyncio.Event()
        """Set when ``run`` has a change to keep and send, or a host to wait for."""
        self._watchers = ParkingLot()
        """Calls that wait for members to be kept, sent or taken in."""

    # --- its life ---

    def recall(self) -> None:
        """Restore the members that an earlier controller has kept, if any; called before any actor is admitted.

        Raises OSError.
        """
        try:
            self._membership.recall(msgspec.json.decode(self._path.read_bytes(), type=Members))
        except FileNotFoundError:
            return
        self.members = self._membership.members
        self._kept_number = self.members.number
        for name in self._membership.belonging():
            self._run.joined(name)
        departed = [name for host in self.members.hosts if not host.takes_part for name in host.actors]
        self._run.left(departed, self._now())
        self._run.tell_members(self.members.number, self._membership.leaving)

    async def run(self) -> None:
        """Keep and send each change, and make joined hosts leave that are not ready in time; until cancelled."""
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
        """Write the members to disk, again and again until that works; then answer parked calls and update the run."""
        # Read before the write: a change during the write sets ``_changed``, and is kept and sent next.
        members, leaving = self._membership.members, self._membership.leaving
        # The known hosts do not contain these any more, and the run's state still names them as lost.
        left_while_lost = self._run.lost_hosts.keys() - set(map(str, self._hosts.lost.values()))
        text = msgspec.json.encode(members).decode()
        while True:
            try:
                await asyncio.to_thread(replace_file, self._path, text, mode=0o600)
                break
            except OSError as error:
                self._log.error("cannot write the members, so they are not sent", error=str(error))
                await asyncio.sleep(WRITE_AGAIN_S)
        self._kept_number = members.number
        self._watchers.wake()
        # Parked calls are answered in this pause: after ``take_in`` no message reaches a host that has left.
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
        """Note that an incarnation of an actor knows the members of this number."""
        if number >= 0 and self._taken_in.get(name) != (incarnation, number):
            self._taken_in[name] = (incarnation, number)
            self._watchers.wake()

    def is_gone(self, name: str) -> bool:
        """Whether an actor or agent has left for good."""
        return name in self._membership.gone

    def ready(self, names: set[str]) -> None:
        """Let each joined host serve once one of its rollouters is ready, and add its actors to the run.

        ``names`` are all ready actors. An actor of such a host that its agent no longer restarts has to rest.
        """
        new = self._membership.ready(names)
        if not new:
            return
        self._log.info("joined actors serve", actors=new)
        belonging = self._membership.belonging()
        for name in belonging:
            if name not in self._run.expected:
                self._run.joined(name)
        for name in self._last_ends.keys() & belonging:
            self._let_rest(self._last_ends.pop(name))
        self._changed.set()

    def drop_unserved(self, end: ActorEnded) -> bool:
        """Handle the last ``end`` of an actor that has never served on a joined host; its agent does not restart it.

        The actor has to rest if its host serves. If no rollouter of a joining host can serve any more, the host has to
        leave. Returns False, and does nothing, for any other actor; the caller handles its end.
        """
        host = self._membership.on_trial(end.name)
        if host is None:
            return False
        if host.stage == "serving":
            self._let_rest(end)
            return True
        self._last_ends[end.name] = end
        if not can_serve(host, self._last_ends):
            self._dismiss(host, f"{end.name}: {end.reason}")
        return True

    def _let_rest(self, end: ActorEnded) -> None:
        reason = end.reason or describe_exit(end.exit_code)
        # Exit code 1 instead of its own: a code that no restart mends fails the run only if the actor has served.
        now = self._now()
        self._run.ended(
            end.name, exit_code=1, fatal=True, reason=reason, log=end.log, now=now, incarnation=end.incarnation
        )

    def host_lost(self, host: KnownHost) -> bool:
        """Handle the loss of a host that is leaving. Returns False, and does nothing, for any other host."""
        member = self._membership.find(host.agent)
        if member is None or member.takes_part:
            return False
        self._forget_lost(member)
        return True

    async def host_left(self, agent: str, park_s: float) -> None:
        """Handle an agent's report that everything on its leaving host has ended. Returns once this change is kept.

        Does nothing if the host is not leaving. Raises NotKept if the change is not on disk within ``park_s``.
        """
        host = self._membership.find(agent)
        if host is None or host.takes_part:
            return
        incarnations = self._incarnations(host)
        # This is the agent's last message, and it may not have reported the end of each actor.
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
        """Admit new hosts. Parks until all actors have admitted the keys of these hosts.

        When the parking time is over, ``waiting_for`` of the answer names the actors that have not. Raises
        InvalidRequest.
        """

        def joined() -> Joined | None:
            answer = self._join(request)
            return None if answer.waiting_for else answer

        return await self._watchers.until(joined, caller.park_s) or self._join(request)

    def _join(self, request: Join) -> Joined:
        """Admit the hosts of a request, once; none while the run starts. Raises InvalidRequest.

        ``waiting_for`` of the answer is not empty while the hosts may not start.
        """
        self._check_run("join")
        if self._run.phase == "starting":
            return Joined(hosts=[], waiting_for=self._run.waiting_for)
        members_before, peers = self._membership.members, self._actor.roster.peers
        taken = [*self._run.expected, *self._hosts.known, *self._registry.entries, *peers]
        hosts = self._membership.join(request, self._nameable_hosts(), taken)
        if self._membership.members is not members_before:
            self._log.info("hosts join", hosts={host.host: host.actors for host in hosts})
            self._changed.set()
        number = max(host.number for host in hosts)
        return Joined(hosts=hosts, peers=peers, waiting_for=self._not_up_to_date(number))

    @handler
    async def leave(self, request: Leave, caller: Caller) -> MemberHost:
        """Let a host leave the run; answers once the change is kept. Raises InvalidRequest, NotKept."""
        if self._membership.departure(request.host) is None:
            self._check_run("leave")
        members_before, serving = self._membership.members, self._run.expected & self._registry.ready()
        host = self._membership.leave(request, self._nameable_hosts(), serving, self._run.awaited)
        if self._membership.members is not members_before:
            self._log.info("host leaves", host=host.host, actors=host.actors, within_s=request.within_s)
            self._remove_from_run(host)
        await self._until_kept(caller.park_s)
        # A host whose agent never registered, or is lost, has left by now.
        return self._membership.find(host.agent) or host

    @handler
    async def watch_members(self, request: WatchMembers, caller: Caller) -> Members:
        """Answer with the kept members. Parks while the caller has the same number of members."""

        def news() -> Members | None:
            return self.members if self.members.number != request.seen else None

        return await self._watchers.until(news, caller.park_s) or self.members

    def wake(self) -> None:
        """Wake parked calls after a change of the run or the registry."""
        self._watchers.wake()

    # --- private ---

    def _dismiss(self, host: MemberHost, reason: str) -> None:
        """Make a joined host leave at once, because it does not serve."""
        self._log.error("joined host does not serve, so it has to leave", host=host.host, reason=reason)
        self._remove_from_run(self._membership.let_go(host, 0.0, reason))

    def _remove_from_run(self, host: MemberHost) -> None:
        """Remove a leaving host from the run. If its agent cannot report its end any more, it has left at once."""
        self._run.left(host.actors, self._now())
        if host.agent not in self._hosts.known:
            # Its agent has never registered, so it cannot report the end.
            self._membership.left(host.agent, {})
        elif host.agent in self._hosts.lost:
            self._forget_lost(host)
        self._changed.set()

    def _forget_lost(self, host: MemberHost) -> None:
        self._hosts.forget(host.agent)
        if self._membership.left(host.agent, self._incarnations(host), lost=True):
            self._changed.set()

    async def _until_kept(self, park_s: float) -> None:
        """Wait until the present members are on disk. Raises NotKept after ``park_s``."""
        number = self._membership.members.number
        if not await self._watchers.until(lambda: self._kept_number >= number or None, park_s):
            raise NotKept(str(self._path))

    def _check_run(self, what: str) -> None:
        if self._run.phase not in ("starting", "running"):
            state = "being preempted" if self._run.phase == "preempting" else "ending"
            raise InvalidRequest(f"no host can {what} any more: the run is {state}")

    def _not_up_to_date(self, number: int) -> list[str]:
        """Actors that may be called and have not taken in the members of this number, or of a later one.

        Names the file of the members instead if the controller has not taken them in yet.
        """
        if self.members.number < number:
            return [f"{MEMBERS_FILE} of the controller"]
        # An actor that has not spoken takes the members in before it can be called. An agent needs no members.
        spoken = [
            (name, entry.record.incarnation)
            for name, entry in self._registry.entries.items()
            if role_of(name) in ROLES and entry.heard_of and entry.spoken
        ]
        return [name for name, incarnation in spoken if self._taken_in.get(name, (0, -1)) < (incarnation, number)]

    def _nameable_hosts(self) -> list[KnownHost]:
        """Return all hosts that a user may name: registered ones, and joined ones whose agent is not registered."""
        hosts = dict(self._hosts.known)
        for host in self._membership.members.hosts:
            also = frozenset({host.address} - {""})
            if (known := hosts.get(host.agent)) is not None:
                hosts[host.agent] = replace(known, also=known.also | also)
            elif host.stage not in ("lost", "left"):
                # A user may name a joined host before its agent registers.
                hosts[host.agent] = KnownHost(host.agent, host.host, frozenset(host.actors), also)
        return sorted(hosts.values(), key=lambda known: int(known.agent.partition("/")[2]))

    def _incarnations(self, host: MemberHost) -> dict[str, int]:
        entries = self._registry.entries
        return {name: entries[name].record.incarnation for name in host.names if name in entries}
