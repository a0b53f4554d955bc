"""Compares the offers of several hosts: machines, clocks, packages, models, GPUs, links. Pure: offers in, findings out.

The launcher compares identities with each other; asyncrl-doctor compares everything. Clocks, packages, GPUs and models
are compared with the head's, and a finding names the host that differs. Links are tried between all pairs of hosts, and
a finding about a closed link names its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.config.engines import ENGINES
from asyncrl.core.disk import in_bytes
from asyncrl.core.formatting import name_some
from asyncrl.core.roles import role_of
from asyncrl.launcher.checks.check_list import BUSY_SHARE
from asyncrl.launcher.checks.findings import Finding, fail, ok, warn
from asyncrl.launcher.checks.network import ANY_PORT
from asyncrl.launcher.common.agent_messages import HostOffer
from asyncrl.launcher.common.placement import Placed

SKEW_S = 0.5
"""Difference between clocks above which a warning is given: screens mix the times of hosts, but no decision does."""
MUST_BE_EQUAL = tuple(
    dict.fromkeys(["asyncrl", *(name for traits in ENGINES.values() for name in traits.packages), "transformers"])
)
"""Packages whose version on a host must be that on the head. A difference in SHOULD_BE_EQUAL is only a warning."""
SHOULD_BE_EQUAL = ("python", "pyzmq", "msgspec")
EXTRAS = {"aiohttp": "asyncrl[episodes]", "vllm": "asyncrl[vllm]"}
EXTRAS |= dict.fromkeys(("torch", "transformers"), "asyncrl[train]")
"""By package, the extra that installs it; any other package is installed by its own name."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Seconds by which a host's clock is ahead of the doctor's, and the largest error of that measurement (s)."""

    ahead_s: float
    error_s: float


def best_offset(rounds: Sequence[tuple[float, float, float]]) -> Offset:
    """Estimate a clock's offset from the round with the quickest answer, which is the most exact.

    A round is (asked, host's time, answered): wall clock times in s, the first and the last by the doctor's clock. The
    host is taken to read its clock halfway between them.
    """
    asked, host_time, answered = min(rounds, key=lambda each: each[2] - each[0])
    return Offset(ahead_s=host_time - (asked + answered) / 2, error_s=(answered - asked) / 2)


def compare_clocks(offsets: Mapping[str, Offset], head: str) -> list[Finding]:
    """Compare each host's clock with the head's. Returns a finding for each host but the head."""
    findings = []
    for host, offset in offsets.items():
        if host == head:
            continue
        ahead = offset.ahead_s - offsets[head].ahead_s
        error = offset.error_s + offsets[head].error_s
        text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} {head} (+/- {error:.3f} s)"
        if abs(ahead) - error > SKEW_S:
            fix = "synchronise the clocks with chrony or ntpd: timeline, logs and metrics mix the times of hosts"
            findings.append(warn("clock", text, fix, host))
        else:
            findings.append(ok("clock", text, host))
    return findings


def compare_identities(identities: Mapping[str, str]) -> list[Finding]:
    """Return a failure for each host name that leads to the same machine as an earlier one."""
    name_of: dict[str, str] = {}
    findings = []
    for host, identity in identities.items():
        other = name_of.setdefault(identity, host)
        # An identity begins with the machine's hostname. An empty one is unknown.
        if other != host and identity:
            text = f"{host} and {other} are one machine ({identity.partition('/')[0]})"
            findings.append(fail("identity", text, "name each host once in the hostfile, with all of its slots", host))
    return findings


