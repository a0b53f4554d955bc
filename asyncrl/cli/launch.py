"""asyncrl-launch: start a run and follow it to its end, submit it to SLURM, or change a live run.

Importing this module, ``--help`` and wrong usage load nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from asyncrl.cli.command_line import (
    Parser,
    complain,
    complain_of,
    interruptible,
    raise_at_signals,
    seconds,
    split_flags,
    split_ssh_args,
)

if TYPE_CHECKING:
    from asyncrl.launcher.hosts.hostfile import HostLine
    from asyncrl.launcher.hosts.start import StartCommand
    from asyncrl.launcher.terminal.detach import Detached

PROGRAM = "asyncrl-launch"
DESCRIPTION = "Post-train a language model with asynchronous reinforcement learning."
EPILOG = """\
Configuration: the CONFIG files (TOML) are merged left to right. Flags with dotted keys come last:

  asyncrl-launch configs/quickstart.toml --learner.lr 1e-6 --run.name=trial --rollout.stop '["\\n"]'

A value is read as TOML, or as plain text if it is not TOML or the key holds text. --help-config lists every key.

Before the start, model, tokenizer, prompts, reward function, ports, disk, limits and GPUs are checked. --dry-run shows
placement and findings, and starts nothing. --dry-run --json shows the resolved configuration. --dry-run --generate N
loads the engine on this host, and samples a response to each of the first N prompts. It scores the responses with the
reward function and prints them.

Ctrl-C, a closed terminal, SIGTERM and SIGUSR2 preempt a run: it delivers finished groups, writes a checkpoint within
preempt.grace_s, and ends. A second Ctrl-C or SIGTERM ends it at once. --stop RUN preempts a run from another terminal
on the head's machine, even if the launcher was killed. RUN is the run's folder, or its name under runs/. The exit code
of --stop is 0 if the run has ended and can be resumed from a checkpoint, or had nothing to lose, else 1.

--detach starts a run that outlives the terminal, and returns once it runs, or with the exit code of a start that
failed. The output goes to launcher.log among the run's logs.

--resume auto resumes the run of run.dir and run.name in its folder, from its newest whole checkpoint. Among NAME,
NAME-2 and so on it takes the one with the newest checkpoint. --resume PATH resumes that run folder, or exactly that
checkpoint (newer ones are set aside). It prints each key that changed, both values, and what the change applies to.
The prompts, the seed and the geometry of a batch must not change, unless --allow-changed-data, -seed or -batch allows
it.

--hosts FILE runs on the hosts of a file, which has a line for each: NAME, or NAME slots=GPUS. ssh must reach them
without a password, and asyncrl must be installed at the same path on each. This host is the head if it is among them,
else the first is.

--join RUN --hosts FILE adds hosts with rollouters to a live run, by its folder on its head's machine. They get the
configuration of the run. The command follows them; Ctrl-C drains them, and the run continues. --leave HOST RUN
drains a host that has rollouters only; --within SECONDS is the time to finish groups (supervision.drain_s).
--bring-back NAME RUN starts a replica again that the run lets rest, as rollouter/3.

--slurm --nodes N submits a job that runs this on N nodes of a SLURM cluster. With --dry-run its script is shown.
--inside-slurm is what that script calls: it runs on the nodes of its own job, and resumes a run that is there already.

