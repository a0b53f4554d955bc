"""The examination: every host is asked in parallel, then the hosts are held against one another.

A host that cannot be reached, or stops answering, costs its own findings and those between it and the others, and
nothing else: the rest is examined as if it were not there. The head is the first host that answers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.checks.findings import Finding, fail, in_order, ok, on_host, warn
from asyncrl.config import Config
from asyncrl.config.load import config_to_json
from asyncrl.doctor.between_hosts import (
    Way,
    best_offset,
    compare_clocks,
    compare_identities,
    compare_models,
    compare_versions,
    judge_gpus,
    judge_ways,
    needed_packages,
)
from asyncrl.doctor.protocol import (
    Begin,
    Connect,
    Connected,
    Examine,
    Examined,
    HostFacts,
    Listen,
    Listening,
    Look,
    Mark,
    Marked,
    ReachableHost,
    ReadClock,
    Seen,
    Time,
)
from asyncrl.errors import ConfigError, HostFailed, UsageError
from asyncrl.launcher.fleet.addresses import by_interface, by_route, interface_of, usable
from asyncrl.launcher.fleet.contact import Contact
from asyncrl.launcher.fleet.hostfile import HostLine
from asyncrl.launcher.fleet.start import StartCommand
from asyncrl.launcher.launch import passed_on
from asyncrl.launcher.terms.placement import Placed, PlacementHost, place, with_episode_hosts, with_gpus
from asyncrl.launcher.terms.spec import RouteQuery, Routes
from asyncrl.roles import ROLES, role_of

T = TypeVar("T")
REMOTE = ("-m", "asyncrl.doctor.host")
CLOCK_ROUNDS = 5
END_S = 2.0
"""Time that a host's part has to end; then its connection is cut."""
CONNECT_S = 5.0
"""Longest wait of one host for a connection to another."""
ANY = "0"
LOOPBACK = "127.0.0.1"
MARK = ".asyncrl-doctor-"
DEFAULT_RUNS = "runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedHost:
    """A host to be examined."""

    line: HostLine
    start: StartCommand

    @property
    def name(self) -> str:
        """Name as in the hostfile."""
        return self.line.name


