"""asyncrl-doctor: checks whether hosts and configuration are ready for a run, and says what to do if not.

Importing this module, ``--help`` and wrong usage load nothing beyond the standard library.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.cli.command_line import Parser, complain, flushed, seconds, split_flags, split_ssh_args
from asyncrl.core.formatting import json_in_ascii, say

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launcher.hosts.hostfile import HostLine
    from asyncrl.launcher.hosts.start import StartCommand
    from asyncrl.text.chat.chat_messages import Message
    from asyncrl.text.chat.renderer import Renderer
    from asyncrl.text.tokenizer import Tokenizer

PROGRAM = "asyncrl-doctor"
DESCRIPTION = "Check whether this host, or those of a hostfile, are ready for a run. Starts nothing."
EPILOG = """\
Checks this host, or with --hosts those of the hostfile. Without CONFIG only the checks that need none run. CONFIG
files, dotted flags, --include and --exclude are those of asyncrl-launch. Each line has ok, warn or fail, the host, the
check, what it found, and what to do.

--json prints a list of objects with host (empty for all hosts), check, result (ok, warn or fail), detail, fix and key
(of the configuration, if one decides). --fix removes files and processes of killed runs that are certainly dead, and
names them. Nothing else is ever changed.

--chat checks the model's chat template instead. For each kind of turn it prints whether the next context extends the
sampled tokens (extend), starts another sequence (fork) or is impossible (refused), and why. It also prints what ends an
answer, which parsers read it, and an example. It needs a CONFIG, or --model.path DIR alone. With --json it prints what
a run keeps as chat.json.

--agent plays one task with an agent against a scripted policy, on this host and without a model. The agent is CMD (a
program and its arguments, as episode.command) or the [episode] of CONFIG. It prints each call, and whether and why the
call extends the tokens of an answer or forks. It also prints the cost, ignored and refused request fields, and times.
model.path in CONFIG gives the chat template, its data the task. --timeout bounds the time to the first call and between
calls.

Exit codes: 0 nothing failed; 1 a check failed, no conversation is possible, or no run can train on the agent; 2 wrong
usage; 78 wrong configuration; 130 Ctrl-C.
"""
ANSWER_S = 60.0
"""Default of --timeout (s)."""
CONNECT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
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
        parser.error("--chat checks only a model's folder; --hosts and --fix belong to the other checks")
    if given.agent is not None:
        _require_agent_usage(parser, given)
    if given.chat and not given.configs and "model.path" not in overrides:
        parser.error("--chat: give a CONFIG file, or --model.path DIR")
    if overrides and not given.configs and not given.chat and given.agent is None:
        parser.error(f"--{next(iter(overrides))}: needs a CONFIG file")
    import asyncio

    from asyncrl.config.load import load_config
    from asyncrl.core.errors import ConfigError, UsageError

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
        return complain(PROGRAM, "the configuration is wrong: correct the problems above", error.exit_code)
    except UsageError as error:
        return complain(PROGRAM, str(error), error.exit_code)
    from asyncrl.launcher.checks.findings import as_json, counts, exit_code, rows
    from asyncrl.launcher.doctor.examination import Examination

    found = asyncio.run(Examination(targets, config, given.timeout, given.fix).run())
    say(json_in_ascii(as_json(found)) if given.json else "\n".join([*rows(found), counts(found)]), sys.stdout)
    return exit_code(found)


def _show_chat(configs: Sequence[str], overrides: dict[str, str], *, as_json: bool) -> int:
    """Check the model's chat template, show the report, and return the exit code. Raises ConfigError."""
    from asyncrl.config.load import load_config
    from asyncrl.launcher.checks.hub import local_config
    from asyncrl.text.chat.renderer import make_renderer
    from asyncrl.text.tokenizer import tokenizer_of

    config = load_config(configs, ({} if configs else {"data.source": "synthetic"}) | overrides)
    config = local_config(config, ["model.path"], with_weights=False)
    tokenizer = tokenizer_of(config)
    renderer = make_renderer(config, tokenizer)
    if as_json:
        say(json_in_ascii(renderer.report.to_json().decode()).rstrip(), sys.stdout)
    else:
        say("\n".join([*renderer.report.lines(), "", *_example(renderer, tokenizer)]), sys.stdout)
    return 0 if renderer.report.works else 1