Exit codes: 0 done; 1 failed; 2 wrong usage; 75 preempted, with a complete checkpoint to resume from; 78 wrong
configuration. For a run that ended during the start or without a checkpoint: 130 by Ctrl-C, 129 by a closed terminal,
143 by SIGTERM or --stop, 140 by SIGUSR2.
"""


MOST_GENERATED = 100
ALLOWED = (("data", "the prompts"), ("seed", "run.seed"), ("batch", "the geometry of a batch"))
"""Inputs that a resume may change: the end X of the flag --allow-changed-X, and the words for the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return interruptible(PROGRAM, lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: list[str]) -> int:
    parser = _parser()
    overrides, rest = split_flags(parser, _join_values(argv))
    given = parser.parse_args(rest)
    if given.help_config:
        return _print_keys()
    is_for_live_run = _is_for_live_run(given)
    if is_for_live_run:
        _check_live_run_flags(parser, given, overrides)
    elif not given.configs:
        parser.error(f"no CONFIG file is given; for example: {PROGRAM} configs/NAME.toml")

    from asyncrl.core.errors import AsyncRLError

    if given.hosts is None and not is_for_live_run and (given.include or given.exclude or given.ssh_args):
        parser.error("--include, --exclude and --ssh-args belong to --hosts FILE")
    if given.json and (not given.dry_run or given.slurm or is_for_live_run):
        parser.error("--json belongs to --dry-run: it shows the resolved configuration")
    _check_slurm_flags(parser, given)
    _check_generate(parser, given, is_for_live_run)
    detached: Detached | None = None
    if given.detach:
        from asyncrl.launcher.terminal.detach import Detached, detach

        # The command's own process gets an exit code here; the detached one gets a Detached and starts the run.
        answer = detach()
        if not isinstance(answer, Detached):
            return answer
        detached = answer
    try:
        if is_for_live_run:
            return _command_live_run(given)
        if given.slurm:
            return _submit(given, overrides)
        return _run(given, overrides, detached, without_resume(argv))
    except AsyncRLError as error:
        return complain_of(PROGRAM, error)


def _parser() -> Parser:
    usage = (
        f"{PROGRAM} CONFIG... [--hosts FILE | --slurm --nodes N] [--dry-run] [--resume auto|PATH] [--KEY VALUE]\n"
        f"       {PROGRAM} --stop RUN\n       {PROGRAM} --join RUN --hosts FILE\n       {PROGRAM} --leave HOST RUN\n"
        f"       {PROGRAM} --bring-back NAME RUN"
    )
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG, usage)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="TOML files, merged left to right")
    parser.add_argument(
        "--dry-run", action="store_true", help="show placement, checks and the run folder, start nothing"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: show the resolved configuration instead")
    parser.add_argument(
        "--generate",
        metavar="N",
        type=int,
        help="with --dry-run: sample responses to the first N prompts, and score them",
    )
    parser.add_argument("--detach", action="store_true", help="start a run that outlives this terminal")
    parser.add_argument("--resume", metavar="auto|PATH", help="resume a run: the newest of run.name, or this one")
    for what, meaning in ALLOWED:
        parser.add_argument(f"--allow-changed-{what}", action="store_true", help=f"resume although {meaning} changed")
    parser.add_host_arguments("run on")
    _add_live_run_arguments(parser)
    parser.add_argument("--slurm", action="store_true", help="submit this as a job of SLURM")
    parser.add_argument("--nodes", metavar="N", type=int, help="of the job")
    parser.add_argument("--sbatch-args", metavar="ARGS", help="further arguments of sbatch, as in --time=4:00:00")
    parser.add_argument("--inside-slurm", action="store_true", help="run on the nodes of the job this is called in")
    parser.add_argument("--container", metavar="WORDS", help="what leads into the container: srun options, a command")
    parser.add_argument("--help-config", action="store_true", help="list every key of the configuration")
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"asyncrl {version('asyncrl')}")
        parser.exit()


def _run(given: argparse.Namespace, overrides: dict[str, str], detached: Detached | None, command: str) -> int:
    """Run on this host, on the hosts of --hosts by ssh, or on the nodes of this SLURM job, and return the exit code.

    ``command`` is the user's command line for a later resume. Raises AsyncRLError or OSError.
    """
    from asyncrl.config.load import load_config
    from asyncrl.launcher.launch import Launch

    dry_run: bool | Literal["json"] = "json" if given.json else given.dry_run
    lines: list[HostLine] = []
    if given.hosts is not None:
        from asyncrl.launcher.hosts.hostfile import read_hostfile, select_hosts

        lines = select_hosts(read_hostfile(given.hosts), given.include, given.exclude)
    config = load_config(given.configs, _with_allowed(given, overrides))
    start: StartCommand | None = None
    if given.inside_slurm:
        from asyncrl.launcher.slurm import job_hosts, resume_of, start_of

        nodes, start, in_container = job_hosts(), start_of(given.container), given.container is not None
        launch = Launch(config, nodes, start, dry_run)
        return launch.launch(resume_of(config, given.resume), shared=True, everywhere=in_container)
    if lines:
        from asyncrl.launcher.hosts.start import SshStart

        start = SshStart(config.supervision.start_timeout_s, split_ssh_args(given.ssh_args))
    launch = Launch(config, lines, start, dry_run, detached, command)
    code = launch.launch(given.resume)
    if dry_run and given.generate is not None:
        from asyncrl.launcher.doctor.generate import print_generated

        # The event loop of the dry run has reset the signal handlers to Python's defaults.
        raise_at_signals()
        print_generated(launch.config, given.generate)
    return code


