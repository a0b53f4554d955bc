"""Runs all checks of asyncrl-doctor: asks every host in parallel, then compares the hosts.

A *contact* is the connection to the doctor's process on a host (host.py); its orders and answers are in orders.py.
A host that cannot be reached, or stops answering, gets a failure of the check "ssh", and keeps the findings that are
recorded already. The others are examined and compared without it. The head is the first host that answers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from asyncrl.checkpoint.folder import checkpoint_dir
from asyncrl.config import Config
from asyncrl.config.hub import with_pins
from asyncrl.config.load import config_to_json
from asyncrl.config.operation import NetworkConfig
from asyncrl.core.errors import ConfigError, HostFailed, UsageError
from asyncrl.core.roles import ROLES, role_of
from asyncrl.launcher.checks.check_list import in_order
from asyncrl.launcher.checks.findings import CheckOrder, Finding, fail, ok, on_host, warn
from asyncrl.launcher.checks.hub import Pins, for_actors, pin
from asyncrl.launcher.checks.network import ANY_PORT
from asyncrl.launcher.common.agent_messages import Checked, HostOffer, RouteQuery, Routes
from asyncrl.launcher.common.placement import Placed, place, shared_gpus, with_episode_hosts, with_gpus
from asyncrl.launcher.doctor.orders import (
    Begin,
    Connect,
    Connected,
    FindLeftovers,
    Listen,
    Listener,
    Listening,
    Look,
    Mark,
    Marked,
    ReadClock,
    Time,
)
from asyncrl.launcher.host_part import host_of, passed_on
from asyncrl.launcher.hosts.addresses import find_addresses, interface_of
from asyncrl.launcher.hosts.between_hosts import (
    Link,
    best_offset,
    compare_clocks,
    compare_identities,
    compare_models,
    compare_versions,
    judge_gpus,
    judge_links,
    needed_packages,
)
from asyncrl.launcher.hosts.contact import Contact
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.start import StartCommand

T = TypeVar("T")
REMOTE = ("-m", "asyncrl.launcher.doctor.host")
"""Arguments with which Python runs the doctor's process on a host."""
CLOCK_ROUNDS = 5
END_S = 2.0
"""Time that the process on a host has to end (s); then its connection is cut."""
CONNECT_S = 5.0
"""Longest time in which one host connects to another (s)."""
MARK = ".asyncrl-doctor-"
"""Prefix of the files that show whether hosts share a folder."""
DEFAULT_RUNS = "runs"
"""The folder that holds the run folders, if there is no configuration."""


