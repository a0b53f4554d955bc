"""The output of a benchmark: a table for people on stderr, and one JSON object, alone, on stdout."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TextIO

from tools.bench.paired import Comparison, Side, compare, measure_pairs


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that a ratio is to keep."""

    relation: Literal["<=", ">="]
    value: float

    def met(self, ratio: float) -> bool:
        return ratio <= self.value if self.relation == "<=" else ratio >= self.value

    def __str__(self) -> str:
        return f"{self.relation} {self.value:.4g}"


@dataclass(slots=True)
class Report:
    """The figures of one benchmark. ``ratios`` are what the targets speak of."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)

    async def measure(
        self,
        name: str,
        sides: Mapping[str, Side],
        pairs: int,
        *,
        unit: str,
        target: Target | None = None,
        control: bool = True,
    ) -> list[tuple[float, float]]:
        """Measure two sides in pairs and add the comparison; with ``control`` also the first side with itself."""
        (first, measure_first), (second, measure_second) = sides.items()
        found = await measure_pairs(measure_first, measure_second, pairs)
        self.comparison(name, compare(found), unit=unit, sides=(first, second), target=target)
        if control:
            self.same(name, compare(await measure_pairs(measure_first, measure_first, pairs)))
        return found

    def comparison(
        self, name: str, found: Comparison, *, unit: str, sides: tuple[str, str], target: Target | None = None
    ) -> None:
        """Add a measured pair of sides; the ratio is the first side over the second."""
        self.figures[name] = {"unit": unit, **asdict(found)}
        first, second, ratio = found.first, found.second, found.ratio
        self.say(
            f"{name:24} {sides[0]} {first.median:.4g} {unit}, {sides[1]} {second.median:.4g} {unit}, "
            f"ratio {ratio.median:.4g} [{ratio.low:.4g}, {ratio.high:.4g}]"
        )
        if target is not None:
            self.ratio(name, ratio.median, target)

    def same(self, name: str, found: Comparison) -> None:
        """Add the A/A run that belongs to a comparison: the interval of its ratio must hold 1."""
        interval = found.ratio
        self.figures[f"{name}_aa"] = {"ratio": asdict(interval), "holds_1": interval.holds(1.0)}
        verdict = "holds 1" if interval.holds(1.0) else "DOES NOT HOLD 1"
        self.say(f"{name:24} A/A {interval.median:.3f} [{interval.low:.3f}, {interval.high:.3f}]  {verdict}")

    def ratio(self, name: str, value: float, target: Target) -> None:
        """Add a ratio with its target."""
        self.ratios[name], self.targets[name] = value, target
        self.say(f"{name:24} {value:.4g}  target {target}  {'met' if target.met(value) else 'NOT MET'}")

    @property
    def met(self) -> dict[str, bool]:
        """Whether each target is met, by the medians."""
        return {name: target.met(self.ratios[name]) for name, target in self.targets.items()}

    def to_json(self) -> str:
        """One line, ``ratios`` last."""
        machine = {
            "cpus": os.cpu_count(),
            "load_1min": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "system": platform.platform(),
        }
        targets = {name: str(target) for name, target in self.targets.items()}
        found = {"bench": self.name, "machine": machine, "settings": self.settings, "figures": self.figures}
        return json.dumps(found | {"targets": targets, "met": self.met, "ratios": self.ratios})

    def say(self, line: str) -> None:
        """Print a line for people."""
        print(line, file=sys.stderr, flush=True)


@contextmanager
def for_json_alone() -> Iterator[TextIO]:
    """Standard output. Other output of this time goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            sys.stdout.flush()
            os.dup2(stdout.fileno(), 1)
