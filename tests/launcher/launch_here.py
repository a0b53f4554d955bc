"""``python launch_here.py REQUEST_JSON`` launches a run over hosts that are all this machine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from asyncrl.cli.command_line import flushed
from asyncrl.config.load import validate_config
from asyncrl.launcher import host_part
from asyncrl.launcher.common.placement import PlacementHost, place, with_episode_hosts, with_gpus
from asyncrl.launcher.hosts.hostfile import HostLine
from asyncrl.launcher.launch import Launch
from asyncrl.launcher.run_folder.resume import find_resumption
from asyncrl.launcher.terminal.interrupts import undone_by_signals


def main() -> int:
    request = json.loads(sys.argv[1])
    config, resumption = validate_config(request["tree"]), None
    if request["resume"]:
        config, resumption = find_resumption(config, request["resume"])
    hosts = [PlacementHost(name=name, cpus=2) for name in request["hosts"]]
    config = with_episode_hosts(with_gpus(config, hosts), hosts)
    host_part.ACTOR_ARGV = request["argv"] or host_part.ACTOR_ARGV
    launch = Launch(config, [HostLine("here")], head="here", head_is_here=True)
    launch.hosts, launch.resumption = [PlacementHost(name="here", cpus=2)], resumption
    launch.placed = [dataclasses.replace(actor, host="here") for actor in place(config, hosts)]
    return flushed("launched", lambda: asyncio.run(undone_by_signals(launch.run(), launch.progress)))


if __name__ == "__main__":
    sys.exit(main())
