"""Break a run while it trains, and audit its records.

    python -m tools.chaos --faults 40
    python -m tools.chaos --faults 20 --everything 5 --seed 7 --json
    python -m tools.chaos --engine vllm --faults 20
    python -m tools.chaos --episodes command --faults 20
    python -m tools.chaos --in-updates --faults 20
    python -m tools.chaos --time-slices --faults 30

The tool kills (SIGKILL) and freezes (SIGSTOP) every process of the run except launcher, guard and node agent. With
``--episodes`` it also strikes the processes that play episodes. Half of the faults that strike a part of a weight
update wait for a phase of one. With ``--in-updates`` all faults do, the simulated run has slow updates, and every
replica must serve new versions after the last fault. With ``--time-slices`` the run has one host, and faults of a rank
or an engine wait for a phase of their turns. The tool fills the disk, cuts the network and resets all connections for a
while. The simulated run has several hosts: the tool partitions two of them, slows a link, and sets a wall clock wrong.
It prints the faults that this machine does not allow, and does not draw them. ``--everything`` ends the whole run,
sometimes during a checkpoint, and resumes it with ``--resume auto``. In turn, it kills all processes at once, and sends
SIGTERM to the launcher, which must end with exit code 75 and leave no process.

At the end the tool checks that training reached its last step with exit code 0, that every prompt has exactly one
outcome, and that no process, port, shared memory or temporary file is left.

The seed is printed. The exit code is 0 only if nothing was lost, repeated or left over. With ``--json`` the last line
of stdout is one JSON object, and everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tools import kept
from tools.chaos.audit import Expected, Findings, audit
from tools.chaos.faults import NotRecovered, Striker, Struck, torment
from tools.chaos.plan import KINDS, ON_PROCESSES, Fault, draw, steps_of_run, victims
from tools.chaos.settings import (
    DISK_MIB,
    RANKS,
    REPLICAS,
    REPLICAS_IN_UPDATES,
    SILENCE_IN_UPDATES_S,
    SIM_PROMPTS,
    SIM_SILENCE_S,
    SLOW_UPDATES,
    VLLM_SILENCE_S,
    expected,
    playing,
    several_hosts,
    sim_tree,
    transport_of,
    vllm_tree,
)
from tools.chaos.users import rows
from tools.chaos.world import World, enter
from tools.live_run import LiveRun, RunEnded, with_keys

PATIENCE_S = {"sim": 90.0, "vllm": 300.0}
"""Longest time without a trained step."""
END_S = 30.0
"""Longest time after the run until everything of it is gone."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.episodes and chosen.engine != "sim":
        parser.error("--episodes is for the simulated engine")
    if chosen.in_updates and chosen.time_slices:
        parser.error("--in-updates and --time-slices strike in different phases; give one of them")
    out = sys.stderr if chosen.json else sys.stdout
    seed = random.randrange(1 << 32) if chosen.seed is None else chosen.seed
    with tempfile.TemporaryDirectory(prefix="asyncrl-chaos-") as name:
        folder = Path(name)
        # In time slices all ranks and engines are on one host, where each rank has an engine to share with.
        several = chosen.engine == "sim" and not chosen.time_slices
        world = World(folder, DISK_MIB[chosen.engine], several=several)
        try:
            report = go(chosen, seed, folder, world, out)
        finally:
            world.close()
    if chosen.json:
        print(json.dumps(report))
    return int(bool(report["problems"]))


