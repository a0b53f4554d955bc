"""asyncrl-doctor: see whether hosts and configuration let a run begin, and how to mend what does not.

Importing this module, ``--help`` and wrong usage load nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.cli.flags import Parser, seconds, split_flags, split_ssh_args
from asyncrl.cli.output import complain, flushed
from asyncrl.text.printable import json_in_ascii, say

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.doctor.examination import ExaminedHost

PROGRAM = "asyncrl-doctor"
DESCRIPTION = "See whether this host, or those of a hostfile, can run what a configuration asks for. Starts nothing."
EPILOG = """\
Without --hosts this host is looked at, without CONFIG what needs none. The CONFIG files and dotted flags are those of
asyncrl-launch, and so are --include and --exclude. A line each says ok, warn or fail, the host, the check, what was
found, and how to mend it.

--json prints a list of objects instead, each with host (empty for what concerns all of them), check, result (ok, warn
or fail), detail, fix and key (of the configuration, where one decides). --fix removes what is certainly dead of runs
that were killed, and says so; nothing else is ever changed.

--chat looks at the model's chat template instead: for each kind of turn whether the next context extends what was
sampled (extend), begins another sequence (fork) or cannot be had (refused), and why; what ends an answer, which parsers
read it, and an example. It needs a CONFIG, or --model.path DIR alone; with --json it prints what a run keeps as
chat.json.

--agent plays one task with an agent against a policy that speaks by a script, on this host and without a model: CMD, a
program and its arguments as of episode.command, or without CMD what [episode] of CONFIG names. It shows each call and
whether it goes on from the tokens of an answer or forks, and why; what that costs; fields of requests that do nothing
or are refused; and how long it takes. A model.path in CONFIG gives the chat template, its data the task. --timeout
bounds the time to its first call, and between calls.

Exit codes: 0 nothing failed, 1 something did, no conversation can be had, or no run can train on the agent, 2 wrong
usage, 78 wrong configuration, 130 Ctrl-C.
"""
ANSWER_S = 60.0
CONNECT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    try:
        return flushed(PROGRAM, lambda: _main(list(sys.argv[1:] if argv is None else argv)))
    except KeyboardInterrupt:
        return complain(PROGRAM, "ended by SIGINT", 130)


def _main(argv: list[str]) -> int:
    parser = _parser()
    overrides, rest = split_flags(parser, argv)
    given = parser.parse_args(rest)
    if given.hosts is None and (given.include or given.exclude or given.ssh_args):
        parser.error("--include, --exclude and --ssh-args belong to --hosts FILE")
    if given.chat and (given.hosts is not None or given.fix):
        parser.error("--chat looks at a model's folder alone; --hosts and --fix belong to the other checks")
    if given.agent is not None:
        _require_agent_usage(parser, given)
    if given.chat and not given.configs and "model.path" not in overrides:
        parser.error("--chat: give a CONFIG file, or --model.path DIR")
    if overrides and not given.configs and not given.chat and given.agent is None:
        parser.error(f"--{next(iter(overrides))}: no CONFIG file is given to lay it over")
    import asyncio

    from asyncrl.config.load import load_config
    from asyncrl.errors import ConfigError, UsageError

    try:
        if given.chat:
            return _show_chat(given.configs, overrides, as_json=given.json)
        if given.agent is not None:
            command = shlex.split(given.agent)
            return _show_agent(given.configs, overrides, command, given.timeout, as_json=given.json)
        config: Config | None = load_config(given.configs, overrides) if given.configs else None
        targets = _targets(given.hosts, given.include, given.exclude, split_ssh_args(given.ssh_args))
    except ConfigError as error:
        for problem in error.problems:
            say(f"  {problem}", sys.stderr)
        return complain(PROGRAM, "the configuration is wrong: correct what is listed above", error.exit_code)
    except UsageError as error:
        return complain(PROGRAM, str(error), error.exit_code)
    from asyncrl.checks.findings import as_json, as_lines, exit_code
    from asyncrl.doctor.examination import Examination

    found = asyncio.run(Examination(targets, config, given.timeout, given.fix).run())
    say(json_in_ascii(as_json(found)) if given.json else "\n".join(as_lines(found)), sys.stdout)
    return exit_code(found)


def _show_chat(configs: Sequence[str], overrides: dict[str, str], *, as_json: bool) -> int:
    """Show what a chat template does; the exit code. Raises ConfigError."""
    from asyncrl.config.load import load_config
    from asyncrl.doctor.chat import describe_chat, examine_chat

    # Without a file there is nothing but a model.
    rest = {} if configs else {"data.source": "synthetic"}
    renderer, tokenizer = examine_chat(load_config(configs, rest | overrides))
    if as_json:
        say(json_in_ascii(renderer.report.to_json().decode()).rstrip(), sys.stdout)
    else:
        say("\n".join(describe_chat(renderer, tokenizer)), sys.stdout)
    return 0 if renderer.report.works else 1


def _show_agent(
    configs: Sequence[str], overrides: dict[str, str], command: Sequence[str], longest_s: float, *, as_json: bool
) -> int:
    """Play a task with an agent; the exit code. Raises ConfigError."""
    import asyncio

    from asyncrl.checks.findings import FAILED_EXIT_CODE
    from asyncrl.config.load import load_config
    from asyncrl.doctor.agent.rehearsal import CannotPlay, rehearse, rehearsed

    rest = {} if configs else {"data.source": "synthetic", "rollout.engine": "sim", "learner.backend": "sim"}
    config = load_config(configs, rest | overrides)
    try:
        played = asyncio.run(rehearse(rehearsed(config, command, longest_s), with_data=bool(configs)))
    except CannotPlay as error:
        return complain(PROGRAM, str(error), FAILED_EXIT_CODE)
    if as_json:
        say(json_in_ascii(json.dumps(played.as_object(), indent=2)), sys.stdout)
    else:
        say("\n".join(played.lines(scored=bool(configs))), sys.stdout)
    return 0 if played.works else FAILED_EXIT_CODE


def _require_agent_usage(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the program on wrong usage of --agent."""
    if given.chat or given.fix or given.hosts is not None:
        parser.error("--agent plays an agent here; --chat, --hosts and --fix belong to the other checks")
    if given.agent.endswith(".toml"):
        parser.error(f"--agent {given.agent}: is a program; put a CONFIG in front of --agent")
    if not given.agent and not given.configs:
        parser.error("--agent: give the program, or a CONFIG file with an [episode]")