@dataclass
class Examination:
    """One examination of the hosts ``targets``, whose names differ.

    Without a configuration, only the checks that need none run. ``answer_s`` is the longest wait for each answer of a
    host (s). ``fix`` removes leftovers that are certainly dead (leftovers.py).
    """

    targets: Sequence[tuple[HostLine, StartCommand]]
    config: Config | None
    answer_s: float
    fix: bool = False
    _findings: list[Finding] = field(default_factory=list)
    _contacts: dict[str, Contact] = field(default_factory=dict)
    """Contacts of the hosts that still answer, by host name."""
    _facts: dict[str, HostOffer] = field(default_factory=dict)
    """The offer of each host that still answers, by host name, the head's first."""
    _placed: list[Placed] = field(default_factory=list)
    """Actors with their hosts; empty without a placement."""
    _addresses: dict[str, str] = field(default_factory=dict)
    """Address by host at which its actors would listen."""

    async def run(self) -> list[Finding]:
        """Examine the hosts and return all findings, in order."""
        contacts = {line.name: Contact(line.name, start, any_host=True) for line, start in self.targets}
        self._contacts = dict(contacts)
        try:
            self._facts = await self._ask_all(self._begin)
            if self._facts:
                await self._examine()
        finally:
            await asyncio.gather(*(contact.close(END_S) for contact in contacts.values()))
        return in_order(self._findings, list(contacts))

    @property
    def _head(self) -> str:
        return next(iter(self._facts))

    @property
    def _several(self) -> bool:
        """Whether several hosts are examined, even if only one of them answers."""
        return len(self.targets) > 1

    async def _examine(self) -> None:
        """Take each step on the hosts that still answer; the steps record their findings."""
        self._findings += [ok("ssh", f"answers as {facts.hostname}", host) for host, facts in self._facts.items()]
        self._findings += compare_identities({host: facts.identity for host, facts in self._facts.items()})
        for step in (
            self._read_clocks,
            self._find_addresses,
            self._compare_packages_and_gpus,
            self._run_lists,
            self._try_links,
        ):
            await step()
            if not self._facts:
                # The last host stopped answering; its finding is recorded.
                return

    async def _read_clocks(self) -> None:
        if self._several and (rounds := await self._ask_all(_read_clock)):
            offsets = {host: best_offset(each) for host, each in rounds.items()}
            self._findings += compare_clocks(offsets, self._head)

    async def _compare_packages_and_gpus(self) -> None:
        """Place the actors, compare the hosts' packages, and check the packages and GPUs that the actors need."""
        self._place_actors()
        needed = needed_packages(self.config, self._placed) if self.config is not None else {}
        self._findings += compare_versions(self._facts, self._head, needed)
        self._findings += judge_gpus(self._facts, self._head, self._placed)

    # --- asking ---

    async def _begin(self, contact: Contact) -> HostOffer:
        await contact.reach()
        # Three waits may lie between two orders to a host: for its own answer, for the slowest host's, for the head's.
        begin = Begin(deadline_s=3 * self.answer_s, folder=str(Path.cwd()), env=passed_on())
        return await contact.ask(begin, HostOffer)

    async def _ask_all(
        self, question: Callable[[Contact], Awaitable[T]], hosts: Sequence[str] | None = None
    ) -> dict[str, T]:
        """Ask these hosts in parallel (by default every host that still answers); return the answers by host.

        The order is that of the hostfile. A host that does not answer is absent, and is not asked again.
        """
        names = [host for host in self._contacts if hosts is None or host in hosts]
        answers = await asyncio.gather(*(self._ask(self._contacts[host], question) for host in names))
        # ``_ask`` returns None or a tuple of one.
        return {host: answer[0] for host, answer in zip(names, answers, strict=True) if answer}

    async def _ask(self, contact: Contact, question: Callable[[Contact], Awaitable[T]]) -> tuple[T] | None:
        """Ask one host and return its answer, in a tuple of one, so that it differs from a missing answer.

        If there is no valid answer in time, records a failure, drops the host and returns None.
        """
        host = contact.name
        try:
            async with asyncio.timeout(self.answer_s):
                return (await question(contact),)
        except TimeoutError:
            order = f" to {contact.asked!r}" if contact.asked else ""
            problem = f"no answer{order} within {self.answer_s:g} s"
            problem += f"; its last message: {contact.last_error}" if contact.last_error else ""
        except HostFailed as failed:
            problem = failed.reason
        except ValueError as error:
            problem = f"its answer is not in our protocol ({error}); does a shell startup file print something there?"
        problem = f"lost during the examination: {problem}" if host in self._facts else problem
        fix = f"make `ssh {host}` work without a question, and install asyncrl there"
        self._add_or_replace([fail("ssh", problem, fix, host)])
        for by_host in (self._contacts, self._facts, self._addresses):
            by_host.pop(host, None)
        return None

    def _add_or_replace(self, findings: Sequence[Finding]) -> None:
        """Add findings. Each replaces an earlier finding of the same check on the same host."""
        replaced = {(finding.host, finding.check) for finding in findings}
        self._findings = [
            earlier for earlier in self._findings if (earlier.host, earlier.check) not in replaced
        ] + list(findings)

    # --- addresses and placement ---

    async def _find_addresses(self) -> None:
        """Choose each host's address as the launcher does; without a choice, ``_addresses`` stays empty."""
        network = self.config.network if self.config is not None else NetworkConfig()
        if not self._several:
            self._addresses = {self._head: network.host}
            return

        async def ask(queries: Mapping[str, RouteQuery]) -> Mapping[str, Routes]:
            return await self._ask_all(lambda contact: contact.ask(queries[contact.name], Routes), list(queries))

        try:
            self._addresses = await find_addresses(dict(self._facts), network.interface, ask)
        except UsageError as error:
            # A line about one host begins with its name.
            for line in str(error).splitlines():
                host = next((name for name in self._facts if line.startswith(f"{name}: ")), "")
                fix = "set network.interface to one that every host has, and that leads to the others"
                self._findings.append(fail("interface", line, fix, host))
            return
        for host, address in self._addresses.items():
            text = f"{address} at {interface_of(self._facts[host], address) or 'no interface of its own'}"
            self._findings.append(ok("interface", text, host))

    def _place_actors(self) -> None:
        """Place the actors and record findings; a host with fewer GPUs than slots fails a check, and offers all."""
        if self.config is None:
            return
        hosts, lines = [], {line.name: line for line, _ in self.targets}
        for name, each in self._facts.items():
            address = self._addresses.get(name, "")
            try:
                hosts.append(host_of(lines[name], each, address))
            except UsageError as error:
                fix = "correct slots, or find out why the driver shows fewer"
                self._findings.append(fail("gpus", str(error).removeprefix(f"{name}: "), fix, name))
                hosts.append(host_of(HostLine(name), each, address))
        try:
            self.config = with_gpus(self.config, hosts)
            self.config = with_episode_hosts(self.config, hosts)
            self._placed = place(self.config, hosts)
        except ConfigError as error:
            fix = "change the configuration or the hosts"
            self._findings += [fail("placement", problem, fix) for problem in error.problems]
            return
        counts = [f"{name} {sum(actor.host == name for actor in self._placed)}" for name in self._facts]
        text = f"{len(self._placed)} actors: {', '.join(counts)}"
        if len(hosts) < len(self.targets):
            text += ", without the hosts that do not answer"
            self._findings.append(warn("placement", text, "see the errors of these hosts first"))
        else:
            self._findings.append(ok("placement", text))

    def _actors_on(self, host: str) -> list[str]:
        """Return the actors placed on the host; without a placement, those that it might get."""
        if self.config is None:
            return []
        if self._placed:
            return [actor.name for actor in self._placed if actor.host == host]
        return [name for name in self.config.actors if host == self._head or ROLES[role_of(name)].place != "head"]

    # --- the list of checks on each host ---

    async def _run_lists(self) -> None:
        """Let each host run the list of checks and look for leftovers; then compare models and checkpoint folders."""
        pins = Pins()
        if self.config is not None:
            pins = await pin(self.config)
            # A name that the hub does not have may be a folder on the other hosts.
            self._findings += [
                replace(finding, result="warn") if self._several else finding for finding in pins.findings
            ]
            self.config = with_pins(self.config, pins.by_key())
        config, head, token = self.config, self._head, secrets.token_hex(8)
        runs = Path(config.run.dir if config is not None else DEFAULT_RUNS)
        # A run whose name is taken gets another folder, on the same disk.
        run = runs / config.run.name if config is not None else runs

        def check_order(host: str) -> CheckOrder:
            return CheckOrder(
                config=config_to_json(config) if config is not None else "",
                actors=self._actors_on(host),
                address=self._addresses.get(host, NetworkConfig().host),
                run=str(run),
                is_head=host == head,
                several=self._several,
                pins=for_actors(pins.pins, self._actors_on(host)),
                shared_gpus={gpu: " and ".join(who) for gpu, who in shared_gpus(self._placed, host).items()},
            )

        checked = await self._ask_all(lambda contact: contact.ask(check_order(contact.name), Checked))
        if not self._facts:
            return
        sees_runs = await self._who_sees(str(runs), f"{MARK}{token}-runs") if self._several else {}

        def leftover_order(host: str) -> FindLeftovers:
            sees = host != head and sees_runs.get(host, False)
            return FindLeftovers(runs="" if sees else str(runs), is_head=host == head, fix=self.fix)

        searched = await self._ask_all(lambda contact: contact.ask(leftover_order(contact.name), Checked))
        for host in searched:
            self._findings += on_host(host, checked[host].findings + searched[host].findings)
        self._add_or_replace(compare_models({host: checked[host].model for host in searched}, head))
        await self._check_shared(run, f"{MARK}{token}-checkpoints")

    async def _check_shared(self, run: Path, name: str) -> None:
        """Fail each host with learner ranks that does not see the head's file ``name`` in the checkpoint folder."""
        if self.config is None or self.config.learner.backend == "sim":
            return
        learner_hosts = [host for host in self._facts if host in self._learner_hosts]
        if len(learner_hosts) < 2:
            return
        folder = checkpoint_dir(self.config, run)
        sees = await self._who_sees(str(folder), name)
        for host in learner_hosts:
            if host != self._head and sees.get(host) is False:
                text = f"{folder} is not the folder that {self._head} sees, but ranks of the learner are on both"
                fix = "set checkpoint.dir to a folder on a file system that all these hosts share"
                self._add_or_replace([fail("checkpoint_dir", text, fix, host)])

    async def _who_sees(self, folder: str, name: str) -> Mapping[str, bool]:
        """Let the head create the file ``name`` in the folder, and ask each host whether it sees that file.

        Returns True or False by host; empty if the head cannot create the file.
        """
        created = await self._ask_all(lambda contact: contact.ask(Mark(path=folder, name=name), Marked), [self._head])
        path = next((each.path for each in created.values()), "")
        if not path:
            return {}
        answers = await self._ask_all(lambda contact: contact.ask(Look(path=path), Marked))
        return {host: bool(answer.path) for host, answer in answers.items()}

    # --- connections between the hosts ---

    async def _try_links(self) -> None:
        """Let each host listen at a port of network.ports, and let all other hosts connect to it.

        If a learner trains, also try any free port.
        """
        if len(self._addresses) < 2:
            return
        wanted = self.config.network.ports if self.config is not None else ANY_PORT
        learner_trains = self.config is not None and self.config.learner.backend != "sim" and bool(self._placed)
        # torch.distributed takes any free port for the connections of ranks and for a weight broadcast.
        ports = list(dict.fromkeys([wanted, ANY_PORT])) if learner_trains else [wanted]
        token, addresses = secrets.token_hex(16), dict(self._addresses)
        listening = await self._ask_all(
            lambda contact: contact.ask(Listen(address=addresses[contact.name], ports=ports, token=token), Listening),
            list(addresses),
        )
        peers = [Listener(host=host, address=addresses[host], ports=each.ports) for host, each in listening.items()]
        connected = await self._ask_all(
            lambda contact: contact.ask(
                Connect(peers=[peer for peer in peers if peer.host != contact.name], token=token, timeout_s=CONNECT_S),
                Connected,
            ),
            list(listening),
        )
        for range_tried in ports:
            links = [
                # Outside network.ports, only ranks need the link; the transport "stream" replaces a weight broadcast.
                Link(
                    source,
                    target,
                    problems[range_tried],
                    needed=range_tried == wanted or {source, target} <= self._learner_hosts,
                )
                for source, answer in connected.items()
                for target, problems in answer.problems.items()
                if range_tried in problems
            ]
            findings = judge_links(links, range_tried, is_configured=range_tried == wanted)
            if range_tried != wanted:
                # A host that reaches the others is reported once, for network.ports. A closed link of other ports
                # replaces that success below.
                findings = [finding for finding in findings if finding.result != "ok"]
            reported_hosts = {finding.host for finding in findings}
            self._findings = [
                earlier
                for earlier in self._findings
                if earlier.check != "reach" or earlier.result != "ok" or earlier.host not in reported_hosts
            ] + findings

    @property
    def _learner_hosts(self) -> set[str]:
        return {actor.host for actor in self._placed if role_of(actor.name) == "learner"}


async def _read_clock(contact: Contact) -> list[tuple[float, float, float]]:
    """Ask for a host's time CLOCK_ROUNDS times; see ``best_offset`` for the rounds."""
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        # Only the start comes from the wall clock, which may jump; the duration comes from the monotonic clock.
        start, asked = time.monotonic(), time.time()
        host_time = (await contact.ask(ReadClock(), Time)).wall_ns / 1e9
        rounds.append((asked, host_time, asked + time.monotonic() - start))
    return rounds