def go(chosen: argparse.Namespace, seed: int, folder: Path, world: World, out: TextIO) -> dict[str, Any]:
    """Run one round and return its outcome as the JSON object."""
    sim, hosts = chosen.engine == "sim", world.hosts.names
    kinds = chosen.kind or (ON_PROCESSES if chosen.in_updates else KINDS)
    replicas = REPLICAS_IN_UPDATES if sim and chosen.in_updates else REPLICAS
    skipped = {kind: why for kind, why in world.missing.items() if kind in kinds}
    drawn = [kind for kind in kinds if kind not in skipped]
    if chosen.faults and not drawn:
        raise SystemExit(f"none of these faults can be had here: {skipped}")
    faults = draw(
        seed,
        chosen.faults,
        victims(replicas, RANKS, cores=not sim, episodes=chosen.episodes),
        drawn,
        hosts=hosts,
        everything=chosen.everything,
        silence_s=(SILENCE_IN_UPDATES_S if chosen.in_updates else SIM_SILENCE_S) if sim else VLLM_SILENCE_S,
        transport=transport_of(seed),
        in_updates=chosen.in_updates,
        in_turns=chosen.time_slices,
    )
    tree, promised = _configuration(chosen, seed, faults, folder, several=len(hosts) > 1)
    print(f"seed {seed}: {len(faults)} faults, {promised.steps} steps", file=out)
    for why in sorted(set(skipped.values())):
        print(f"skipped: {', '.join(kind for kind in skipped if skipped[kind] == why)}: {why}", file=out)
    if "slow" in drawn and not world.hosts.netem:
        print("links are slow by their rate alone: the kernel has no netem", file=out)
    print(f"{'time':>8}  {'fault':52}  {'phase':12}  {'step':>5}  recovered after", file=out, flush=True)
    began = time.monotonic()
    run = LiveRun(
        tree,
        folder,
        processes=world.processes if world.alone else None,
        command=world.command,
        arguments=world.hosts.launch_arguments(folder),
        env=world.environment,
    )
    struck: list[Struck] = []
    try:
        try:
            torment(
                run,
                Striker(run, world, seed),
                faults,
                struck,
                replicas=replicas,
                in_updates=chosen.in_updates,
                patience_s=PATIENCE_S[chosen.engine],
                reported=lambda one: print(one, file=out, flush=True),
            )
        except (NotRecovered, RunEnded, TimeoutError) as error:
            findings = Findings()
            findings.say("end", f"{error}; {_last_words(run)}")
        else:
            findings = _audit(run, world, promised, len(faults) - len(struck))
    finally:
        run.close()
    # Records that do not fit on the disk are lost by design. The ledger has their prompts and counts.
    full = any(one.fault.kind == "disk" for one in struck)
    notes = [problem for problem in findings.problems if full and problem.kind == "unrecorded"]
    problems = [problem for problem in findings.problems if problem not in notes]
    report = {
        "engine": chosen.engine,
        "episodes": chosen.episodes,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "hosts": len(hosts),
        "skipped": skipped,
        "faults": [asdict(one) for one in struck],
        "figures": findings.figures,
        "notes": [asdict(note) for note in notes],
        "problems": [asdict(problem) for problem in problems],
    }
    print(f"{len(struck)} faults in {report['seconds']} s; {report['figures']}", file=out)
    for text in [*(f"note: {note}" for note in notes), *(f"PROBLEM {problem}" for problem in problems)]:
        print(text, file=out)
    verdict = "NOT well" if problems else "nothing was lost, repeated or left over"
    print(f"seed {seed}: {verdict}", file=out, flush=True)
    return report


def _audit(run: LiveRun, world: World, promised: Expected, unstruck: int) -> Findings:
    """Return the findings of a run that has ended by itself."""
    until = time.monotonic() + END_S
    while (left := [*run.left(), *world.left()]) and time.monotonic() < until:
        time.sleep(0.1)
    try:
        findings = audit(run.run_dir, promised)
    except OSError as error:
        findings = Findings()
        findings.say("end", f"there is nothing to audit: {error}")
    if run.exit_code != 0:
        findings.say("end", f"exit code {run.exit_code}: {run.output[-1500:]}")
    if unstruck:
        findings.say("end", f"the run ended before {unstruck} faults")
    for name in left:
        findings.say("left", name)
    return findings


def _configuration(
    chosen: argparse.Namespace, seed: int, faults: Sequence[Fault], folder: Path, *, several: bool
) -> tuple[dict[str, Any], Expected]:
    steps = steps_of_run(faults, in_phases=chosen.in_updates or chosen.time_slices)
    keys = several_hosts(seed) if several else {}
    if chosen.time_slices:
        keys["placement.share"] = "time_slice"
    if chosen.engine == "sim":
        data = folder / "data.jsonl"
        made = list(rows(SIM_PROMPTS))
        data.write_text("".join(json.dumps(row) + "\n" for row in made))
        keys = {**playing(chosen.episodes), **(SLOW_UPDATES if chosen.in_updates else {}), **keys}
        tree = with_keys(sim_tree(seed, steps, data), keys)
        return tree, expected(tree, SIM_PROMPTS, [row["kind"] for row in made])
    from tools.quickstart.assets import ensure_assets
    from tools.quickstart.settings import SETTINGS

    tree = with_keys(vllm_tree(seed, steps, ensure_assets()), keys)
    return tree, expected(tree, SETTINGS.train)


def _last_words(run: LiveRun) -> str:
    """Return the last lines of the launcher and of every actor."""
    attempts = sorted(run.run_dir.glob("logs/attempt_*"), key=lambda path: path.stat().st_mtime)
    logs = sorted(attempts[-1].glob("*.log")) if attempts else []
    words = [f"{path.name}: " + path.read_bytes()[-600:].decode(errors="replace") for path in logs]
    return "\n".join([run.output[-1000:], *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=("sim", "vllm"), default="sim", help="simulated, or the quickstart's training")
    add("--episodes", choices=("function", "command"), help="simulated agents play, so (a prompt has one response)")
    add("--faults", type=int, default=40, metavar="N", help="faults in one run (40)")
    add("--everything", type=int, default=0, metavar="K", help="ends of the whole run, by SIGKILL and SIGTERM in turn")
    add("--kind", choices=KINDS, action="append", help="of the faults; all by default")
    add("--time-slices", action="store_true", help="GPUs are had in turn (simulated); strike in every phase")
    add("--in-updates", action="store_true", help="strike only in phases of weight updates")
    add("--seed", type=int, help="of the faults and of the run; random by default")
    add("--json", action="store_true", help="print the outcome as JSON")
    return parser


def live() -> int:
    """Run in separate namespaces if the machine allows it."""
    enter("tools.chaos", sys.argv[1:])
    return main()


if __name__ == "__main__":
    sys.exit(kept.run(live))