def without_resume(argv: list[str]) -> str:
    """Return the command line that ``argv`` came from, quoted for a shell, without --resume and its value."""
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--resume":
            next(rest, None)
        elif not word.startswith("--resume="):
            words.append(word)
    return shlex.join([PROGRAM, *words])


def _join_values(argv: Sequence[str]) -> list[str]:
    """Join --sbatch-args and --container with their values by ``=``, because argparse would take these for flags."""
    words: list[str] = []
    for word in argv:
        if words and words[-1] in ("--sbatch-args", "--container"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _check_slurm_flags(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if sum((given.slurm, given.inside_slurm, given.hosts is not None)) > 1:
        parser.error("--hosts, --slurm and --inside-slurm are three ways to say where to run; choose one")
    if given.detach and (given.slurm or given.inside_slurm or given.dry_run):
        parser.error(
            "--detach starts a run from here; --slurm and --inside-slurm leave that to SLURM, --dry-run starts none"
        )
    if not given.slurm and (given.nodes is not None or given.sbatch_args is not None):
        parser.error("--nodes and --sbatch-args belong to --slurm")
    if not (given.slurm or given.inside_slurm) and given.container is not None:
        parser.error("--container belongs to --slurm and --inside-slurm")
    if given.slurm and given.nodes is None:
        parser.error("--slurm: say how many nodes, as in --nodes 2")


def _check_generate(parser: Parser, given: argparse.Namespace, is_for_live_run: bool) -> None:
    if given.generate is None:
        return
    if not given.dry_run or given.json or is_for_live_run:
        parser.error("--generate belongs to --dry-run, without --json")
    if given.hosts is not None or given.slurm or given.inside_slurm:
        parser.error("--generate samples on this host; leave out --hosts and --slurm")
    if given.resume is not None:
        parser.error("--generate samples from model.path; leave out --resume")
    if not 1 <= given.generate <= MOST_GENERATED:
        parser.error(f"--generate takes 1 to {MOST_GENERATED} prompts, got {given.generate}")


def _submit(given: argparse.Namespace, overrides: dict[str, str]) -> int:
    """Write the batch script and submit it, or only print it for --dry-run. Raises AsyncRLError or OSError."""
    from asyncrl.config.load import load_config
    from asyncrl.launcher.slurm import batch_script, left_open, start_of, submit

    config = load_config(given.configs, _with_allowed(given, overrides))
    # Only raises UsageError for a wrong --container, before the job would.
    start_of(given.container)
    argv = [sys.executable, "-m", "asyncrl.cli.launch", "--inside-slurm", *given.configs]
    argv += [f"--{key}={value}" for key, value in overrides.items()]
    argv += [f"--allow-changed-{what}" for what, _ in ALLOWED if getattr(given, f"allow_changed_{what}")]
    argv += [f"--{key}={value}" for key in ("resume", "container") if (value := getattr(given, key)) is not None]
    options = given.sbatch_args or ""
    script = batch_script(config, argv, nodes=given.nodes, options=options)
    for warning in left_open(config, nodes=given.nodes, options=options):
        complain(PROGRAM, f"warning: {warning}", 0)
    if given.dry_run:
        print(script, end="")
        return 0
    job, path, output = submit(config, script)
    print(f"submitted job {job} ({path}); its output goes to {output}")
    return 0


# --- a live run ---


def _add_live_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stop", metavar="RUN", help="preempt this live run, by its folder or its name under runs/")
    parser.add_argument("--join", metavar="RUN", help="add the hosts of --hosts to the run in this folder")
    parser.add_argument("--leave", metavar="HOST", help="drain this host; the run folder follows")
    parser.add_argument("--bring-back", metavar="NAME", help="start a replica again that the run lets rest")
    parser.add_argument("--within", metavar="SECONDS", type=seconds(0, 86400), help="time that --leave gives to finish")


def _is_for_live_run(given: argparse.Namespace) -> bool:
    """Whether a flag for a live run is given, --within included, although it is no command by itself."""
    return any(value is not None for value in (given.stop, given.join, given.leave, given.bring_back, given.within))


def _check_live_run_flags(
    parser: argparse.ArgumentParser, given: argparse.Namespace, overrides: Mapping[str, str]
) -> None:
    chosen = {"--bring-back": given.bring_back, "--stop": given.stop, "--join": given.join, "--leave": given.leave}
    named = [flag for flag, value in chosen.items() if value is not None]
    which = named[0] if named else "--leave"
    if given.resume or given.slurm or given.inside_slurm or given.detach:
        parser.error(f"{which} is for a live run; --resume, --detach, --slurm and --inside-slurm start one")
    if overrides:
        parser.error(f"{which}: the configuration is that of the run, so --{next(iter(overrides))} has no place here")
    if not named:
        parser.error("--within SECONDS belongs to --leave HOST")
    has_host_flags = bool(given.hosts or given.include or given.exclude or given.ssh_args)
    is_alone = len(named) == 1 and (given.within is None or which == "--leave")
    # --leave and --bring-back name the run in place of a CONFIG.
    wanted_configs = 0 if which == "--stop" else 1
    if which == "--join":
        if not is_alone or given.configs:
            parser.error("--join RUN --hosts FILE: only --include, --exclude, --ssh-args and --dry-run go with it")
        if given.hosts is None:
            parser.error("--join RUN: name the hosts by --hosts FILE")
    elif not is_alone or given.dry_run or has_host_flags or len(given.configs) != wanted_configs:
        parser.error(
            {
                "--stop": "--stop RUN: name one run folder, and nothing else",
                "--leave": "--leave HOST RUN: name one run folder after the host; only --within SECONDS goes with it",
                "--bring-back": "--bring-back NAME RUN: name one run folder after the replica, and nothing else",
            }[which]
        )


def _command_live_run(given: argparse.Namespace) -> int:
    """Carry out --stop, --bring-back, --leave or --join, and return the exit code. Raises AsyncRLError or OSError."""
    import asyncio

    from asyncrl.cli.which_run import named
    from asyncrl.launcher.live import commands
    from asyncrl.launcher.live.live_run import find_live_run

    run = next((run for run in (given.stop, given.join) if run is not None), None)
    # The other commands name the run in place of a configuration.
    live = find_live_run(named(given.configs[0] if run is None else run))
    if given.stop is not None:
        return asyncio.run(commands.stop_run(live))
    if given.bring_back is not None:
        return asyncio.run(commands.bring_back(live, given.bring_back))
    if given.join is None:
        return asyncio.run(commands.leave_run(live, given.leave, given.within))
    from asyncrl.launcher.hosts.hostfile import read_hostfile, select_hosts
    from asyncrl.launcher.hosts.start import SshStart
    from asyncrl.launcher.live.joined_hosts import join_run

    lines = select_hosts(read_hostfile(given.hosts), given.include, given.exclude)
    start = SshStart(live.config.supervision.start_timeout_s, split_ssh_args(given.ssh_args))
    return join_run(live, lines, start, dry_run=given.dry_run)


def _with_allowed(given: argparse.Namespace, overrides: dict[str, str]) -> dict[str, str]:
    """Return ``overrides`` with resume.allow set from the flags --allow-changed-X, if there are any."""
    allowed = [what for what, _ in ALLOWED if getattr(given, f"allow_changed_{what}")]
    return overrides | {"resume.allow": json.dumps(allowed)} if allowed else overrides


def _print_keys() -> int:
    from asyncrl.config.keys import known_keys

    for key, kind, default, description in known_keys():
        print(f"{key}  ({kind}, default {default})" if default != "required" else f"{key}  ({kind}, required)")
        if description:
            print(textwrap.indent(description, "    "))
    return 0


if __name__ == "__main__":
    sys.exit(main())
