"""Faults between hosts, each of which is well by itself. Pure: facts go in, findings come out.

The head is what the others are held against, so that a host that differs is the one that is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.checks.findings import Finding, fail, listed, ok, warn
from asyncrl.config import Config
from asyncrl.config.engines import ENGINES
from asyncrl.disk import in_bytes
from asyncrl.doctor.protocol import HostFacts
from asyncrl.launcher.terms.placement import Placed
from asyncrl.roles import role_of

SKEW_S = 0.5
"""Difference above which clocks are named: they decide nothing, but times of two hosts are shown side by side."""
MUST_BE_EQUAL = tuple(
    dict.fromkeys(["asyncrl", *(name for traits in ENGINES.values() for name in traits.packages), "transformers"])
)
SHOULD_BE_EQUAL = ("python", "pyzmq", "msgspec")
EXTRAS = {"aiohttp": "asyncrl[episodes]", "vllm": "asyncrl[vllm]"}
EXTRAS |= dict.fromkeys(("torch", "transformers"), "asyncrl[train]")
"""Extras that bring a package; any other is installed by its name."""
BUSY_SHARE = 0.05
"""Share of a GPU's memory above which it is in use already; a driver or a display takes less."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Lead of a host's clock over the doctor's, with the most that it may be wrong by (s)."""

    ahead_s: float
    error_s: float


def best_offset(rounds: Sequence[tuple[float, float, float]]) -> Offset:
    """Offset by the quickest answer, which tells most; ``rounds`` (not empty): (asked, host's time, answered), in s."""
    asked, there, answered = min(rounds, key=lambda one: one[2] - one[0])
    return Offset(ahead_s=there - (asked + answered) / 2, error_s=(answered - asked) / 2)


def compare_clocks(offsets: Mapping[str, Offset], head: str) -> list[Finding]:
    """A finding for each host but the head."""
    found = []
    for host, offset in offsets.items():
        if host == head:
            continue
        ahead = offset.ahead_s - offsets[head].ahead_s
        error = offset.error_s + offsets[head].error_s
        side = "ahead of" if ahead > 0 else "behind"
        told = f"{abs(ahead):.3f} s {side} {head}, as far as {error:.3f} s tell"
        if abs(ahead) - error > SKEW_S:
            fix = "keep the clocks by chrony or ntpd: timeline, logs and metrics lay times of hosts side by side"
            found.append(warn("clock", told, fix, host))
        else:
            found.append(ok("clock", told, host))
    return found


