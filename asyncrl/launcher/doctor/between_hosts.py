"""Finds differences between hosts that prevent a run though each host is fine by itself. Pure: facts in, findings out.

Each other host is compared with the head, and a finding names the host that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from asyncrl.config.engines import ENGINES
from asyncrl.core.disk import in_bytes
from asyncrl.core.roles import role_of
from asyncrl.launcher.checks.findings import Finding, fail, listed, ok, warn
from asyncrl.launcher.common.placement import Placed
from asyncrl.launcher.doctor.orders import HostFacts

SKEW_S = 0.5
"""Difference between clocks above which a warning is given: screens mix the times of hosts, but no decision does."""
MUST_BE_EQUAL = tuple(
    dict.fromkeys(["asyncrl", *(name for traits in ENGINES.values() for name in traits.packages), "transformers"])
)
"""A difference between versions of these packages is a failure; of those below, a warning."""
SHOULD_BE_EQUAL = ("python", "pyzmq", "msgspec")
EXTRAS = {"aiohttp": "asyncrl[episodes]", "vllm": "asyncrl[vllm]"}
EXTRAS |= dict.fromkeys(("torch", "transformers"), "asyncrl[train]")
"""By package, the extra that installs it; any other package is installed by its own name."""
BUSY_SHARE = 0.05
"""Share of a GPU's memory above which it counts as in use; a driver or a display takes less."""


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
    asked, there, answered = min(rounds, key=lambda one: one[2] - one[0])
    return Offset(ahead_s=there - (asked + answered) / 2, error_s=(answered - asked) / 2)


def compare_clocks(offsets: Mapping[str, Offset], head: str) -> list[Finding]:
    """Compare each host's clock with the head's. Returns a finding for each host but the head."""
    found = []
    for host, offset in offsets.items():
        if host == head:
            continue
        ahead = offset.ahead_s - offsets[head].ahead_s
        error = offset.error_s + offsets[head].error_s
        text = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} {head} (+/- {error:.3f} s)"
        if abs(ahead) - error > SKEW_S:
            fix = "synchronise the clocks with chrony or ntpd: timeline, logs and metrics mix the times of hosts"
            found.append(warn("clock", text, fix, host))
        else:
            found.append(ok("clock", text, host))
    return found


