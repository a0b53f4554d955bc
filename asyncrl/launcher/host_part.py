"""A host's part of a run: its downloads, the specifications of host and node agent, and the start of the agent.

The agent starts on this host below a guard, or on another host over a connection. Fails with UsageError for a host that
has fewer GPUs than its line of the hostfile says. Fails with ConfigError for keys that several hosts cannot have and
for downloads, with HostFailed, and with OSError.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.checkpoint import DIGESTS
from asyncrl.config import Config
from asyncrl.config.engines import ENGINES
from asyncrl.config.load import config_to_json, with_values
from asyncrl.config.operation import NetworkConfig
from asyncrl.core.errors import ConfigError
from asyncrl.launcher.agent_handle import AgentHandle
from asyncrl.launcher.checks.findings import Fetched, FetchOrder, Pin, errors_of
from asyncrl.launcher.checks.hub import fetch
from asyncrl.launcher.common.agent_messages import AgentSpec, HostOffer, HostSpec, Prepared
from asyncrl.launcher.common.placement import INTERFACE_VARIABLES, Placed, PlacementHost
from asyncrl.launcher.hosts.addresses import interface_of
from asyncrl.launcher.hosts.contact import LONGEST_LINE_BYTES, Contact, ReachedHosts
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.hosts.start import LocalStart, shown
from asyncrl.launcher.run_folder.folders import RunFolder
from asyncrl.launcher.run_folder.private import RUN_ID
from asyncrl.rpc.linux import children_of

ACTOR_ARGV = (sys.executable, "-m", "asyncrl.cli.actor")
GUARD_ARGV = (sys.executable, "-m", "asyncrl.launcher.node.guard")
PASSED_ON = (
    *("ASYNCRL_", "GLOO_", "HF_", "NCCL_", "PYTHONPATH", "PYTORCH_", "TOKENIZERS_", "TORCH_"),
    *(variable for traits in ENGINES.values() for variable in traits.environment),
)
"""Prefixes of the environment variables that the launcher copies to the other hosts."""
SLACK_S = 30.0
"""Time for the answer of a host whose download reached its deadline (s)."""


def for_hosts(config: Config, count: int) -> Config:
    """Return the configuration for ``count`` hosts: with several, security.curve = "auto" becomes "required".

    Raises ConfigError if ``network.host`` is set for several hosts.
    """
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
    return with_values(config, {"security.curve": "required"})


def host_of(line: HostLine, facts: HostOffer, address: str) -> PlacementHost:
    """Return a host for the placement, from its line of the hostfile and its ``facts``.

    Raises UsageError if the host has fewer GPUs than the line says.
    """
    return PlacementHost(
        name=line.name,
        cpus=facts.cpus,
        gpus=line.usable(facts.gpus),
        address=address,
        interface=interface_of(facts, address),
    )


async def download(config: Config, pins: Mapping[str, Sequence[Pin]], reached: ReachedHosts) -> None:
    """Let each host download the files of its pins to its own cache, all at the same time. ``pins`` are by host name.

    A pin is a name of the Hugging Face hub with its commit. Hosts without pins get an order too, after which they wait
    longer for the next one. Raises ConfigError with the problems of all hosts, and HostFailed.
    """
    orders = {name: fetch_order(config, each) for name, each in pins.items()}
    limit_s = config.hub.timeout_s + SLACK_S
    if found := await reached.collect(orders, Fetched, fetch, "downloaded", limit_s, "hub.timeout_s"):
        raise ConfigError(errors_of(found), found=True)


def fetch_order(config: Config, pins: Sequence[Pin]) -> FetchOrder:
    """Return the order to download ``pins`` on a host, in the launcher's working directory, within hub.timeout_s."""
    return FetchOrder(pins=list(pins), limit_s=config.hub.timeout_s, folder=os.getcwd(), env=passed_on())


def host_row(host: PlacementHost, argv: Sequence[str], more: str = "") -> str:
    """Return the row of a dry run for a host, with the command that starts its part."""
    where = f" at {host.address} ({host.interface})" if host.address else ""
    return f"  {host.name}{where}{more}: {shown(argv)}"


def host_spec(config: Config, folder: RunFolder, index: int, credentials: dict[str, Any]) -> HostSpec:
    """Return the specification that prepares the host of agent ``index``; ``credentials`` are its key files."""
    return HostSpec(
        run_id=folder.run_id,
        run_dir=str(folder.path),
        log_dir=str(folder.logs),
        index=index,
        config=config_to_json(config),
        credentials=credentials,
        folder=os.getcwd(),
        env=passed_on(),
        files={DIGESTS: (folder.path / DIGESTS).read_text()},
    )


async def prepare(reached: ReachedHosts, folder: RunFolder, specs: Mapping[str, HostSpec]) -> None:
    """Prepare hosts for their parts of the run; ``specs`` are by host name. Raises HostFailed."""
    if specs:
        # A host that can read this id in the folder sees the same run folder, and uses it.
        with contextlib.suppress(FileExistsError), (folder.logs / RUN_ID).open("x") as file:
            file.write(folder.run_id)
    await reached.ask(specs, Prepared, "prepared")


def passed_on() -> dict[str, str]:
    """Return this process's environment variables that all hosts get."""
    return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}


def start_agent(
    contact: Contact,
    folder: RunFolder,
    host: PlacementHost,
    placed: Sequence[Placed],
    *,
    above: int,
    index: int,
    is_named: bool = True,
) -> AgentHandle:
    """Start the agent of a prepared host over its connection, with ``placed``, its actors, and their environment.

    Every incarnation of its actors is above ``above``. ``is_named`` is False in a run without a hostfile or a SLURM
    job. Network interfaces that the user has set in the environment win over those of the placement.
    """
    chosen = [name for name in INTERFACE_VARIABLES if name in os.environ]
    spec = AgentSpec(
        run_dir=str(folder.path),
        log_dir=str(folder.logs),
        argv=list(ACTOR_ARGV),
        actors={actor.name: {key: value for key, value in actor.env.items() if key not in chosen} for actor in placed},
        index=index,
        host=host.address,
        name=host.name if is_named else "",
        above=above,
    )
    contact.keep_errors(folder.logs / f"start-{contact.name}.log")
    contact.send(msgspec.json.encode(spec) + b"\n")
    return AgentHandle(index, contact)


class LocalGuard(Contact):
    """The guard of this host as a contact. It starts the agent, which reads its spec from standard input."""

    is_here = True

    def __init__(self, name: str) -> None:
        super().__init__(name, LocalStart())
        self._kills = 0

    async def begin(self, folder: RunFolder, lock: int) -> None:
        """Start the guard, which inherits the descriptor ``lock`` of the run's lock. Raises OSError."""
        with (folder.logs / "agent-0.log").open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                *GUARD_ARGV,
                str(folder.private),
                str(lock),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=(lock,),
                limit=LONGEST_LINE_BYTES,
            )

    def kill(self) -> None:
        """Kill the agent and have the guard end the rest; when repeated, kill the guard."""
        if self.process.returncode is not None:
            return
        for agent in children_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent, signal.SIGKILL)
        # SIGCONT: a stopped guard runs again. If the guard is killed, the actors die with their parent.
        self.process.send_signal(signal.SIGKILL if self._kills else signal.SIGCONT)
        self._kills += 1