def compare_identities(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """A finding for each host that is another one's second name."""
    first: dict[str, str] = {}
    found = []
    for host, each in facts.items():
        other = first.setdefault(each.identity, host)
        if other != host and each.identity:
            told = f"{host} and {other} are one machine ({each.facts.hostname})"
            found.append(fail("identity", told, "name each host once in the hostfile, with all of its slots", host))
    return found


def compare_versions(facts: Mapping[str, HostFacts], head: str, needed: Mapping[str, Sequence[str]]) -> list[Finding]:
    """A finding for each host. ``needed``: by host, the packages without which its actors do not start."""
    found = []
    for host, each in facts.items():
        missing = [name for name in needed.get(host, ()) if not each.versions.get(name)]
        wrong, odd = (_differences(names, each, facts[head], head) for names in (MUST_BE_EQUAL, SHOULD_BE_EQUAL))
        if missing:
            wanted = " ".join(f"'{extra}'" for extra in dict.fromkeys(EXTRAS.get(name, name) for name in missing))
            told = f"not installed: {', '.join(missing)}"
            found.append(fail("versions", told, f"pip install {wanted} there, in the environment of {head}", host))
        elif wrong:
            fix = f"install the same there as on {head}"
            found.append(fail("versions", ", ".join([*wrong, *odd]), fix, host))
        elif each.facts.gpus and "+cpu" in each.versions.get("torch", ""):
            told = f"torch {each.versions['torch']} cannot use the GPUs of this host"
            found.append(fail("versions", told, "install the CUDA build of torch and vllm", host))
        elif odd:
            found.append(warn("versions", ", ".join(odd), f"install the same there as on {head}", host))
        else:
            told = ", ".join(f"{name} {there}" for name, there in each.versions.items() if there)
            found.append(ok("versions", told, host))
    return found


def _differences(names: Sequence[str], there: HostFacts, reference: HostFacts, head: str) -> list[str]:
    pairs = [(name, there.versions.get(name, ""), reference.versions.get(name, "")) for name in names]
    return [
        f"{name} {own or 'missing'} ({other or 'missing'} on {head})"
        for name, own, other in pairs
        if _public(own) != _public(other)
    ]


def needed_packages(config: Config, placed: Sequence[Placed]) -> dict[str, list[str]]:
    """Packages that a host's actors import, by host."""
    needed: dict[str, list[str]] = {}
    for actor in placed:
        role = role_of(actor.name)
        names = needed.setdefault(actor.host, [])
        if role == "learner" and config.learner.backend != "sim":
            names += ["torch", "transformers"]
        if role == "rollouter":
            names += config.rollout.traits.packages
        if role == "episodes":
            names.append("aiohttp")
    return {host: list(dict.fromkeys(names)) for host, names in needed.items()}


def judge_gpus(facts: Mapping[str, HostFacts], head: str, placed: Sequence[Placed]) -> list[Finding]:
    """A finding for each host; without a configuration ``placed`` is empty, and all GPUs are looked at."""
    found = []
    reference = next((card for card in facts[head].cards.values()), None)
    for host, each in facts.items():
        used = [gpu for actor in placed if actor.host == host for gpu in actor.gpus]
        cards = {index: each.cards[index] for index in used or each.facts.gpus if index in each.cards}
        busy = [
            f"GPU {index} {in_bytes(card.used_bytes)} of {in_bytes(card.total_bytes)}"
            for index, card in cards.items()
            if card.used_bytes > BUSY_SHARE * card.total_bytes
        ]
        some = next(iter(each.cards.values()), None)
        told = f"{len(each.facts.gpus)} GPUs" if each.facts.gpus else "no GPU"
        if some is not None:
            told += f" ({listed(sorted({card.name for card in each.cards.values()}))}, driver {some.driver})"
        if placed:
            told += f"; the run takes {', '.join(used) or 'none'}"
        if each.gpu_problem:
            report = fail if used or not placed else warn
            found.append(report("gpus", each.gpu_problem, "mend the driver, or set CUDA_VISIBLE_DEVICES there", host))
        elif busy:
            fix = "end what uses them, or leave them out by CUDA_VISIBLE_DEVICES or slots"
            found.append(warn("gpus", f"{told}; in use already: {listed(busy)}", fix, host))
        elif some and reference and (some.driver, some.name) != (reference.driver, reference.name):
            fix = "take hosts of one kind, with one driver: the slowest one sets the pace, and NCCL may refuse"
            found.append(warn("gpus", f"{told}; {head} has {reference.name}, driver {reference.driver}", fix, host))
        else:
            found.append(ok("gpus", told, host))
    return found


def compare_models(digests: Mapping[str, str], head: str) -> list[Finding]:
    """A finding for each host whose model is not the head's; hosts without one have no say."""
    there = {host: digest for host, digest in digests.items() if digest}
    reference = there.get(head) or next(iter(there.values()), "")
    origin = next((host for host, digest in there.items() if digest == reference), head)
    fix = f"copy the model's folder from {origin}"
    told = f"config.json or the files of the weights are not those of {origin}"
    return [fail("model", told, fix, host) for host, digest in there.items() if digest != reference]


@dataclass(frozen=True, slots=True)
class Way:
    """A way from one host to another; ``problem`` is empty if it is open."""

    source: str
    target: str
    problem: str
    needed: bool = True
    """Whether a run fails without it; else it only loses by it."""


def judge_ways(ways: Sequence[Way], ports: str) -> list[Finding]:
    """A finding for each closed way, at its source, and one for each host whose ways out are all open."""
    closed = [way for way in ways if way.problem]
    found = []
    for source in dict.fromkeys(way.source for way in ways):
        out = [way for way in ways if way.source == source]
        if not any(way.problem for way in out):
            targets = list(dict.fromkeys(way.target for way in out))
            found.append(ok("reach", f"reaches {listed(targets)}", source))
    for way in closed:
        back = [other for other in ways if (other.source, other.target) == (way.target, way.source)]
        is_open = bool(back) and not any(other.problem for other in back)
        also = f"{way.target} to {way.source} is open" if is_open else f"{way.target} to {way.source} is closed, too"
        told = f"{way.source} to {way.target} is closed: {way.problem}" + (f"; {also}" if back else "")
        into = [other for other in ways if other.target == way.target]
        whose = f"the firewall of {way.target}" if all(other.problem for other in into) else "firewalls and routes"
        which = "every TCP port" if ports == "0" else f"TCP ports {ports}"
        fix = f"see {whose}: open {which} of {way.target} for {way.source}"
        if ports == "0":
            fix += ", or set network.ports to a range that is open"
        found.append((fail if way.needed else warn)("reach", told, fix, way.source))
    return found


def _public(version: str) -> str:
    """A version without what names its build, as +cpu."""
    return version.partition("+")[0]