def compare_identities(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """Return a failure for each host name that leads to the same machine as an earlier one."""
    first: dict[str, str] = {}
    found = []
    for host, each in facts.items():
        other = first.setdefault(each.identity, host)
        if other != host and each.identity:
            text = f"{host} and {other} are one machine ({each.facts.hostname})"
            found.append(fail("identity", text, "name each host once in the hostfile, with all of its slots", host))
    return found


def compare_versions(facts: Mapping[str, HostFacts], head: str, needed: Mapping[str, Sequence[str]]) -> list[Finding]:
    """Compare each host's package versions with the head's. Returns a finding for each host.

    ``needed`` has the packages that the actors on each host import. The most serious problem of a host is reported.
    """
    found = []
    same = f"install the same there as on {head}"
    for host, each in facts.items():
        missing = [name for name in needed.get(host, ()) if not each.versions.get(name)]
        wrong, odd = (_differences(names, each, facts[head], head) for names in (MUST_BE_EQUAL, SHOULD_BE_EQUAL))
        if missing:
            wanted = " ".join(f"'{extra}'" for extra in dict.fromkeys(EXTRAS.get(name, name) for name in missing))
            text = f"not installed: {', '.join(missing)}"
            found.append(fail("versions", text, f"pip install {wanted} there, in the environment of {head}", host))
        elif wrong:
            found.append(fail("versions", ", ".join([*wrong, *odd]), same, host))
        elif each.facts.gpus and "+cpu" in each.versions.get("torch", ""):
            text = f"torch {each.versions['torch']} cannot use the GPUs of this host"
            found.append(fail("versions", text, "install the CUDA build of torch and vllm", host))
        elif odd:
            found.append(warn("versions", ", ".join(odd), same, host))
        else:
            text = ", ".join(f"{name} {there}" for name, there in each.versions.items() if there)
            found.append(ok("versions", text, host))
    return found


def _differences(names: Sequence[str], there: HostFacts, reference: HostFacts, head: str) -> list[str]:
    """Describe each package in ``names`` whose version on a host differs from that on the head."""
    pairs = [(name, there.versions.get(name, ""), reference.versions.get(name, "")) for name in names]
    return [
        f"{name} {own or 'missing'} ({other or 'missing'} on {head})"
        for name, own, other in pairs
        # The part behind + names the build.
        if own.partition("+")[0] != other.partition("+")[0]
    ]


def needed_packages(config: Config, placed: Sequence[Placed]) -> dict[str, list[str]]:
    """Return the packages that the actors on each host import."""
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
    """Check the GPUs that the run uses on each host, or all GPUs if nothing is placed. Returns a finding for each host.

    A host fails if its GPUs are unknown and needed. It gets a warning if they are in use already, or of another kind or
    driver than the head's.
    """
    found = []
    reference = next(iter(facts[head].cards.values()), None)
    for host, each in facts.items():
        used = list(dict.fromkeys(gpu for actor in placed if actor.host == host for gpu in actor.gpus))
        cards = {index: each.cards[index] for index in used or each.facts.gpus if index in each.cards}
        busy = [
            f"GPU {index} {in_bytes(card.used_bytes)} of {in_bytes(card.total_bytes)}"
            for index, card in cards.items()
            if card.used_bytes > BUSY_SHARE * card.total_bytes
        ]
        some = next(iter(each.cards.values()), None)
        text = f"{len(each.facts.gpus)} GPUs" if each.facts.gpus else "no GPU"
        if some is not None:
            text += f" ({listed(sorted({card.name for card in each.cards.values()}))}, driver {some.driver})"
        if placed:
            text += f"; the run uses {', '.join(used) or 'none'}"
        if each.gpu_problem:
            report = fail if used or not placed else warn
            found.append(report("gpus", each.gpu_problem, "repair the driver, or set CUDA_VISIBLE_DEVICES there", host))
        elif busy:
            fix = "end the processes that use them, or exclude them by CUDA_VISIBLE_DEVICES or slots"
            found.append(warn("gpus", f"{text}; in use already: {listed(busy)}", fix, host))
        elif some and reference and (some.driver, some.name) != (reference.driver, reference.name):
            fix = "take hosts of one kind, with one driver: the slowest one sets the pace, and NCCL may refuse"
            found.append(warn("gpus", f"{text}; {head} has {reference.name}, driver {reference.driver}", fix, host))
        else:
            found.append(ok("gpus", text, host))
    return found


def compare_models(digests: Mapping[str, str], head: str) -> list[Finding]:
    """Return a failure for each host whose model differs from the head's.

    ``digests`` has the digest of each host's model folder, empty without a model. Without a model on the head, the
    first host with one is the reference.
    """
    there = {host: digest for host, digest in digests.items() if digest}
    reference = there.get(head) or next(iter(there.values()), "")
    origin = next((host for host, digest in there.items() if digest == reference), head)
    fix = f"copy the model's folder from {origin}"
    text = f"config.json or the files of the weights are not those of {origin}"
    return [fail("model", text, fix, host) for host, digest in there.items() if digest != reference]


@dataclass(frozen=True, slots=True)
class Link:
    """The connection from one host to another; ``problem`` is empty if it works."""

    source: str
    target: str
    problem: str
    needed: bool = True
    """Whether a run needs this connection; else it is only slower without it."""


def judge_links(links: Sequence[Link], ports: str) -> list[Finding]:
    """Return a finding for each closed link, at its source, and one for each host that reaches all others.

    ``ports`` is the range of ports that the links were tried at: "0" for any, or LOW-HIGH.
    """
    closed = [link for link in links if link.problem]
    found = []
    for source in dict.fromkeys(link.source for link in links):
        out = [link for link in links if link.source == source]
        if not any(link.problem for link in out):
            targets = list(dict.fromkeys(link.target for link in out))
            found.append(ok("reach", f"reaches {listed(targets)}", source))
    for link in closed:
        back = [other for other in links if (other.source, other.target) == (link.target, link.source)]
        is_open = bool(back) and not any(other.problem for other in back)
        also = f"{link.target} to {link.source} is {'open' if is_open else 'closed, too'}"
        text = f"{link.source} to {link.target} is closed: {link.problem}" + (f"; {also}" if back else "")
        into = [other for other in links if other.target == link.target]
        whose = f"the firewall of {link.target}" if all(other.problem for other in into) else "firewalls and routes"
        which = "every TCP port" if ports == "0" else f"TCP ports {ports}"
        fix = f"see {whose}: open {which} of {link.target} for {link.source}"
        if ports == "0":
            fix += ", or set network.ports to a range that is open"
        found.append((fail if link.needed else warn)("reach", text, fix, link.source))
    return found
