"""A run on several hosts: reach them, place the actors, give each host its part, follow it to the end.

The head is this host, if it is one of them, and else the first; it comes first from then on. Hosts are reached and
prepared in parallel, with ``supervision.start_timeout_s`` as the deadline of either; the first that cannot take part
ends the launch, and what was begun elsewhere is undone. Nothing is made on disk before all hosts are reached and every
actor has its place. A way to start commands (``start``) is all that ssh and srun have apart.

Fails with HostFailed for hosts, UsageError for what the command line asks of them, ConfigError for what the
configuration does.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from asyncrl.config import Config
from asyncrl.config.load import config_to_json, validate_config
from asyncrl.config.operation import NetworkConfig
from asyncrl.errors import ConfigError, UsageError
from asyncrl.launcher import addresses
from asyncrl.launcher.begun import leave_name
from asyncrl.launcher.checks import check_head, check_sinks, errors_of, warnings_of
from asyncrl.launcher.date import with_date
from asyncrl.launcher.detach import Detached
from asyncrl.launcher.folders import (
    RUN_ID,
    RunFolder,
    create_run_folder,
    make_run_keyring,
    private_folder,
    remove_abandoned,
)
from asyncrl.launcher.follow import Follower
from asyncrl.launcher.hostfile import HostLine
from asyncrl.launcher.hosts import local_host
from asyncrl.launcher.hostspec import Facts, HostSpec, ModelFound, ModelQuery, Prepared, RouteQuery, Routes
from asyncrl.launcher.interrupts import undone_by_signals
from asyncrl.launcher.link import agent_name
from asyncrl.launcher.local import ACTOR_ARGV, GUARD_ARGV, agent_spec, begin, show_end, start_guard
from asyncrl.launcher.member import Member
from asyncrl.launcher.placement import INTERFACE_VARIABLES, Host, Placed, place, with_episode_hosts, with_gpus
from asyncrl.launcher.plan import plan_rows
from asyncrl.launcher.progress import Progress
from asyncrl.launcher.reach import Reached
from asyncrl.launcher.resume import Resumption, find_resumption
from asyncrl.launcher.spec import KILL
from asyncrl.launcher.start import StartCommand, shown
from asyncrl.monitor.printable import say
from asyncrl.preflight.findings import Finding, on_host
from asyncrl.preflight.limits import judge_descriptors
from asyncrl.preflight.needs import descriptors_need
from asyncrl.roles import ROLES, role_of
from asyncrl.runtime.roster import LAUNCHER
from asyncrl.wire.keys import VIEWER, Keyring

PASSED_ON = ("ASYNCRL_", "GLOO_", "HF_", "NCCL_", "PYTHONPATH", "PYTORCH_", "TOKENIZERS_", "TORCH_", "VLLM_")
"""Beginnings of the names of environment variables that the other hosts have as they are here."""


def run_hosts(
    config: Config,
    lines: Sequence[HostLine],
    start: StartCommand,
    *,
    resume: str | None = None,
    dry_run: bool | Literal["json"] = False,
    actor_argv: Sequence[str] = ACTOR_ARGV,
    shared: bool = False,
    everywhere: bool = False,
    detached: Detached | None = None,
    command: str = "",
) -> int:
    """Run on these hosts to the end and show it; the exit code. With ``dry_run`` only what would run is shown, with
    "json" its configuration.

    ``shared`` says that all hosts see the run folder, so that a run is resumed wherever its head is; ``everywhere``,
    that this host too has its part by ``start``, as where that leads into a container. ``detached`` hears of the run's
    folder, and that the run runs; ``command`` goes on with it where --resume is added.
    """
    progress = Progress(sys.stdout, config.learner.steps)
    launch = _Launch(config, lines, start, resume, dry_run, actor_argv, progress, shared, everywhere, detached, command)
    return asyncio.run(launch.main())


@dataclass
class _Launch:
    config: Config
    lines: Sequence[HostLine]
    start: StartCommand
    resume: str | None
    dry_run: bool | Literal["json"]
    actor_argv: Sequence[str]
    progress: Progress
    shared: bool = False
    everywhere: bool = False
    detached: Detached | None = None
    command: str = ""
    head: str = ""
    head_is_here: bool = False
    facts: dict[str, Facts] = field(default_factory=dict)
    """Facts by host, the head first."""
    hosts: list[Host] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Findings of the checks before the start."""
    reached: Reached = field(init=False)
    """The hosts but this one."""

    def __post_init__(self) -> None:
        self.reached = Reached(
            self.start, self.config.supervision.start_timeout_s, self.progress, count=len(self.lines)
        )

    @property
    def run_dir(self) -> Path:
        """The folder of run folders."""
        return Path(self.config.run.dir).absolute()

    async def main(self) -> int:
        """Launch the run: until the agents live a signal undoes everything; from then on it is theirs."""
        try:
            return await undone_by_signals(self._main(), self.progress)
        finally:
            await self.reached.close()

    async def _main(self) -> int:
        self._find_head()
        await self._reach()
        self.config = _for_hosts(self.config, len(self.facts))
        # First: nothing is to be checked of a run that lives or is finished.
        resumption = self._find_resumption()
        self.config = with_date(self.config, resumption.folder.path if resumption is not None else None)
        is_finished = resumption is not None and resumption.is_finished
        await self._place(resumption, with_checks=not is_finished)
        if self.dry_run:
            self._show_plan(resumption)
            return 0
        if resumption is not None and is_finished:
            self.progress.say(resumption.describe_finished(self.config))
            self.progress.warn(resumption.warnings)
            return 0
        with contextlib.ExitStack() as held:
            folder, ended = await self._run(resumption, held)
        return show_end(self.config, folder, ended, self.progress)

    # --- hosts ---

    def _find_head(self) -> None:
        here = [line for line in self.lines if addresses.is_this_host(line.name)]
        if len(here) > 1:
            raise UsageError(f"{' and '.join(line.name for line in here)} are the same host, this one; name it once")
        self.head_is_here = bool(here) and not self.everywhere
        self.lines = [*here, *(line for line in self.lines if line not in here)]
        self.head = self.lines[0].name

    async def _reach(self) -> None:
        names = [line.name for line in self.lines[self.head_is_here :]]
        await self.reached.reach(names)
        if self.head_is_here:
            host = await asyncio.to_thread(local_host)
            self.facts[self.head] = Facts(
                version=version("asyncrl"),
                hostname=host.name,
                cpus=host.cpus,
                gpus=list(host.gpus),
                interfaces=addresses.interfaces(),
            )
        self.facts |= {name: contact.facts for name, contact in self.reached.contacts.items()}

    async def _place(self, resumption: Resumption | None, *, with_checks: bool) -> None:
        """Addresses and actors of each host. Raises ConfigError with every problem, or UsageError."""
        at = await self._addresses()
        self.hosts = []
        for line in self.lines:
            facts = self.facts[line.name]
            self.hosts.append(
                Host(
                    name=line.name,
                    cpus=facts.cpus,
                    gpus=line.usable(facts.gpus),
                    address=at[line.name],
                    interface=addresses.interface_of(facts, at[line.name]),
                )
            )
        problems = []
        try:
            self.config = with_gpus(self.config, self.hosts)
            self.config = with_episode_hosts(self.config, self.hosts)
            self.placed = place(self.config, self.hosts)
        except ConfigError as error:
            problems = error.problems
        if with_checks:
            self.findings = await self._check(at[self.head] or self.config.network.host, resumption)
        if found := errors_of(self.findings):
            raise ConfigError([*problems, *found], found=not problems)
        if problems:
            raise ConfigError(problems)
        if warnings := warnings_of(self.findings):
            self.progress.warn(warnings)
        used = {actor.host for actor in self.placed}
        for host in [host for host in self.hosts if host.name not in used]:
            self.progress.say(f"{host.name}: has no part in this run, there is nothing left for it to do")
            self.hosts.remove(host)
            await self.reached.contacts.pop(host.name).close()

    async def _check(self, address: str, resumption: Resumption | None) -> list[Finding]:
        """Look at the head, where that is this host, and hear what the others say of themselves."""
        found = []
        if self.head_is_here:
            # Without a placement all actors are looked at as if they were here.
            here = [actor.name for actor in self.placed if actor.host == self.head] or self.config.actors
            found = await check_head(self.config, here, address, resumption)
        else:
            found = check_sinks(self.config.sinks, self.facts[self.head].sinks, self.head)
        for name in self.reached.contacts:
            if limit := self.facts[name].descriptors:
                found.append(judge_descriptors(limit, descriptors_need(self.config, None), name))
        if self.config.model.path is not None:
            with_model = {actor.host for actor in self.placed if ROLES[role_of(actor.name)].reads_model}
            query = ModelQuery(path=self.config.model.path, folder=os.getcwd())
            asked = dict.fromkeys([name for name in self.reached.contacts if name in with_model], query)
            answers = await self.reached.ask(asked, ModelFound, "answered")
            found += [one for name, answer in answers.items() for one in on_host(name, [answer.finding])]
        return found

    async def _addresses(self) -> dict[str, str]:
        if len(self.facts) == 1:
            return {self.head: ""}
        if self.config.network.interface is not None:
            return addresses.by_interface(self.facts, self.config.network.interface)
        others = [name for name in self.facts if name != self.head]
        query = RouteQuery(head=self.head, addresses=list(addresses.usable(self.facts[self.head])))
        routes = await self.reached.ask(dict.fromkeys(others, query), Routes, "answered")
        return addresses.by_route(self.head, self.facts, routes)

    def _find_resumption(self) -> Resumption | None:
        if self.resume is None:
            return None
        if not self.head_is_here and not self.shared:
            raise UsageError(f"--resume: call it on {self.head}, the head, where the checkpoints are")
        self.config, resumption = find_resumption(self.config, self.resume)
        return resumption

    # --- the run ---

    async def _run(self, resumption: Resumption | None, held: contextlib.ExitStack) -> tuple[RunFolder, Any]:
        for path in remove_abandoned(self.run_dir):
            self.progress.say(f"removed {path}, left behind by a run that was killed")
        folder = resumption.folder if resumption is not None else create_run_folder(self.config)
        keyring = make_run_keyring(self.config, folder.run_id, len(self.hosts))
        lock = -1
        members: list[Member] = []
        try:
            if self.head_is_here:
                lock = held.enter_context(private_folder(folder, self.config, self._files(keyring, 0)))
            above = begin(folder, resumption, self.config, self.progress, self.command)
            if self.detached is not None:
                self.detached.has_folder(folder.path, folder.logs, "" if self.head_is_here else self.head)
            (folder.logs / RUN_ID).write_text(folder.run_id)
            specs = {name: self._host_spec(name, folder, keyring) for name in self.reached.contacts}
            await self.reached.ask(specs, Prepared, "prepared")
            for index, host in enumerate(self.hosts):
                members.append(await self._start_agent(index, host, folder, lock, above))
        except BaseException:
            for member in members:
                member.send(KILL)
            for member in members:
                if member.contact is None:
                    await member.process.wait()
            await self.reached.close()
            if resumption is None and folder.attempt == 1:
                shutil.rmtree(folder.path, ignore_errors=True)
            elif resumption is None:
                leave_name(folder.path, Path.cwd())
            raise
        follower = Follower(self.config, folder, members, self.progress)
        if self.detached is not None:
            follower.on_running = self.detached.runs
        return folder, await follower.main()

    async def _start_agent(self, index: int, host: Host, folder: RunFolder, lock: int, above: int) -> Member:
        actors = [as_set_here(actor) for actor in self.placed if actor.host == host.name]
        at, name = host.address, host.name
        spec = agent_spec(self.config, folder, actors, self.actor_argv, above=above, index=index, host=at, name=name)
        contact = self.reached.contacts.get(host.name)
        if contact is None:
            return Member(index, host.name, await start_guard(folder, lock, spec))
        contact.keep_errors(folder.logs / f"start-{host.name}.log")
        contact.send(msgspec.json.encode(spec) + b"\n")
        return Member(index, host.name, contact.process, contact)

    def _host_spec(self, name: str, folder: RunFolder, keyring: Keyring) -> HostSpec:
        index = [host.name for host in self.hosts].index(name)
        return HostSpec(
            version=version("asyncrl"),
            run_id=folder.run_id,
            run_dir=str(folder.path),
            log_dir=str(folder.logs),
            index=index,
            config=config_to_json(self.config),
            credentials=self._files(keyring, index),
            folder=os.getcwd(),
            env=passed_on(),
        )

    def _files(self, keyring: Keyring, index: int) -> dict[str, Any]:
        """The credentials of a host: those of its own actors and agent."""
        name = self.hosts[index].name
        own = [*(actor.name for actor in self.placed if actor.host == name), agent_name(index)]
        # Hosts are let in, and a run is watched, from its head.
        return keyring.files_of([*own, LAUNCHER, VIEWER] if index == 0 else own)

    def _show_plan(self, resumption: Resumption | None) -> None:
        self.progress.end()
        if self.dry_run == "json":
            say(config_to_json(self.config), sys.stdout)
            return
        rows = []
        for index, host in enumerate(self.hosts):
            here = index == 0 and self.head_is_here
            where = f" at {host.address} ({host.interface})" if host.address else ""
            argv = [*GUARD_ARGV, "PRIVATE_FOLDER", "LOCK"] if here else self.start.argv(host.name)
            rows.append(f"  {host.name}{where}: {shown(argv)}")
        for row in plan_rows(self.config, self.placed, self.findings, resumption, rows):
            say(row, sys.stdout)
        if resumption is not None:
            self.progress.warn(resumption.warnings)


def passed_on() -> dict[str, str]:
    """The environment variables that are the same on all hosts."""
    return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}


def as_set_here(actor: Placed) -> Placed:
    """The actor without the interfaces that the user has chosen by environment variables, which come first."""
    env = {key: value for key, value in actor.env.items() if key not in INTERFACE_VARIABLES or key not in os.environ}
    return dataclasses.replace(actor, env=env)


def _for_hosts(config: Config, count: int) -> Config:
    """The configuration of a run on as many hosts. Raises ConfigError."""
    if count == 1:
        return config
    if config.network.host != NetworkConfig().host:
        raise ConfigError(
            [
                "network.host: is for a run on one host; several take the address of network.interface, or by default "
                "that of the route to the head"
            ]
        )
    if config.security.curve != "auto":
        return config
    tree = config.model_dump(mode="json")
    tree["security"]["curve"] = "required"
    return validate_config(tree)