def _example(renderer: Renderer, tokenizer: Tokenizer) -> list[str]:
    """Return lines that show a tool call and its result as the model's chat template renders them."""
    from asyncrl.core.errors import ChatRefused
    from asyncrl.text.chat.probe import TOOLS

    called = {"name": TOOLS[0]["function"]["name"], "arguments": {"word": "oldest tree"}}
    messages: list[Message] = [
        {"role": "user", "content": "How old is the oldest tree?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call_0_0", "type": "function", "function": called}],
        },
        {"role": "tool", "content": "4,857 years", "tool_call_id": "call_0_0"},
    ]
    try:
        ids = renderer.render(messages, TOOLS, {})
    except ChatRefused as error:
        return [f"a call of a tool and its result cannot be shown: {error}"]
    lines = tokenizer.decode(ids, keep_special=True).splitlines()
    return [f"a call of a tool and its result are {len(ids)} tokens:", *(f"  | {line}" for line in lines)]


def _show_agent(
    configs: Sequence[str], overrides: dict[str, str], command: Sequence[str], longest_s: float, *, as_json: bool
) -> int:
    """Play one task with an agent, show the calls, and return the exit code. Raises ConfigError.

    ``command`` is the agent, or empty for the [episode] of the configuration. ``longest_s`` is --timeout.
    """
    import asyncio

    from asyncrl.config.load import load_config
    from asyncrl.launcher.checks.findings import FAILED_EXIT_CODE
    from asyncrl.launcher.checks.hub import local_config
    from asyncrl.launcher.doctor.lone_episode import CannotPlay, for_script, play_scripted

    defaults = {} if configs else {"data.source": "synthetic", "rollout.engine": "sim", "learner.backend": "sim"}
    config = local_config(load_config(configs, defaults | overrides), with_weights=False)
    try:
        played = asyncio.run(play_scripted(for_script(config, command, longest_s), with_data=bool(configs)))
    except CannotPlay as error:
        return complain(PROGRAM, str(error), FAILED_EXIT_CODE)
    if as_json:
        say(json_in_ascii(json.dumps(played.as_object(), indent=2)), sys.stdout)
    else:
        say("\n".join(played.lines(scored=bool(configs))), sys.stdout)
    return 0 if played.works else FAILED_EXIT_CODE


def _require_agent_usage(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
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
    parser.add_host_arguments("check")
    parser.add_argument("--chat", action="store_true", help="check the model's chat template")
    parser.add_argument(
        "--agent", metavar="CMD", nargs="?", const="", help="play a task with this program, or with CONFIG's [episode]"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument("--fix", action="store_true", help="remove files and processes of killed runs")
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
) -> list[tuple[HostLine, StartCommand]]:
    """Return the hosts to check with the command that reaches each; this host first if listed. Raises UsageError."""
    import socket

    from asyncrl.launcher.doctor.examination import REMOTE
    from asyncrl.launcher.hosts.addresses import is_this_host
    from asyncrl.launcher.hosts.hostfile import HostLine, read_hostfile, select_hosts
    from asyncrl.launcher.hosts.start import LocalStart, SshStart

    here = LocalStart(words=REMOTE)
    if hostfile is None:
        return [(HostLine(socket.gethostname()), here)]
    over_ssh = SshStart(connect_s=CONNECT_S, args=ssh_args, words=REMOTE)
    lines = select_hosts(read_hostfile(hostfile), include, exclude)
    own = next((line for line in lines if is_this_host(line.name)), None)
    lines.sort(key=lambda line: line is not own)
    return [(line, here if line is own else over_ssh) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
