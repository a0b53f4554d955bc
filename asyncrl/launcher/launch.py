"""Launches a run: reaches its hosts, places the actors, starts a node agent on each host, and follows the run.

Without a list of hosts the only host is this one. The head, the host of the controller, is this host if it is in the
list, and else the first. It is moved to the front. Hosts are reached in parallel and then prepared in parallel, each
with the deadline ``supervision.start_timeout_s``. The first host that fails ends the launch, which is undone on the
others. No file is written before all hosts are reached and every actor is placed. Only ``start``, which starts commands
on the hosts, differs between ssh and srun.

Until all hosts are prepared, Ctrl-C, a closed terminal, SIGTERM and SIGUSR2 undo the launch. From then on these
signals preempt the run; a second one ends it at once (follower.py). When ``Launch.launch`` returns, no process of the
run is left here.

Fails with HostFailed for a host, UsageError for the command line, and ConfigError for the configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asyncrl.checkpoint.folder import CheckpointFolder, checkpoint_dir
from asyncrl.checkpoint.origin import digests, record
from asyncrl.config import Config
from asyncrl.config.hub import with_pins
from asyncrl.config.load import config_to_json
from asyncrl.core.errors import ConfigError, UsageError
from asyncrl.core.formatting import say
from asyncrl.launcher.agent_handle import AgentHandle
from asyncrl.launcher.checks.findings import CheckOrder, Finding, Pin, errors_of, rows, warnings_of
from asyncrl.launcher.checks.hub import describe_pin, for_actors, pin
from asyncrl.launcher.common.agent_messages import (
    KILL,
    Checked,
    HostOffer,
    Routes,
    agent_name,
)
from asyncrl.launcher.common.placement import (
    Placed,
    PlacementHost,
    describe,
    place,
    shared_gpus,
    with_episode_hosts,
    with_gpus,
)
from asyncrl.launcher.follower import Follower
from asyncrl.launcher.host_part import (
    GUARD_ARGV,
    LocalGuard,
    download,
    for_hosts,
    host_of,
    host_row,
    host_spec,
    passed_on,
    prepare,
    start_agent,
)
from asyncrl.launcher.hosts.addresses import find_addresses, is_this_host
from asyncrl.launcher.hosts.between_hosts import compare_identities
from asyncrl.launcher.hosts.checks import check_part
from asyncrl.launcher.hosts.contact import ReachedHosts
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.remote import find_facts
from asyncrl.launcher.hosts.start import LocalStart, StartCommand
from asyncrl.launcher.run_folder.ended import write_command
from asyncrl.launcher.run_folder.folders import (
    RunFolder,
    create_run_folder,
    free_run_folder,
    make_run_keyring,
    named_in_utf8,
    private_folder,
    with_date,
    with_pins_of,
)
from asyncrl.launcher.run_folder.private import in_use, is_live, remove_abandoned
from asyncrl.launcher.run_folder.resume import Resumption, find_resumption
from asyncrl.launcher.terminal.detach import Detached
from asyncrl.launcher.terminal.interrupts import Interrupts, undone_by_signals
from asyncrl.launcher.terminal.progress import TerminalProgress
from asyncrl.launcher.terminal.summary import show_end
from asyncrl.rpc.lifecycle.incarnations import attempt_begins_above
from asyncrl.rpc.wire.keys import LAUNCHER, VIEWER, Keyring

RESUMED_FROM = "resumed_from.txt"
"""File in the folder of logs of a resumed attempt: its checkpoint, changed keys and warnings."""


@dataclass
class Launch:
    """The launch of one run on the hosts of ``lines``; without any, on this host alone.

    ``dry_run`` shows the plan, or with "json" the resolved configuration, and starts nothing. ``command`` is the user's
    command line, for the advice how to resume.
    """

    config: Config
    lines: Sequence[HostLine] = ()
    start: StartCommand | None = None
    """Starts commands on the other hosts; None without a hostfile or a SLURM job."""
    dry_run: bool | Literal["json"] = False
    detached: Detached | None = None
    """The command that waits in the terminal (terminal/detach.py)."""
    command: str = ""
    on_folder: Callable[[Path], None] = lambda folder: None
    """Gets the run folder once the run has one."""
    reserved: Path | None = None
    """The folder of a new run, if it was made already."""
    head: str = ""
    """Name of the head; empty before ``launch``."""
    head_is_here: bool = False
    """Whether the head is this host, and its agent is started here and not by ``start``."""
    resumption: Resumption | None = None
    """The run to resume; None for a new run."""
    facts: dict[str, HostOffer] = field(default_factory=dict)
    """Each host's report of its hardware and software by the host's name, the head first."""
    hosts: list[PlacementHost] = field(default_factory=list)
    """The hosts, the head first; ``_place`` sets them, without those that get no actor."""
    placed: list[Placed] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    """The names of the Hugging Face hub in the configuration, pinned."""
    unpinned: list[Finding] = field(default_factory=list)
    """A failure for each name that cannot be pinned, which may be a folder on other hosts."""
    findings: list[Finding] = field(default_factory=list)
    progress: TerminalProgress = field(init=False)
    reached: ReachedHosts = field(init=False)

    def __post_init__(self) -> None:
        self.lines = self.lines or [HostLine(socket.gethostname())]
        # A dry run prints only its plan on standard output.
        self.progress = TerminalProgress(sys.stderr if self.dry_run else sys.stdout, self.config.learner.steps)
        limit_s = self.config.supervision.start_timeout_s
        self.reached = ReachedHosts(self.start or LocalStart(), limit_s, self.progress, count=len(self.lines))

    @property
    def run_dir(self) -> Path:
        """The folder of run folders."""
        return Path(self.config.run.dir).absolute()

    def launch(self, resume: str | None = None, *, shared: bool = False, everywhere: bool = False) -> int:
        """Launch the run, follow it to its end, and return the exit code.

        ``resume`` is the value of --resume. ``shared``: all hosts see the run folder, so this host may resume a run
        without being the head. ``everywhere``: this host also gets its part by ``start``, for example because ``start``
        leads into a container.
        """
        # This comes first, because a run that is live or finished needs no checks.
        self._look_here(resume, shared=shared, everywhere=everywhere)
        return asyncio.run(self.main())

    def _look_here(self, resume: str | None, *, shared: bool, everywhere: bool) -> None:
        """Find the head and the run to resume, set chat.date and pins, and examine this host if it is the head."""
        here = [line for line in self.lines if is_this_host(line.name)]
        # A second name of this host need not be reached to be refused.
        _require_different(dict.fromkeys((line.name for line in here), socket.gethostname()))
        self.head_is_here = bool(here) and not everywhere
        self.lines = [*here, *(line for line in self.lines if line not in here)]
        self.head = self.lines[0].name
        self.config = for_hosts(self.config, len(self.lines))
        if resume is not None:
            if not self.head_is_here and not shared:
                raise UsageError(f"--resume: call it on {self.head}, the head, where the checkpoints are")
            self.config, self.resumption = find_resumption(self.config, resume)
            named_in_utf8(self.resumption.folder.path, "--resume")
        else:
            named_in_utf8(self.run_dir, "run.dir")
        resumed = self.resumption.folder.path if self.resumption is not None else None
        self.config = with_pins_of(with_date(self.config, resumed), resumed)
        if self.head_is_here:
            self.facts[self.head] = facts = find_facts()
            if facts.gpu_problem:
                raise UsageError(facts.gpu_problem)

    async def main(self) -> int:
        """Launch the run and return the exit code. A signal before all hosts are prepared undoes the launch."""
        try:
            return await undone_by_signals(self._main(), self.progress)
        finally:
            await self.reached.close()

    async def _main(self) -> int:
        """Reach the hosts and place the actors. Then show the plan of a dry run, or run if anything is left to do."""
        # head_is_here skips the first line, which is then this host.
        await self.reached.reach([line.name for line in self.lines[self.head_is_here :]])
        self.facts |= {name: contact.facts for name, contact in self.reached.contacts.items()}
        _require_different({name: facts.identity for name, facts in self.facts.items()})
        finished = self.resumption is not None and self.resumption.is_finished
        if not finished:
            await self._pin()
        await self._place(with_checks=not finished)
        if self.dry_run:
            self._show_plan(as_json=self.dry_run == "json")
            return 0
        if self.resumption is not None and finished:
            self.on_folder(self.resumption.folder.path)
            self.progress.say(self.resumption.describe_finished(self.config))
            self.progress.warn(self.resumption.warnings)
            return 0
        return await self.run()

    # --- hosts ---

    async def _pin(self) -> None:
        """Pin the names of the hub. Raises ConfigError for a name without a pin, unless other hosts may have it."""
        found = await pin(self.config)
        self.pins, self.unpinned = found.pins, found.findings
        if self.unpinned and not self.reached.contacts:
            raise ConfigError(errors_of(self.unpinned), found=True)
        self.config = with_pins(self.config, found.by_key())

    async def _fetch(self) -> None:
        """Show the pins, and let every host download what its actors read. Raises ConfigError."""
        for each in self.pins:
            # Only a host of the run knows what its cache lacks.
            self.progress.say(
                describe_pin(each).text if self.head_is_here else f"{each.key}: {each.asked} is {each.name}"
            )
        actors = self._actors_of_hosts()
        pins = {name: for_actors(self.pins, actors.get(name, [])) for name in self.facts}
        await download(self.config, pins, self.reached)

    def _actors_of_hosts(self) -> dict[str, list[str]]:
        """Return the names of the actors by host. Without a placement, the head has all actors."""
        actors: dict[str, list[str]] = {}
        for actor in self.placed:
            actors.setdefault(actor.host, []).append(actor.name)
        return actors or {self.head: list(self.config.actors)}

    async def _place(self, *, with_checks: bool) -> None:
        """Find the hosts' addresses, place the actors, run the checks, and release hosts without an actor.

        Raises ConfigError with the problems of both placement and checks, or UsageError.
        """
        address_of = await self._addresses()
        self.hosts = [host_of(line, self.facts[line.name], address_of[line.name]) for line in self.lines]
        problems = []
        try:
            self.config = with_gpus(self.config, self.hosts)
            self.config = with_episode_hosts(self.config, self.hosts)
            self.placed = place(self.config, self.hosts)
        except ConfigError as error:
            problems = error.problems
        if with_checks:
            if self.pins and not problems:
                await self._fetch()
            self.findings = await self._check(address_of)
        if found := errors_of(self.findings):
            raise ConfigError([*problems, *errors_of(self.unpinned), *found], found=not problems)
        if problems:
            raise ConfigError(problems)
        for finding in self.findings:
            # A dry run shows all findings.
            if finding.check == "sharing" and finding.result == "ok" and not self.dry_run:
                self.progress.say(f"{finding.host}: {finding.text}" if finding.host else finding.text)
        if warnings := warnings_of(self.findings):
            by = "" if self.start else "asyncrl-launch: "
            self.progress.warn([f"{by}{warning}" for warning in warnings])
        used = {actor.host for actor in self.placed}
        for host in [host for host in self.hosts if host.name not in used]:
            self.progress.say(f"{host.name}: has no part in this run, there is nothing left for it to do")
            self.hosts.remove(host)
            await self.reached.contacts.pop(host.name).close()

    async def _check(self, address_of: Mapping[str, str]) -> list[Finding]:
        """Run the list of checks on every host with actors, or without a placement on the head; return the findings."""
        resumed = self.resumption.folder.path if self.resumption is not None else None
        run = resumed or self.reserved or free_run_folder(self.config)
        actors = self._actors_of_hosts()
        orders = {
            name: CheckOrder(
                config=config_to_json(self.config),
                actors=actors[name],
                address=address_of[name] or self.config.network.host,
                run=str(run),
                is_head=name == self.head,
                several=len(self.lines) > 1,
                known=self.resumption.prompts if self.resumption is not None else None,
                resumed=str(resumed or ""),
                folder=os.getcwd(),
                pins=for_actors(self.pins, actors[name]),
                shared_gpus={gpu: " and ".join(who) for gpu, who in shared_gpus(self.placed, name).items()},
                env=passed_on(),
            )
            for name in actors
        }
        facts = self.facts[self.head]
        return await self.reached.collect(orders, Checked, lambda order: check_part(order, facts), "checked")

    async def _addresses(self) -> dict[str, str]:
        """Return each host's address: empty for one host, else by network.interface or the route to the head."""
        if len(self.facts) == 1:
            return {self.head: ""}
        interface = self.config.network.interface
        return await find_addresses(self.facts, interface, lambda query: self.reached.ask(query, Routes, "answered"))

    # --- the run ---

    async def run(self) -> int:
        """Start the placed actors, follow the run to its end, show how it ended, and return the exit code."""
        for path in remove_abandoned(self.run_dir):
            self.progress.say(f"removed {path}, left behind by a run that was killed")
        with contextlib.ExitStack() as held:
            resumed = self.resumption.folder if self.resumption is not None else None
            folder = resumed or create_run_folder(self.config, self.reserved)
            members: list[AgentHandle] = []
            # ``_begin`` calls its ``listen``. Until then a signal cancels the launch.
            interrupts = Interrupts()
            try:
                await self._begin(folder, held, members, interrupts)
            except BaseException:
                await self._undo(folder, members)
                raise
            follower = Follower(self.config, folder, members, self.progress, interrupts)
            if self.detached is not None:
                follower.on_running = self.detached.runs
            ended = await follower.main()
        return show_end(self.config, folder, ended, self.progress)

    async def _begin(
        self, folder: RunFolder, held: contextlib.ExitStack, members: list[AgentHandle], interrupts: Interrupts
    ) -> None:
        """Begin the attempt, prepare all hosts, and start their agents.

        Appends each started agent to ``members``, so that ``_undo`` finds the agents after an error. If this host is
        the head, takes the run folder's lock, and ``held`` keeps the private folder (run_folder/private.py) until it
        exits. Otherwise the head's host takes the lock.
        """
        keyring, lock = make_run_keyring(self.config, folder.run_id, len(self.hosts)), -1
        if self.head_is_here:
            lock = held.enter_context(private_folder(folder, self.config, self._key_files(keyring, 0)))
        elif is_live(folder.path):
            # The head takes the lock later. Another launch may have resumed the run meanwhile.
            raise in_use(folder.path)
        # ``begin`` changes the folder of a resumed run, so the lock must first be held, or be seen free.
        above = begin(folder, self.resumption, self.config, self.progress, self.command)
        self.on_folder(folder.path)
        if self.detached is not None:
            self.detached.has_folder(folder.path, folder.logs, "" if self.head_is_here else self.head)
        index = {host.name: number for number, host in enumerate(self.hosts)}
        specs = {
            name: host_spec(self.config, folder, index[name], self._key_files(keyring, index[name]))
            for name in self.reached.contacts
        }
        await prepare(self.reached, folder, specs)
        # From here on signals preempt the run instead of undoing the launch.
        interrupts.listen()
        contacts = dict(self.reached.contacts)
        if self.head_is_here:
            contacts[self.head] = guard = LocalGuard(self.head if self.start is not None else "")
            await guard.begin(folder, lock)
        for number, host in enumerate(self.hosts):
            actors = [actor for actor in self.placed if actor.host == host.name]
            contact, is_named = contacts[host.name], self.start is not None
            members.append(start_agent(contact, folder, host, actors, above=above, index=number, is_named=is_named))

    async def _undo(self, folder: RunFolder, members: Sequence[AgentHandle]) -> None:
        """Clean up after a failed launch: kill the agents, close the connections, delete the folder of a new run."""
        for member in members:
            member.send(KILL)
        for member in members:
            if member.contact.is_here:
                await member.contact.process.wait()
        await self.reached.close()
        if self.resumption is None:
            shutil.rmtree(folder.path, ignore_errors=True)

    def _key_files(self, keyring: Keyring, index: int) -> dict[str, Any]:
        """Return the key files of a host: its actors and agent, and on the head also launcher and viewer."""
        name = self.hosts[index].name
        own = [*(actor.name for actor in self.placed if actor.host == name), agent_name(index)]
        # Commands that add hosts or watch the run are called on the head.
        return keyring.files_of([*own, LAUNCHER, VIEWER] if index == 0 else own)

    def _show_plan(self, *, as_json: bool) -> None:
        self.progress.end()
        if as_json:
            say(config_to_json(self.config), sys.stdout)
        else:
            for row in plan_rows(self.config, self.placed, self.findings, self.resumption, self._host_rows()):
                say(row, sys.stdout)
        if self.resumption is not None:
            self.progress.warn(self.resumption.warnings)

    def _host_rows(self) -> list[str]:
        """Return a row for each host with the command that starts its agent; no rows without a hostfile or job."""
        rows = []
        for index, host in enumerate(self.hosts if self.start is not None else []):
            here = index == 0 and self.head_is_here
            argv = [*GUARD_ARGV, "PRIVATE_FOLDER", "LOCK"] if here else self.reached.start.argv(host.name)
            rows.append(host_row(host, argv))
        return rows


