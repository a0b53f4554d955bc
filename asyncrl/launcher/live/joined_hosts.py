"""Adds hosts to a live run: reaches them, asks the controller for names and admission, starts their agents.

The configuration is the run's. This command decides by a host's GPUs how many engines it gets, and makes the keys of
the new agents and actors. Only their public halves go to the controller, which admits them. If anything fails before
the agents are started, the command withdraws the hosts. If it cannot, the controller drops the hosts after
``supervision.start_timeout_s``.

Then the command shows the events of these hosts and stores their logs, as the run's launcher does, until they have
ended. They end with the run, or leave it before: by ``--leave``, at the controller's request, or because this command
is interrupted. At the first signal the controller drains them, except a host with the last rollouter; at the second
they are killed. Either way the run continues. A lost connection ends only the view of that host.

Fails with HostFailed for hosts, with ConfigError for the model, and with UsageError for hosts that do not fit the run
and for a request that the run refuses.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.load import config_to_json
from asyncrl.core.errors import ActorFailed, AsyncRLError, ConfigError, UsageError
from asyncrl.launcher.agent_handle import (
    SLACK_S,
    AgentHandle,
    end_in_steps,
    kill_members,
    watch_silence,
)
from asyncrl.launcher.checks.findings import errors_of
from asyncrl.launcher.checks.hub import pin
from asyncrl.launcher.common.agent_messages import AT_ONCE, CONTROLLER_AT, RouteQuery, Routes, StateEvent, agent_name
from asyncrl.launcher.common.placement import PlacementHost, place_replicas, replicas_of
from asyncrl.launcher.host_part import download, host_of, host_row, host_spec, prepare, start_agent
from asyncrl.launcher.hosts import addresses
from asyncrl.launcher.hosts.contact import ReachedHosts
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.start import StartCommand
from asyncrl.launcher.live.live_run import LiveRun, members_of
from asyncrl.launcher.terminal.interrupts import Interrupts, undone_by_signals
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.messages.hosts import Join, Leave, MemberHost
from asyncrl.rpc.controller_client import ControllerClient
from asyncrl.rpc.lifecycle.incarnations import attempt_begins_above
from asyncrl.rpc.wire.keys import keyring_of, make_pairs

ASK_S = 20.0
"""Seconds for the controller's answer to the request to drain a host."""
WITHDRAW_S = 5.0
"""Seconds for the controller's answer if hosts are withdrawn before their agents start."""


def join_run(run: LiveRun, lines: Sequence[HostLine], start: StartCommand, *, dry_run: bool = False) -> int:
    """Add these hosts to the run and follow them to their end; returns the exit code."""
    progress = TerminalProgress(sys.stderr if dry_run else sys.stdout, run.config.learner.steps)
    reached = ReachedHosts(start, run.config.supervision.start_timeout_s, progress, count=len(lines))
    hosts = JoinedHosts(run, lines, reached, progress)
    # A signal before the agents start undoes everything.
    return asyncio.run(undone_by_signals(hosts.main(dry_run=dry_run), progress))


