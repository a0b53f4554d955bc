"""A tiny run of the benchmark of shared beginnings: both sides train the same, of fewer tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

from tools.bench import sharing
from tools.bench.report import Report


def test_a_tiny_run(monkeypatch):
    batch = replace(sharing.BATCHES["quickstart"], groups=2)
    monkeypatch.setattr(sharing, "BATCHES", {"quickstart": batch})
    report = Report("sharing")
    asyncio.run(sharing.measure(report, pairs=2))
    found = json.loads(report.to_json())
    assert found["figures"]["quickstart"]["ratio"]["median"] > 0
    tokens = found["settings"]["quickstart"]["tokens"]
    # The prompt of each group seven times less; what responses happen to begin with alike as well.
    assert 0 < int(tokens["true"]) <= int(tokens["false"]) - 2 * 7 * batch.prompt
