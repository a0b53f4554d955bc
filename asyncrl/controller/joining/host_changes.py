"""The controller's shell around ``membership``: hosts that join and leave while the run goes on.

Each change is on disk, in the run's private folder, before anybody is told or answered, so that a successor of the
controller admits all that this one has. A new host is told to begin once every actor that it may call has taken in its
keys, for one that is turned away does not knock again. A host that is to leave is kept waiting while nobody else serves
but somebody is expected to, as when the controller has just started again.

Fails with InvalidRequest for what cannot be done, and with NotKept for what is not on disk in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from asyncrl.controller.joining.hosts import Hosts
from asyncrl.controller.joining.hosts import ReportedHost as HeardHost
from asyncrl.controller.joining.membership import Departure, Guest, KnownHost, Membership, NobodyServes
from asyncrl.controller.state.run_state import RunStateMachine
from asyncrl.errors import InvalidRequest, NotKept
from asyncrl.files import replace_file
from asyncrl.messages.hosts import Join, Joined, Leave, LeaveBegun, Members
from asyncrl.roles import ROLES, role_of
from asyncrl.runtime.actor import Actor
from asyncrl.runtime.lifecycle.registry import Registry
from asyncrl.runtime.parking import ParkingLot

MEMBERS_FILE = "members.json"
"""File in the run's private folder; absent as long as nobody has joined or left."""
WRITE_AGAIN_S = 1.0