@dataclass
class JoinedHosts:
    """The hosts that this command adds to a run, and handles on their agents (``members``) once these are started."""

    run: LiveRun
    lines: Sequence[HostLine]
    reached: ReachedHosts
    progress: TerminalProgress
    members: list[AgentHandle] = field(default_factory=list)
    interrupts: Interrupts = field(default_factory=Interrupts)
    controller: ControllerClient = field(init=False)
    _shown: dict[str, MemberHost] = field(default_factory=dict)
    """The controller's last record of each of these hosts, by the name of its agent."""

    async def main(self, *, dry_run: bool) -> int:
        """Reach, place, add and follow the hosts, or with ``dry_run`` only show the plan; returns the exit code."""
        # The controller's IP address: its URL comes from a socket, so it has no host name.
        head = self.run.address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if ipaddress.ip_address(head).is_loopback:
            raise UsageError(
                f"{self.run.folder.path}: this run listens on {head} alone, where no other host reaches it; "
                "start a run that hosts are to join with --hosts over two or more"
            )
        try:
            await self.reached.reach([line.name for line in self.lines])
            hosts = await self._place(head)
            if dry_run:
                self._show_plan(hosts)
                return 0
            await self._fetch()
            with self.run.connect() as self.controller:
                await self._begin(hosts)
                return await self.follow()
        finally:
            await self.reached.close()

    async def _place(self, head: str) -> dict[str, PlacementHost]:
        """Return the new hosts by name, with their addresses and GPUs. Raises UsageError if an engine does not fit."""
        config, facts = self.run.config, {name: contact.facts for name, contact in self.reached.contacts.items()}
        if config.network.interface is not None:
            chosen = addresses.by_interface(facts, config.network.interface)
        else:
            query = RouteQuery(head=head, addresses=[head])
            chosen = addresses.towards(head, await self.reached.ask(dict.fromkeys(facts, query), Routes, "answered"))
        hosts = {line.name: host_of(line, facts[line.name], chosen[line.name]) for line in self.lines}
        small = [f"{name} has {len(host.gpus)}" for name, host in hosts.items() if not replicas_of(config, host)]
        if small:
            each = config.rollout.gpus_per_replica
            raise UsageError(f"an engine of this run takes {each} GPUs (rollout.gpus_per_replica): {', '.join(small)}")
        return hosts

    async def _fetch(self) -> None:
        """Let the hosts download the run's model of the Hugging Face hub, if it has one. Raises ConfigError."""
        if not self.run.config.hub.pinned:
            return
        found = await pin(self.run.config, ["model.path"])
        if found.findings:
            raise ConfigError(errors_of(found.findings), found=True)
        await download(self.run.config, dict.fromkeys(self.reached.contacts, found.pins), self.reached)

    def _show_plan(self, hosts: Mapping[str, PlacementHost]) -> None:
        self.progress.end()
        print(config_to_json(self.run.config), end="")
        print(f"\nhosts that join {self.run.folder.path}:")
        for name, host in hosts.items():
            rollouters = f", rollouters: {replicas_of(self.run.config, host)}"
            print(host_row(host, self.reached.start.argv(name), rollouters))

    async def _begin(self, hosts: Mapping[str, PlacementHost]) -> None:
        """Have the controller admit the hosts, prepare each with its keys, and start its agent. Raises AsyncRLError."""
        config, folder, credentials = self.run.config, self.run.folder, self.run.credentials
        attempts, episodes = config.supervision.max_restarts + 1, config.episode.kind != "single"
        # By ``asks``, the random ids of the Joins, the hosts can be withdrawn. ``pairs`` are the key pairs by name.
        asks, joined, pairs = list[str](), list[MemberHost](), dict[str, list[dict[str, str]]]()
        try:
            for name, host in hosts.items():
                replicas = replicas_of(config, host)
                # The agent comes first, then the rollouters and the episode hosts. Each has a key pair for each start.
                key_holders = 1 + replicas * (2 if episodes else 1) if credentials.curve else 0
                host_pairs = [make_pairs(attempts) for _ in range(key_holders)]
                keys = [[pair["public"] for pair in each] for each in host_pairs]
                asks.append(secrets.token_hex(16))
                join = Join(ask=asks[-1], host=name, address=host.address, replicas=replicas, keys=keys)
                joined.append(await self.controller.ask(join, timeout=config.supervision.start_timeout_s))
                pairs |= zip(joined[-1].names, host_pairs, strict=credentials.curve)
            # The keys of other joined hosts are not needed yet: every actor asks the controller for the members.
            keyring = keyring_of(credentials.run_id, credentials.secret, credentials.peers, pairs)
            specs = {each.host: host_spec(config, folder, each.index, keyring.files_of(each.names)) for each in joined}
            await prepare(self.reached, folder, specs)
            self.members = [self._start_agent(each, hosts[each.host]) for each in joined]
        except BaseException as error:
            if self.run.lives:
                reason = f"it could not be started: {str(error) or type(error).__name__}"
                # A Join without a reply may have been carried out. A failed withdrawal does not matter: the controller
                # does not know the host, or drops it later.
                leaves = [Leave(host=ask, within_s=0.0, reason=reason) for ask in asks]
                withdrawals = (self.controller.ask(leave, timeout=WITHDRAW_S) for leave in leaves)
                await asyncio.gather(*withdrawals, return_exceptions=True)
            raise
        for each in joined:
            self.progress.say(f"{each.host} joins as {each.agent} with {', '.join(each.actors)}")

    def _start_agent(self, joined: MemberHost, host: PlacementHost) -> AgentHandle:
        folder, placed = self.run.folder, place_replicas(self.run.config, host, joined.actors)
        # These names are new in this attempt, so no incarnation of them exists.
        above = attempt_begins_above(folder.attempt, 0)
        member = start_agent(self.reached.contacts[host.name], folder, host, placed, above=above, index=joined.index)
        member.send(CONTROLLER_AT + self.run.address.encode() + b"\n")
        return member

    # --- their life in the run ---

    async def follow(self) -> int:
        """Follow each host until it ends or its connection is lost. Returns the largest exit code.

        A lost connection counts as 1, and so does a host that left without serving.
        After a signal it returns 128 + the signal's number, unless an exit code shows a failure (1, 2 or 78).
        """
        self.interrupts.listen()
        try:
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._end_when_asked()),
                    tasks.create_task(self._watch_members()),
                    tasks.create_task(watch_silence(self.members, self.run.config, self.progress)),
                ]
                await asyncio.gather(*(self._follow(member) for member in self.members))
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            # The hosts continue with the run, but their events are not shown any more.
            raise group.exceptions[0] from None
        self.progress.end()
        codes = [self._conclude(member) for member in self.members]
        if self.interrupts.signal and not any(code in (1, 2, 78) for code in codes):
            return 128 + self.interrupts.signal
        return max(codes)

    async def _follow(self, member: AgentHandle) -> None:
        # The run's state is the same for all members, so only that from the first live one is shown.
        def take(event: Any) -> None:
            if not isinstance(event, StateEvent) or member is next(one for one in self.members if not one.over):
                self.progress.show(event)

        await member.hear(self.run.folder.logs, self.progress, take)

    async def _watch_members(self) -> None:
        """Show when these hosts serve and when they leave. At the end of the run, end the hosts too."""
        own = {agent_name(member.index) for member in self.members}
        async for members in members_of(self.run, self.controller):
            for host in [host for host in members.hosts if host.agent in own]:
                shown, self._shown[host.agent] = self._shown.get(host.agent), host
                is_new = shown is None or shown.stage != host.stage
                if is_new and host.stage == "serving":
                    # Some of its actors may still load, or rest after too many deaths.
                    self.progress.say(f"{host.host} serves from now on (it has {', '.join(host.actors)})")
                elif is_new and host.stage == "leaving":
                    self.progress.say(f"{host.host} leaves" + (f": {host.reason}" if host.reason else ""))
        # No more news: the run has ended on its head.
        await end_in_steps(self.members, self.run.config.supervision.drain_s)

    # --- the end ---

    async def _end_when_asked(self) -> None:
        """Wait for a signal and have the hosts drained. At the next signal, or if they are late, kill their actors.

        If the controller refuses to drain a host, the deadline does not count: only a signal kills.
        """
        await self.interrupts.first()
        within_s = self.run.config.supervision.drain_s
        self.progress.say(
            "these hosts are drained, and the run continues without them; signal again to end them at once"
        )
        async with asyncio.TaskGroup() as tasks:
            leaving = [member for member in self.members if not member.over]
            asking = [tasks.create_task(self._ask_to_leave(member, within_s)) for member in leaving]
            # Once the controller has answered, an agent gives its actors ``within_s`` seconds, and then drain_s to end.
            await self.interrupts.next(ASK_S + within_s + self.run.config.supervision.drain_s + SLACK_S)
            for task in asking:
                task.cancel()
        if not all(task.cancelled() or task.result() for task in asking):
            # Returns at once if the second signal has arrived.
            await self.interrupts.first()
        self.progress.say("ending them at once")
        await kill_members(self.members, self.interrupts)

    async def _ask_to_leave(self, member: AgentHandle, within_s: float) -> bool:
        """Ask the controller to drain a member's host, and show an error. Returns False if the controller refuses."""
        reason = f"its launcher was ended by {signal.Signals(self.interrupts.signal).name}"
        try:
            leave = Leave(host=agent_name(member.index), within_s=within_s, reason=reason)
            await self.controller.ask(leave, timeout=ASK_S)
        except AsyncRLError as error:
            self.progress.warn([str(error)])
            return not isinstance(error, UsageError)
        return True

    def _conclude(self, member: AgentHandle) -> int:
        """Show how a member ended; returns its exit code, or 1 if its end is unknown or it has left without serving."""
        ended, shown = member.ended, self._shown.get(agent_name(member.index))
        if ended is None and member.lost:
            self.progress.warn([f"{member.loss_words}; its actors continue with the run"])
            return 1
        if ended is None:
            log = str(self.run.folder.logs / member.log)
            self.progress.warn([str(ActorFailed(member.name, member.exit_words, log=log))])
            return 1
        if ended.result == "failed":
            self.progress.warn([str(ActorFailed(ended.actor, ended.reason, log=ended.log))])
        elif ended.result == "left" and (self.interrupts.signal or (shown is not None and shown.served)):
            self.progress.say(f"{member.host} has left the run")
        elif ended.result == "left":
            why = f": {ended.reason}" if ended.reason else ""
            self.progress.warn([f"{member.host} has left the run without having served{why}"])
            return 1
        elif ended.reason == AT_ONCE:
            self.progress.say(f"{member.host} was ended at once")
        else:
            how = {"done": "is done", "preempted": "was preempted"}.get(ended.result, "ended before its last step")
            self.progress.say(f"{member.host} ends with the run, which {how}")
        return ended.exit_code
