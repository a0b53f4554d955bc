"""asyncrl-launch --stop, --join, --leave and --bring-back: end a live run, add or remove hosts, restart a replica.

Wrong usage ends the program before anything beyond the standard library is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from asyncrl.cli.command_line import seconds, split_ssh_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all four commands."""
    parser.add_argument("--stop", metavar="RUN", help="preempt this live run, by its folder or its name under runs/")
    parser.add_argument("--join", metavar="RUN", help="add the hosts of --hosts to the run in this folder")
    parser.add_argument("--leave", metavar="HOST", help="drain this host; the run folder follows")
    parser.add_argument("--bring-back", metavar="NAME", help="start a replica again that the run has set aside")
    parser.add_argument("--within", metavar="SECONDS", type=seconds(0, 86400), help="time that --leave gives to finish")


def is_meant(given: argparse.Namespace) -> bool:
    """Whether the command line asks for one of the four."""
    return any(value is not None for value in (given.stop, given.join, given.leave, given.bring_back, given.within))


def check(parser: argparse.ArgumentParser, given: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Ends the program on wrong usage."""
    chosen = {"--bring-back": given.bring_back, "--stop": given.stop, "--join": given.join, "--leave": given.leave}
    named = [flag for flag, value in chosen.items() if value is not None]
    which = named[0] if named else "--leave"
    if given.resume or given.slurm or given.inside_slurm or given.detach:
        parser.error(f"{which} is for a live run; --resume, --detach, --slurm and --inside-slurm start one")
    if overrides:
        parser.error(f"{which}: the configuration is that of the run, so --{next(iter(overrides))} has no place here")
    if not named:
        parser.error("--within SECONDS belongs to --leave HOST")
    has_choice = bool(given.hosts or given.include or given.exclude or given.ssh_args)
    alone = len(named) == 1 and (given.within is None or which == "--leave")
    if which == "--join":
        if not alone or given.configs:
            parser.error("--join RUN --hosts FILE: only --include, --exclude, --ssh-args and --dry-run go with it")
        if given.hosts is None:
            parser.error("--join RUN: name the hosts by --hosts FILE")
    elif not alone or given.dry_run or has_choice or len(given.configs) != (which != "--stop"):
        parser.error(
            {
                "--stop": "--stop RUN: name one run folder, and nothing else",
                "--leave": "--leave HOST RUN: name one run folder after the host; only --within SECONDS goes with it",
                "--bring-back": "--bring-back NAME RUN: name one run folder after the replica, and nothing else",
            }[which]
        )


def run(given: argparse.Namespace) -> int:
    """The exit code. Raises AsyncRLError or OSError."""
    import asyncio

    from asyncrl.cli.which_run import named
    from asyncrl.launcher.live import commands
    from asyncrl.launcher.live.live_run import find_live_run

    live = find_live_run(named(given.stop or given.join or given.configs[0]))
    if given.stop is not None:
        return asyncio.run(commands.stop_run(live))
    if given.bring_back is not None:
        return asyncio.run(commands.bring_back(live, given.bring_back))
    if given.join is None:
        return asyncio.run(commands.leave_run(live, given.leave, given.within))
    from asyncrl.launcher.hosts.hostfile import read_hostfile, select_hosts
    from asyncrl.launcher.hosts.start import SshStart
    from asyncrl.launcher.live.join import join_run

    lines = select_hosts(read_hostfile(given.hosts), given.include, given.exclude)
    start = SshStart(live.config.supervision.start_timeout_s, split_ssh_args(given.ssh_args))
    return join_run(live, lines, start, dry_run=given.dry_run)
