"""Hosts that join and leave during the run: the controller's handlers around ``Membership``, which decides.

Each change makes a new revision of the members (``Members.number``). The change is *kept*, that is written to the run's
private folder, before the controller sends it or answers the request. So a successor of the controller admits the same
actors. An actor that was refused once does not connect again. So a joined actor and another one find each other only
once both admit the other's keys.

Fails with InvalidRequest for a request that cannot be met, and with NotKept if a change is not on disk in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from asyncrl.controller.health.known_hosts import KnownHosts
from asyncrl.controller.joining.membership import Membership, NotYet
from asyncrl.controller.state.run_actor import RunActor
from asyncrl.core.errors import InvalidRequest, NotKept
from asyncrl.core.files import replace_file
from asyncrl.messages import Done
from asyncrl.messages.hosts import HostLeft, Join, Leave, MemberHost, Members, WatchMembers
from asyncrl.rpc.actor import Caller, handler
from asyncrl.rpc.parking_lot import ParkingLot

MEMBERS_FILE = "members.json"
"""File in the run's private folder; absent until a host joins or leaves."""
WRITE_AGAIN_S = 1.0
"""Pause after a failed write of the file (s)."""


class HostChanges:
    """Handles hosts that join and leave, for the controller ``actor``; calls ``changed`` after each change."""

    def __init__(self, actor: RunActor, hosts: KnownHosts, *, changed: Callable[[], None]) -> None:
        self._actor, self._registry, self._run, self._hosts = actor, actor.registry, actor.machine, hosts
        self._run_changed, self._now, self._log = changed, actor.clock.now, actor.log
        self._path = actor.context.run_dir / "private" / MEMBERS_FILE
        self.members = self._recall()
        """The newest kept revision: it is sent to actors, and a successor continues from it."""
        episodes = actor.config.episode.kind != "single"
        self._membership = Membership(hosts.known, self.members, episodes=episodes)
        self._taken_in: dict[str, int] = {}
        """By actor: the newest revision (``Members.number``) that it has admitted. A restart of the actor keeps this,
        because its next incarnation admits the kept revision before it can be called."""
        self._changed = asyncio.Event()
        """Set when ``run`` may have something to decide, keep or send."""
        self._watchers = ParkingLot()
        """Calls that wait for members to be kept."""

    # --- its life ---

    def _recall(self) -> Members:
        """Return the members that an earlier controller kept, or else revision 0 without hosts. Raises OSError.

        Also adds the actors of joined hosts to the run's state, and removes those of hosts that leave or have left.
        """
        try:
            members = msgspec.json.decode(self._path.read_bytes(), type=Members)
        except FileNotFoundError:
            return Members(number=0)
        for host in members.at("joining", "serving"):
            self._run.joined(host.actors, self._now(), has_served=host.served)
        self._run.left([name for host in members.hosts if not host.takes_part for name in host.actors], self._now())
        self._run.set_members(members)
        return members

    async def run(self) -> None:
        """Let joined hosts serve or leave, and keep and send each change; until cancelled."""
        while True:
            # Replicas that are stopped for a time because they could not be kept alive (state/reserve.py).
            resting = {each.name: each.reason for each in self._run.resting}
            for host in self._membership.judge(self._registry.ready(), resting, self._hosts.lost):
                self._log.error("joined host does not serve, so it has to leave", host=host.host, reason=host.reason)
                self._run.left(host.actors, self._now())
            for host in self._membership.members.at("lost", "left"):
                # Its agent may have registered again, or the list of hosts of an earlier controller names it.
                self._hosts.forget(host.agent)
            # Each change makes a new ``Members`` object, so any other object than the kept one is a new revision.
            if self._membership.members is not self.members:
                await self._keep_and_send()
            await self._changed.wait()
            self._changed.clear()

    async def _keep_and_send(self) -> None:
        """Write the members to disk, again and again until that works; then answer parked calls and update the run."""
        # A change during the write sets ``_changed``, and is kept and sent next.
        members = self._membership.members
        text = msgspec.json.encode(members).decode()
        while True:
            try:
                await asyncio.to_thread(replace_file, self._path, text, mode=0o600)
                break
            except OSError as error:
                self._log.error("cannot write the members, so they are not sent", error=str(error))
                await asyncio.sleep(WRITE_AGAIN_S)
        self.members = members
        self._watchers.wake()
        # Parked calls are answered in this pause: after ``take_in`` no message reaches a host that has left.
        await asyncio.sleep(0)
        self._actor.take_in(members)
        self._run.set_members(members)
        self._run_changed()

    @property
    def on_trial(self) -> frozenset[str]:
        """The actors of hosts on trial: of joined hosts that do not serve so far."""
        return frozenset(name for host in self._membership.members.at("joining") for name in host.actors)

    def can_spare(self, name: str) -> bool:
        """Whether the run does not count on an actor or agent: its host does not serve so far, leaves or has left.

        The run does not count on a joined replica either while that has never been ready.
        """
        hosts = [host for host in self._membership.members.hosts if name in host.names]
        return any(host.stage != "serving" for host in hosts) or name in self._run.on_trial

    # --- events of the run ---

    def taken_in(self, name: str, number: int) -> bool:
        """Note that an actor has admitted the revision ``number`` of the members. Returns whether that is new."""
        known, self._taken_in[name] = self._taken_in.get(name, 0), number
        return number > known

    def know_each_other(self, one: str, other: str) -> bool:
        """Whether each of two actors is known to admit the key of the other.

        True at once if neither host has joined, leaves or has left. Otherwise both actors must have admitted the newest
        kept revision, which each reports with its next WatchRun.
        """
        concerned = any(one in host.actors or other in host.actors for host in self.members.hosts)
        number = self.members.number if concerned else 0
        return all(self._taken_in.get(name, 0) >= number for name in (one, other))

    def wake(self) -> None:
        """Look again after a change of the run or the registry."""
        self._changed.set()

    # --- requests ---

    @handler
    async def join(self, request: Join, caller: Caller) -> MemberHost:
        """Admit a new host, once. Raises InvalidRequest, NotYet while the run starts, and NotKept."""
        self._check_run("join")
        if self._run.phase == "starting":
            raise NotYet(f"no host can join so far: the run starts, and waits for {', '.join(self._run.waiting_for)}")
        taken = [*self._run.expected, *self._registry.entries, *self._actor.roster.peers]
        host = self._membership.join(request, taken)
        if self._run.joined(host.actors, self._now()):
            self._log.info("host joins", host=host.host, actors=host.actors)
        await self._until_kept(caller.park_s)
        return host

    @handler
    async def leave(self, request: Leave, caller: Caller) -> MemberHost:
        """Let a host leave the run; answers once the change is kept. Raises InvalidRequest, NotYet and NotKept."""
        host = self._membership.named(request.host)
        if host.takes_part:
            self._check_run("leave")
            serving = self._run.expected & self._registry.ready()
            host = self._membership.leave(host, request, serving, self._run.awaited)
            self._log.info("host leaves", host=host.host, actors=host.actors, within_s=request.within_s)
            self._run.left(host.actors, self._now())
        await self._until_kept(caller.park_s)
        return host

    @handler
    async def host_left(self, request: HostLeft, caller: Caller) -> Done:
        """Note that everything on a leaving host has ended; answers once the change is kept. Raises NotKept."""
        if self._membership.left(caller.name):
            self._log.info("host has left", agent=caller.name)
            self._hosts.forget(caller.name)
        await self._until_kept(caller.park_s)
        return Done()

    @handler
    async def watch_members(self, request: WatchMembers, caller: Caller) -> Members:
        """Answer with the kept members. Parks while the caller has the same revision of the members."""

        def news() -> Members | None:
            return self.members if self.members.number != request.seen else None

        return await self._watchers.until(news, caller.park_s) or self.members

    # --- private ---

    async def _until_kept(self, park_s: float) -> None:
        """Wait until the present revision of the members is on disk. Raises NotKept after ``park_s`` seconds."""
        self._changed.set()
        number = self._membership.members.number
        # ``or None``: the call waits on until the answer is not None.
        if not await self._watchers.until(lambda: self.members.number >= number or None, park_s):
            raise NotKept(str(self._path))

    def _check_run(self, what: str) -> None:
        """Raise InvalidRequest, with the verb ``what``, unless the run is starting or running."""
        if self._run.phase not in ("starting", "running"):
            state = "being preempted" if self._run.phase == "preempting" else "ending"
            raise InvalidRequest(f"no host can {what} any more: the run is {state}")