@dataclass
class Examination:
    """Examination of some hosts, whose names differ, the head first; without a configuration only what needs none."""

    targets: Sequence[ExaminedHost]
    config: Config | None
    answer_s: float
    """Longest wait for each answer of a host."""
    fix: bool = False
    _found: list[Finding] = field(default_factory=list)
    _contacts: dict[str, Contact] = field(default_factory=dict)
    """Hosts that answer."""
    _facts: dict[str, HostFacts] = field(default_factory=dict)
    _placed: list[Placed] = field(default_factory=list)
    _addresses: dict[str, str] = field(default_factory=dict)

    async def run(self) -> list[Finding]:
        """All findings, in order."""
        contacts = {target.name: Contact(target.name, target.start, any_host=True) for target in self.targets}
        self._contacts = dict(contacts)
        try:
            self._facts = await self._ask_all(self._begin)
            if self._facts:
                await self._examine()
        finally:
            await asyncio.gather(*(contact.close(END_S) for contact in contacts.values()))
        return in_order(self._found, [target.name for target in self.targets])

    @property
    def _head(self) -> str:
        return next(iter(self._facts))

    @property
    def _several(self) -> bool:
        return len(self.targets) > 1

    async def _examine(self) -> None:
        for host, facts in self._facts.items():
            self._found.append(ok("ssh", f"answers as {facts.facts.hostname}", host))
        self._found += compare_identities(self._facts)
        for step in (
            self._read_clocks,
            self._find_addresses,
            self._compare,
            self._ask_each_for_itself,
            self._find_ways,
        ):
            await step()
            if not self._facts:
                # The last host was lost, which is found already.
                return

    async def _read_clocks(self) -> None:
        if self._several:
            rounds = await self._ask_all(_read_clock)
            if rounds:
                offsets = {host: best_offset(each) for host, each in rounds.items()}
                self._found += compare_clocks(offsets, self._head)

    async def _compare(self) -> None:
        self._place()
        needed = needed_packages(self.config, self._placed) if self.config is not None else {}
        self._found += compare_versions(self._facts, self._head, needed)
        self._found += judge_gpus(self._facts, self._head, self._placed)

    # --- asking ---

    async def _begin(self, contact: Contact) -> HostFacts:
        await contact.reach()
        # A host hears nothing while the slowest of the others, and then the head alone, are asked: for twice answer_s.
        begin = Begin(deadline_s=3 * self.answer_s, folder=str(Path.cwd()), env=passed_on())
        return await contact.ask(begin, HostFacts)

    async def _ask_all(
        self, question: Callable[[Contact], Awaitable[T]], hosts: Sequence[str] | None = None
    ) -> dict[str, T]:
        """Answers by host, of those that give one, in the order of the hostfile; the others are lost from here on."""
        names = [host for host in self._contacts if hosts is None or host in hosts]
        answers = await asyncio.gather(*(self._ask(self._contacts[host], question) for host in names))
        return {host: answer[0] for host, answer in zip(names, answers, strict=True) if answer}

    async def _ask(self, contact: Contact, question: Callable[[Contact], Awaitable[T]]) -> tuple[T] | None:
        host = contact.name
        try:
            async with asyncio.timeout(self.answer_s):
                return (await question(contact),)
        except TimeoutError:
            what = f" to {contact.asked!r}" if contact.asked else ""
            told = f"no answer{what} within {self.answer_s:g} s"
            told += f"; it last said: {contact.last_error}" if contact.last_error else ""
        except HostFailed as failed:
            told = failed.reason
        except ValueError as error:
            told = f"it said what is none of our words ({error}); is the shell there silent?"
        told = f"is lost in the middle: {told}" if host in self._facts else told
        fix = f"see that `ssh {host}` works without a question, and that asyncrl is installed there"
        self._put_in_place([fail("ssh", told, fix, host)])
        for known in (self._contacts, self._facts, self._addresses):
            known.pop(host, None)
        return None

    def _put_in_place(self, findings: Sequence[Finding]) -> None:
        """Add these, each in the place of what the same check has found on the same host."""
        gone = {(finding.host, finding.check) for finding in findings}
        self._found = [one for one in self._found if (one.host, one.check) not in gone] + list(findings)

    # --- addresses and placement ---

    async def _find_addresses(self) -> None:
        network = self.config.network if self.config is not None else None
        if not self._several:
            self._addresses = {self._head: network.host if network is not None else LOOPBACK}
            return
        facts = {host: each.facts for host, each in self._facts.items()}
        head = self._head
        try:
            if network is not None and network.interface is not None:
                self._addresses = by_interface(facts, network.interface)
            else:
                query = RouteQuery(head=head, addresses=list(usable(facts[head])))
                others = [host for host in facts if host != head]
                routes = await self._ask_all(lambda contact: contact.ask(query, Routes), others)
                facts = {host: each for host, each in facts.items() if host == head or host in routes}
                if routes:
                    self._addresses = by_route(head, facts, routes)
                else:
                    self._addresses = dict.fromkeys([head], next(iter(usable(facts[head])), LOOPBACK))
        except UsageError as error:
            for line in str(error).splitlines():
                host = next((name for name in facts if line.startswith(f"{name}: ")), "")
                fix = "set network.interface to one that every host has, and that leads to the others"
                self._found.append(fail("interface", line, fix, host))
            return
        for host, address in self._addresses.items():
            name = interface_of(self._facts[host].facts, address)
            told = f"{address} at {name or 'no interface of its own'}"
            if address.startswith("127."):
                fix = "set network.interface to the name of the interface between the hosts"
                self._found.append(fail("interface", f"{told} is loopback, where no other host is", fix, host))
            else:
                self._found.append(ok("interface", told, host))

    def _place(self) -> None:
        """Place the actors on the hosts, if they fit."""
        if self.config is None:
            return
        hosts, lines = [], {target.name: target.line for target in self.targets}
        for name, each in self._facts.items():
            try:
                gpus = lines[name].usable(each.facts.gpus)
            except UsageError as error:
                fix = "correct slots, or see why the driver shows fewer"
                self._found.append(fail("gpus", str(error).removeprefix(f"{name}: "), fix, name))
                gpus = tuple(each.facts.gpus)
            hosts.append(
                PlacementHost(name=name, cpus=each.facts.cpus, gpus=gpus, address=self._addresses.get(name, ""))
            )
        try:
            self.config = with_gpus(self.config, hosts)
            self.config = with_episode_hosts(self.config, hosts)
            self._placed = place(self.config, hosts)
        except ConfigError as error:
            self._found += [
                fail("placement", problem, "change the configuration or the hosts") for problem in error.problems
            ]
            return
        counts = [f"{name} {sum(actor.host == name for actor in self._placed)}" for name in self._facts]
        told = f"{len(self._placed)} actors: {', '.join(counts)}"
        if len(hosts) < len(self.targets):
            self._found.append(warn("placement", f"{told}, without the hosts that do not answer", "mend these first"))
        else:
            self._found.append(ok("placement", told))

    def _actors_on(self, host: str) -> list[str]:
        """Actors by the placement; without one, any host may get those that other hosts than the head can have."""
        if self.config is None:
            return []
        if self._placed:
            return [actor.name for actor in self._placed if actor.host == host]
        return [name for name in self.config.actors if host == self._head or ROLES[role_of(name)].place != "head"]

    # --- each host for itself ---

    async def _ask_each_for_itself(self) -> None:
        runs = self.config.run.dir if self.config is not None else DEFAULT_RUNS
        head, token = self._head, secrets.token_hex(8)
        seeing = await self._who_sees(runs, f"{MARK}{token}-runs") if self._several else {}

        def order(host: str) -> Examine:
            return Examine(
                config=config_to_json(self.config) if self.config is not None else "",
                runs=runs,
                actors=self._actors_on(host),
                address=self._addresses.get(host, LOOPBACK),
                several=self._several,
                is_head=host == head,
                sees_runs=host != head and seeing.get(host, False),
                fix=self.fix,
            )

        examined = await self._ask_all(lambda contact: contact.ask(order(contact.name), Examined))
        for host, each in examined.items():
            self._found += on_host(host, each.findings)
        self._put_in_place(compare_models({host: each.model for host, each in examined.items()}, head))
        await self._check_shared(runs, f"{MARK}{token}-checkpoints")

    async def _check_shared(self, runs: str, name: str) -> None:
        """Whether all hosts that have ranks of the learner see one folder of checkpoints."""
        if self.config is None or self.config.learner.backend == "sim":
            return
        ranked = [host for host in self._facts if host in self._ranked]
        if len(ranked) < 2:
            return
        folder = checkpoint_dir(self.config, Path(runs) / self.config.run.name)
        seeing = await self._who_sees(str(folder), name)
        for host in ranked:
            if host != self._head and seeing.get(host) is False:
                told = f"{folder} is not the folder that {self._head} sees, but ranks of the learner are on both"
                fix = "set checkpoint.dir to a folder on a file system that all these hosts share"
                self._put_in_place([fail("checkpoint_dir", told, fix, host)])

    async def _who_sees(self, folder: str, name: str) -> Mapping[str, bool]:
        """Whether each host sees the file that the head puts there; empty if the head can put nothing there."""
        marked = await self._ask_all(lambda contact: contact.ask(Mark(path=folder, name=name), Marked), [self._head])
        path = next((each.path for each in marked.values()), "")
        if not path:
            return {}
        seen = await self._ask_all(lambda contact: contact.ask(Look(path=path), Seen))
        return {host: answer.there for host, answer in seen.items()}

    # --- between the hosts ---

    async def _find_ways(self) -> None:
        """Every host takes connections for a moment, and every other one tries to reach it."""
        if len(self._addresses) < 2:
            return
        wanted = self.config.network.ports if self.config is not None else ANY
        # torch.distributed takes any port, wherever ranks or a broadcast meet.
        ports = list(dict.fromkeys([wanted, ANY])) if self._meets_anywhere else [wanted]
        token, addresses = secrets.token_hex(16), dict(self._addresses)
        listening = await self._ask_all(
            lambda contact: contact.ask(Listen(address=addresses[contact.name], ports=ports, token=token), Listening),
            list(addresses),
        )
        peers = [
            ReachableHost(host=host, address=addresses[host], ports=each.ports) for host, each in listening.items()
        ]
        connected = await self._ask_all(
            lambda contact: contact.ask(
                Connect(peers=[peer for peer in peers if peer.host != contact.name], token=token, timeout_s=CONNECT_S),
                Connected,
            ),
            list(listening),
        )
        for asked in ports:
            ways = [
                Way(source, target, tried[asked], self._is_needed(source, target, asked, wanted))
                for source, answer in connected.items()
                for target, tried in answer.problems.items()
                if asked in tried
            ]
            found = judge_ways(ways, asked)
            if asked != wanted:
                # A way that is open twice need not be said twice.
                found = [finding for finding in found if finding.result != "ok"]
            said = {finding.host for finding in found}
            self._found = [
                one for one in self._found if one.check != "reach" or one.result != "ok" or one.host not in said
            ] + found

    @property
    def _ranked(self) -> set[str]:
        """Hosts with ranks of the learner."""
        return {actor.host for actor in self._placed if role_of(actor.name) == "learner"}

    @property
    def _meets_anywhere(self) -> bool:
        config = self.config
        return config is not None and config.learner.backend != "sim" and bool(self._placed)

    def _is_needed(self, source: str, target: str, ports: str, wanted: str) -> bool:
        """Ways by network.ports are needed always, others between ranks; ``stream`` makes up for a failed broadcast."""
        if ports == wanted:
            return True
        return {source, target} <= self._ranked


async def _read_clock(contact: Contact) -> list[tuple[float, float, float]]:
    """Rounds of (asked, the host's time, answered), s."""
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        # The span by the clock that never jumps; only its beginning is taken from the other.
        begun, asked = time.monotonic(), time.time()
        there = (await contact.ask(ReadClock(), Time)).wall_ns / 1e9
        rounds.append((asked, there, asked + time.monotonic() - begun))
    return rounds