class ComingAndGoing:
    """The shell, made by the controller ``actor``; ``tell`` says that the run changed."""

    def __init__(
        self, actor: Actor, registry: Registry, run: RunStateMachine, hosts: Hosts, *, tell: Callable[[], None]
    ) -> None:
        self._membership = Membership(actor.context.credentials.curve)
        self._start_timeout_s = actor.config.supervision.start_timeout_s
        self._actor, self._registry, self._run, self._hosts = actor, registry, run, hosts
        self._tell, self._now, self._log = tell, actor.clock.now, actor.log
        self._path = actor.context.run_dir / "private" / MEMBERS_FILE
        self._told = Members(number=0)
        """Members that everybody may know."""
        self._kept = 0
        """Number of the members on disk, as a successor would know them."""
        self._left_while_lost: list[str] = []
        """Hosts that the run still counts as lost until it is told that they leave."""
        self._taken_in: dict[str, tuple[int, int]] = {}
        """Incarnation of each actor, and the number of the members that it knows."""
        self._changed = asyncio.Event()
        self._watchers = ParkingLot()

    # --- its life ---

    def recall(self) -> None:
        """Go on where an earlier controller was; to be called before anybody is let in. Raises OSError."""
        try:
            described: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return
        membership = self._membership
        membership.recall(described, self._now())
        for name in membership.serving:
            self._run.joined(name)
        departing = [name for departure in membership.departures.values() for name in departure.actors]
        self._run.left(departing, self._now())
        self._told = membership.members
        self._kept = self._told.number
        self._run.tell_members(self._told.number, membership.leaving)

    @property
    def members(self) -> Members:
        """The members as they were told."""
        return self._told

    async def run(self) -> None:
        """Keep and tell what changes, and let hosts go that do not come up. Until cancelled."""
        while True:
            now = self._now()
            self._dismiss_late(now)
            deadline = self._membership.next_deadline(now, self._start_timeout_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if deadline is None else max(0.0, deadline - now)):
                    await self._changed.wait()
            self._changed.clear()
            if self._membership.number != self._told.number:
                await self._keep_and_tell()

    async def _keep_and_tell(self) -> None:
        membership = self._membership
        # As they are before the write: a change during it sets ``_changed``, and is kept and told next.
        members, leaving = membership.members, membership.leaving
        lost, self._left_while_lost = self._left_while_lost, []
        text = json.dumps(membership.describe())
        while True:
            try:
                await asyncio.to_thread(replace_file, self._path, text, mode=0o600)
                break
            except OSError as error:
                self._log.error("members are not kept, so nobody is told", error=str(error))
                await asyncio.sleep(WRITE_AGAIN_S)
        self._kept = members.number
        self._watchers.wake()
        # Callers that wait for this alone are answered first: a host that has left is not spoken to any more.
        await asyncio.sleep(0)
        self._actor.take_in(members)
        self._told = members
        # Together, so that nobody takes such a host to be back.
        for host in lost:
            self._run.lost_host_left(host)
        self._run.tell_members(members.number, leaving)
        self._watchers.wake()
        self._tell()

    def _dismiss_late(self, now: float) -> None:
        for guest in self._membership.overdue(now, self._start_timeout_s):
            reason = f"not ready {self._start_timeout_s:g} s after it joined (supervision.start_timeout_s)"
            self._dismiss(guest, reason)

    def _dismiss(self, guest: Guest, reason: str) -> bool:
        departure = self._membership.dismiss(guest.agent, reason, self._serving)
        if departure is None:
            return False
        self._log.error("host that joined does not serve, and is let go", host=guest.host, reason=reason)
        self._part_with(departure)
        return True

    def _part_with(self, departure: Departure) -> None:
        """The run goes on without this host from here on."""
        self._run.left(departure.actors, self._now())
        if departure.agent not in self._hosts.known:
            # Nobody of it was ever heard of, so nobody would say that it has left.
            self._membership.left(departure.agent, {})
        elif (host := self._hosts.lost.get(departure.agent)) is not None:
            self._left_while_lost.append(str(host))
            self._forget_lost(departure.agent, departure.actors)
        self._changed.set()

    def _forget_lost(self, agent: str, actors: Iterable[str]) -> None:
        # Known by the list of an earlier controller it may be, though it has left.
        self._hosts.forget(agent)
        if self._membership.lost(agent, self._incarnations(actors)):
            self._changed.set()

    # --- what is heard ---

    def taken_in(self, name: str, incarnation: int, number: int) -> None:
        """An actor knows the members of this number."""
        if number >= 0 and self._taken_in.get(name) != (incarnation, number):
            self._taken_in[name] = (incarnation, number)
            self._watchers.wake()

    def is_gone(self, name: str) -> bool:
        """Whether an actor or agent has left for good."""
        return name in self._membership.gone

    def ready(self, names: set[str]) -> None:
        """These are all that are ready."""
        for name in self._membership.ready(names):
            self._log.info("serves from now on", actor=name)
            self._run.joined(name)
            self._changed.set()
        # A host that was late and had to stay may go once another serves.
        self._dismiss_late(self._now())

    def given_up(self, name: str, reason: str) -> bool:
        """An actor will not be started again. True if it was on trial, so that the run goes on without it."""
        agent = self._membership.host_on_trial(name)
        if not agent:
            return False
        if self._dismiss(self._membership.guests[agent], f"{name}: {reason}"):
            return True
        # Nobody else serves: it counts as one of the run from here on, which may have to end for it.
        self._run.joined(name)
        return False

    def host_lost(self, host: HeardHost) -> bool:
        """True if this host was about to leave, and so is not waited for."""
        if host.agent not in self._membership.departures:
            return False
        self._forget_lost(host.agent, host.actors)
        return True

    async def host_left(self, agent: str, park_s: float) -> None:
        """Everything on a host has ended, says its agent. Answered as ``leave``. Raises NotKept."""
        departure = self._membership.departures.get(agent)
        if departure is None:
            return
        # The agent's last word: ends of its actors that have not been heard of are not told any more.
        for name, incarnation in self._incarnations(departure.actors).items():
            self._registry.ended(name, incarnation, self._now())
        names = [agent, *departure.actors]
        if self._membership.left(agent, self._incarnations(names)):
            self._log.info("host has left", host=departure.host, agent=agent, reason=departure.reason)
            self._hosts.forget(agent)
            self._changed.set()
        await self._until_kept(park_s)

    # --- what is asked ---

    async def join(self, request: Join, park_s: float) -> Joined:
        """Let hosts take part. Raises InvalidRequest."""
        self._check_run("join")
        await self._watchers.until(lambda: True if self._run.phase != "starting" else None, park_s / 2)
        self._check_run("join")
        if self._run.phase == "starting":
            return Joined(hosts=[], waiting_for=self._run.waiting_for)
        membership = self._membership
        number = membership.number
        guests = membership.join(request, self._known(), self._taken(), self._now())
        if membership.number != number:
            self._log.info("hosts join", hosts={guest.host: guest.actors for guest in guests})
            self._changed.set()
        number = max(guest.number for guest in guests)
        await self._watchers.until(lambda: None if self._untold(number) else True, park_s / 2)
        return Joined(
            hosts=[guest.joined for guest in guests], peers=self._actor.roster.peers, waiting_for=self._untold(number)
        )

    async def leave(self, request: Leave, park_s: float) -> LeaveBegun:
        """Let a host go; answered once a successor would know of it too. Raises InvalidRequest, NotKept."""

        def begin() -> Departure | None:
            try:
                return self._begin_leave(request)
            except NobodyServes as error:
                if not error.awaited:
                    raise
                return None

        # Asked once more after the wait, which raises where nobody else serves by then.
        departure = await self._watchers.until(begin, park_s / 2) or self._begin_leave(request)
        await self._until_kept(park_s / 2)
        return LeaveBegun(agent=departure.agent, host=departure.host, actors=departure.actors)

    async def watch(self, seen: int, park_s: float) -> Members:
        """Park until the members are others."""
        return (
            await self._watchers.until(lambda: self._told if self._told.number != seen else None, park_s) or self._told
        )

    def wake(self) -> None:
        """The run or the registry has changed."""
        self._watchers.wake()

    # --- within ---

    def _begin_leave(self, request: Leave) -> Departure:
        membership = self._membership
        if request.host.lower() not in {n for d in membership.departures.values() for n in (d.agent, d.host.lower())}:
            self._check_run("leave")
        number = membership.number
        departure = membership.leave(request, self._known(), self._serving, self._run.awaited)
        if membership.number != number:
            self._log.info("host leaves", host=departure.host, actors=departure.actors, within_s=request.within_s)
            self._part_with(departure)
        return departure

    @property
    def _serving(self) -> frozenset[str]:
        """The actors that serve, those of hosts that leave excepted."""
        return self._run.expected & self._registry.ready()

    async def _until_kept(self, park_s: float) -> None:
        number = self._membership.number
        if not await self._watchers.until(lambda: self._kept >= number or None, park_s):
            raise NotKept(str(self._path))

    def _check_run(self, what: str) -> None:
        if self._run.phase not in ("starting", "running"):
            state = "makes way" if self._run.phase == "preempting" else "is ending"
            raise InvalidRequest(f"nobody can {what} any more: the run {state}")

    def _untold(self, number: int) -> list[str]:
        """Actors that do not know these members so far, though somebody may call them."""
        if self._told.number < number:
            return [f"{MEMBERS_FILE} of the controller"]
        found = []
        for name, entry in self._registry.entries.items():
            # One that has not spoken so far takes them in before it can be called, and an agent takes in none.
            if role_of(name) in ROLES and entry.heard_of and entry.spoken:
                incarnation, known = self._taken_in.get(name, (0, -1))
                if incarnation != entry.record.incarnation or known < number:
                    found.append(name)
        return found

    def _known(self) -> list[KnownHost]:
        return sorted(self._known_hosts(), key=lambda host: int(host.agent.partition("/")[2]))

    def _known_hosts(self) -> Iterator[KnownHost]:
        for agent, host in self._hosts.known.items():
            entry = self._registry.entries.get(agent)
            guest = self._membership.guests.get(agent)
            also = [guest.address] if guest is not None else []
            if entry is not None:
                also += [entry.record.host, *_address(entry.record.address)]
            yield KnownHost(agent, host.name, host.actors, [name for name in also if name])
        for agent, guest in self._membership.guests.items():
            if agent not in self._hosts.known and not self._membership.has_departed(agent):
                yield KnownHost(agent, guest.host, guest.actors, [guest.address] if guest.address else [])

    def _taken(self) -> list[str]:
        """All names of the run."""
        return [*self._run.expected, *self._hosts.known, *self._registry.entries, *self._actor.roster.peers]

    def _incarnations(self, names: Iterable[str]) -> dict[str, int]:
        entries = self._registry.entries
        return {name: entries[name].record.incarnation for name in names if name in entries}


def _address(bound: str) -> list[str]:
    """The host in tcp://HOST:PORT#ATTEMPT, unless it is loopback, as it is on each host."""
    host = bound.removeprefix("tcp://").partition("#")[0].rpartition(":")[0]
    return [host] if host and not host.startswith("127.") else []