def _parser() -> Parser:
    usage = f"{PROGRAM} [CONFIG...] [--hosts FILE | --chat | --agent [CMD]] [--json] [--fix] [--KEY VALUE ...]"
    parser = Parser(PROGRAM, DESCRIPTION, EPILOG, usage)
    parser.add_argument("configs", nargs="*", metavar="CONFIG", help="TOML files, merged left to right")
    parser.add_host_arguments("look at")
    parser.add_argument("--chat", action="store_true", help="look at the model's chat template")
    parser.add_argument(
        "--agent", metavar="CMD", nargs="?", const="", help="play a task with this program, or with CONFIG's [episode]"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--fix", action="store_true", help="remove what is certainly dead of runs that were killed")
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=seconds(1, 3600),
        default=ANSWER_S,
        help=f"longest wait for an answer ({ANSWER_S:g})",
    )
    return parser


def _targets(
    hostfile: str | None, include: Sequence[str], exclude: Sequence[str], ssh_args: tuple[str, ...]
) -> list[ExaminedHost]:
    """The hosts, the head first: this host, if it is among them. Raises UsageError."""
    import socket

    from asyncrl.doctor.examination import REMOTE, ExaminedHost
    from asyncrl.launcher.fleet.addresses import is_this_host
    from asyncrl.launcher.fleet.hostfile import HostLine, read_hostfile, select_hosts
    from asyncrl.launcher.fleet.start import LocalStart, SshStart

    here = LocalStart(words=REMOTE)
    if hostfile is None:
        return [ExaminedHost(line=HostLine(socket.gethostname()), start=here)]
    over_ssh = SshStart(connect_s=CONNECT_S, args=ssh_args, words=REMOTE)
    lines = select_hosts(read_hostfile(hostfile), include, exclude)
    own = next((line for line in lines if is_this_host(line.name)), None)
    if own is not None:
        lines.remove(own)
        lines.insert(0, own)
    return [ExaminedHost(line=line, start=here if line is own else over_ssh) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