def _require_different(identities: Mapping[str, str]) -> None:
    """Raise UsageError if two host names lead to one machine. ``identities`` has a text for each name's machine."""
    if problems := errors_of(compare_identities(identities)):
        raise UsageError("\n".join(problems))


def begin(
    folder: RunFolder, resumption: Resumption | None, config: Config, progress: TerminalProgress, command: str = ""
) -> int:
    """Begin an attempt of a run: print its folder or prepare the resumption, and record its digests and command.

    Returns a number; every incarnation (rpc/lifecycle/incarnations.py) of this attempt is above it. So the learner is
    newer than the last one that wrote to the checkpoint folder, which accepts no older one. Raises CheckpointError,
    OSError.
    """
    if resumption is None:
        progress.say(f"run folder: {folder.path}")
    else:
        for path in resumption.begin(config):
            progress.say(f"set aside as {path}")
        lines = [resumption.describe(), *resumption.describe_changes(config)]
        for line in lines:
            progress.say(line)
        progress.warn(resumption.warnings)
        lines += resumption.warnings
        (folder.logs / RESUMED_FROM).write_text("".join(f"{line}\n" for line in lines))
    # Record digests of users' code and the tokenizer before any process of this attempt loads them.
    record(folder.path, digests(config))
    if command:
        write_command(folder, command)
    return attempt_begins_above(folder.attempt, CheckpointFolder(checkpoint_dir(config, folder.path)).newest_writer())


def plan_rows(
    config: Config,
    placed: Sequence[Placed],
    findings: Sequence[Finding],
    resumption: Resumption | None,
    hosts: Sequence[str] = (),
) -> list[str]:
    """Return the rows of ``--dry-run``: placement, checks, hosts, and the run folder or the run that is resumed.

    ``hosts`` are the finished rows of several hosts, empty for one. A run that is finished has no ``findings``.
    """
    found = describe(config, placed)
    found += ["", "checks:", *(f"  {row}" for row in rows(findings))] if findings else []
    found += ["", "hosts:", *hosts] if hosts else []
    if resumption is None:
        found += ["", f"run folder: {free_run_folder(config)}"]
    else:
        found += ["", resumption.describe(), *resumption.describe_changes(config)]
        found += [resumption.describe_finished(config)] if resumption.is_finished else []
    return found
