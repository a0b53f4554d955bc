"""A tiny run of the bench."""

import asyncio
import json

from tools.bench import planning
from tools.bench.report import Report


def test_a_tiny_run_measures_both_sides(monkeypatch):
    for name, value in {"GROUPS": 4, "SAMPLES": 2, "TOKENS": 2000, "PROMPT": 8, "RANKS": 3, "TRAIN_S": 0.2}.items():
        monkeypatch.setattr(planning, name, value)
    report = Report("planning")
    asyncio.run(planning.measure(report, pairs=1, steps=2))
    figures = json.loads(report.to_json())["figures"]
    assert figures["plan_s"]["beside"] >= 0.0 and figures["plan_s"]["at_begin"] > 0.0
    assert figures["planning_gap"]["first"]["median"] > 0.0