def compare_versions(facts: Mapping[str, HostOffer], head: str, needed: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Compare each host's package versions with the head's. Returns a finding for each host.

    ``needed`` has the packages that the actors on each host import. The most serious problem of a host is reported.
    """
    findings = []
    same = f"install the same there as on {head}"
    for host, each in facts.items():
        missing = [name for name in needed.get(host, ()) if not each.versions.get(name)]
        errors, tolerated = (_differences(names, each, facts[head], head) for names in (MUST_BE_EQUAL, SHOULD_BE_EQUAL))
        if missing:
            wanted = " ".join(f"'{extra}'" for extra in dict.fromkeys(EXTRAS.get(name, name) for name in missing))
            text = f"not installed: {', '.join(missing)}"
            fix = f"pip install {wanted} on that host, in its environment at the same path as on {head}"
            findings.append(fail("versions", text, fix, host))
        elif errors:
            findings.append(fail("versions", ", ".join([*errors, *tolerated]), same, host))
        elif each.gpus and "+cpu" in each.versions.get("torch", ""):
            text = f"torch {each.versions['torch']} cannot use the GPUs of this host"
            findings.append(fail("versions", text, "install the CUDA build of torch and vllm", host))
        elif tolerated:
            findings.append(warn("versions", ", ".join(tolerated), same, host))
        else:
            text = ", ".join(f"{name} {installed}" for name, installed in each.versions.items() if installed)
            findings.append(ok("versions", text, host))
    return findings


def _differences(names: Sequence[str], host_facts: HostOffer, head_facts: HostOffer, head: str) -> list[str]:
    """Return a text for each of these packages whose version on the host is not the head's."""
    pairs = [(name, host_facts.versions.get(name, ""), head_facts.versions.get(name, "")) for name in names]
    return [
        f"{name} {version or 'missing'} ({on_head or 'missing'} on {head})"
        for name, version, on_head in pairs
        # The part behind + names the build, which may differ.
        if version.partition("+")[0] != on_head.partition("+")[0]
    ]


def needed_packages(config: Config, placed: Sequence[Placed]) -> dict[str, list[str]]:
    """Return by host the names of the packages that its actors import, and that must be installed there."""
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


def judge_gpus(facts: Mapping[str, HostOffer], head: str, placed: Sequence[Placed]) -> list[Finding]:
    """Check the GPUs that the run uses on each host, or all GPUs where it uses none. Returns a finding for each host.

    A host whose GPUs are unknown fails if the run uses some of them or nothing is placed; else it gets a warning. GPUs
    that are in use already give a warning. Else a first GPU of another kind or driver than the head's gives one.
    """
    findings = []
    head_card = next(iter(facts[head].cards.values()), None)
    for host, each in facts.items():
        used = list(dict.fromkeys(gpu for actor in placed if actor.host == host for gpu in actor.gpus))
        cards = {index: each.cards[index] for index in used or each.gpus if index in each.cards}
        busy = [
            f"GPU {index} {in_bytes(card.used_bytes)} of {in_bytes(card.total_bytes)}"
            for index, card in cards.items()
            if card.used_bytes > BUSY_SHARE * card.total_bytes
        ]
        first_card = next(iter(each.cards.values()), None)
        text = f"{len(each.gpus)} GPUs" if each.gpus else "no GPU"
        if first_card is not None:
            text += f" ({name_some(sorted({card.name for card in each.cards.values()}))}, driver {first_card.driver})"
        if placed:
            text += f"; the run uses {', '.join(used) or 'none'}"
        if each.gpu_problem:
            judged = fail if used or not placed else warn
            findings.append(
                judged("gpus", each.gpu_problem, "repair the driver, or set CUDA_VISIBLE_DEVICES there", host)
            )
        elif busy:
            fix = "end the processes that use them, or exclude them by CUDA_VISIBLE_DEVICES or slots"
            findings.append(warn("gpus", f"{text}; in use already: {name_some(busy)}", fix, host))
        elif first_card and head_card and (first_card.driver, first_card.name) != (head_card.driver, head_card.name):
            fix = "take hosts of one kind, with one driver: the slowest one sets the pace, and NCCL may refuse"
            findings.append(warn("gpus", f"{text}; {head} has {head_card.name}, driver {head_card.driver}", fix, host))
        else:
            findings.append(ok("gpus", text, host))
    return findings


def compare_models(digests: Mapping[str, str], head: str) -> list[Finding]:
    """Return a failure for each host whose model differs from the head's.

    ``digests`` has the digest of each host's model folder, empty without a model. Without a model on the head, the
    first host with one is the reference.
    """
    present = {host: digest for host, digest in digests.items() if digest}
    reference = present.get(head) or next(iter(present.values()), "")
    origin = next((host for host, digest in present.items() if digest == reference), head)
    fix = f"copy the model's folder from {origin}"
    text = f"config.json or the files of the weights are not those of {origin}"
    return [fail("model", text, fix, host) for host, digest in present.items() if digest != reference]


@dataclass(frozen=True, slots=True)
class Link:
    """The connection from one host to another; ``problem`` is empty if it works."""

    source: str
    target: str
    problem: str
    needed: bool = True
    """Whether a run needs this connection; else it is only slower without it."""


def judge_links(links: Sequence[Link], ports: str, *, is_configured: bool = True) -> list[Finding]:
    """Return a finding for each closed link, at its source, and one for each source without a closed link.

    ``ports`` is the range of ports that the links were tried at: "0" for any, or LOW-HIGH. ``is_configured``: whether
    network.ports is this range.
    """
    closed = [link for link in links if link.problem]
    findings = []
    for source in dict.fromkeys(link.source for link in links):
        outgoing = [link for link in links if link.source == source]
        if not any(link.problem for link in outgoing):
            targets = list(dict.fromkeys(link.target for link in outgoing))
            findings.append(ok("reach", f"reaches {name_some(targets)}", source))
    for link in closed:
        reverse = [other for other in links if (other.source, other.target) == (link.target, link.source)]
        reverse_is_open = bool(reverse) and not any(other.problem for other in reverse)
        reverse_text = f"{link.target} to {link.source} is {'open' if reverse_is_open else 'closed, too'}"
        text = f"{link.source} to {link.target} is closed: {link.problem}" + (f"; {reverse_text}" if reverse else "")
        incoming = [other for other in links if other.target == link.target]
        suspect = (
            f"the firewall of {link.target}" if all(other.problem for other in incoming) else "firewalls and routes"
        )
        wanted_ports = "every TCP port" if ports == ANY_PORT else f"TCP ports {ports}"
        fix = f"see {suspect}: open {wanted_ports} of {link.target} for {link.source}"
        if ports == ANY_PORT and is_configured:
            fix += ", or set network.ports to a range that is open"
        findings.append((fail if link.needed else warn)("reach", text, fix, link.source))
    return findings
