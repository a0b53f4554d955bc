"""asyncrl-launch --stop, --join, --leave and --bring-back: a living run is ended, hosts come to it and leave it, and a
replica that was set aside is tried again.

Wrong usage ends the program before anything beyond the standard library is loaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from asyncrl.cli.flags import seconds, split_ssh_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all four commands."""
    parser.add_argument(
        "--stop", metavar="RUN", help="end this living run in good order, by its folder or its name under runs/"
    )
    parser.add_argument("--join", metavar="RUN", help="let the hosts of --hosts take part in the run of this folder")
    parser.add_argument("--leave", metavar="HOST", help="drain this host of the run whose folder follows")
    parser.add_argument("--bring-back", metavar="NAME", help="try a replica again that the run has set aside")
    parser.add_argument("--within", metavar="SECONDS", type=seconds(0, 86400), help="time that --leave gives to finish")


def is_meant(given: argparse.Namespace) -> bool:
    """Whether the command line asks for one of the four."""
    return any(value is not None for value in (given.stop, given.join, given.leave, given.bring_back, given.within))


def check(parser: argparse.ArgumentParser, given: argparse.Namespace, overrides: Mapping[str, str]) -> None:
    """Ends the program on wrong usage."""
    flags = ("--stop", "--join", "--leave", "--bring-back")
    chosen = (given.stop, given.join, given.leave, given.bring_back)
    which = next((flag for flag, value in zip(flags, chosen, strict=True) if value is not None), "--leave")
    if given.resume or given.slurm or given.inside_slurm or given.detach:
        parser.error(f"{which} speaks to a run that lives; --resume, --detach, --slurm and --inside-slurm start one")
    if overrides:
        parser.error(f"{which}: the configuration is that of the run, so --{next(iter(overrides))} has no place here")
    if given.bring_back is not None:
        alone = len(given.configs) == 1 and not given.dry_run and not _has_choice(given)
        beside = (given.stop, given.join, given.leave, given.within, given.hosts)
        if not alone or any(value is not None for value in beside):
            parser.error("--bring-back NAME RUN: name one run folder after the replica, and nothing else")
    elif given.stop is not None:
        others = (given.join, given.leave, given.within, given.hosts)
        if given.configs or given.dry_run or _has_choice(given) or any(value is not None for value in others):
            parser.error("--stop RUN: name one run folder, and nothing else")
    elif given.join is not None:
        if given.leave is not None or given.within is not None or given.configs:
            parser.error("--join RUN --hosts FILE: only --include, --exclude, --ssh-args and --dry-run go with it")
        if given.hosts is None:
            parser.error("--join RUN: name the hosts by --hosts FILE")
    elif given.leave is None:
        parser.error("--within SECONDS belongs to --leave HOST")
    elif len(given.configs) != 1 or given.hosts is not None or given.dry_run or _has_choice(given):
        parser.error("--leave HOST RUN: name one run folder after the host; only --within SECONDS goes with it")


def _has_choice(given: argparse.Namespace) -> bool:
    return bool(given.include or given.exclude or given.ssh_args)


def run(given: argparse.Namespace) -> int:
    """The exit code. Raises AsyncRLError or OSError."""
    from asyncrl.cli.which_run import named
    from asyncrl.launcher.live.live_run import find_living

    if given.stop is not None:
        from asyncrl.launcher.live.stop import stop_run

        return stop_run(find_living(named(given.stop)))
    if given.bring_back is not None:
        from asyncrl.launcher.live.leave import bring_back

        return bring_back(find_living(named(given.configs[0])), given.bring_back)
    if given.join is None:
        from asyncrl.launcher.live.leave import leave_run

        return leave_run(find_living(named(given.configs[0])), given.leave, given.within)
    from asyncrl.launcher.fleet.hostfile import read_hostfile, select_hosts
    from asyncrl.launcher.fleet.start import SshStart
    from asyncrl.launcher.live.join import join_run

    lines = select_hosts(read_hostfile(given.hosts), given.include, given.exclude)
    living = find_living(named(given.join))
    start = SshStart(living.config.supervision.start_timeout_s, split_ssh_args(given.ssh_args))
    return join_run(living, lines, start, dry_run=given.dry_run)
