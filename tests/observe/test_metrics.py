"""Counters, gauges and histograms, and the catalogue that declares them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe import catalogue
from asyncrl.observe.catalogue import (
    SECONDS,
    Counters,
    Declaring,
    Histograms,
    document,
    edges_of,
    every,
    find,
    quantile,
)

ROOT = Path(__file__).parents[2]
GROUPS = {metric.name.partition("/")[0] for metric in every() if "/" in metric.name}
NAME = re.compile(rf"\"((?:{'|'.join(sorted(GROUPS))})/[a-z][a-z0-9_]*)\"")


def test_the_metrics_page_matches_the_catalogue():
    assert (ROOT / "docs" / "metrics.md").read_text() == document(), (
        "python -m asyncrl.observe.catalogue > docs/metrics.md"
    )


def test_every_name_is_declared_once():
    names = [metric.name for metric in every()]
    assert len(names) == len(set(names))
    for metric in every():
        assert metric.text
        assert bool(metric.edges) == ("histogram" in metric.kinds)
        assert list(metric.edges) == sorted(set(metric.edges))


def test_every_name_in_the_code_is_declared():
    """Strict counters catch the names that a test counts; this catches the names that only a failure counts."""
    for path in (ROOT / "asyncrl").rglob("*.py"):
        # The sinks also export values that they derive from snapshots.
        for name in NAME.findall(path.read_text()) if "asyncrl/observe/sinks" not in str(path) else ():
            assert find(name) is not None or name in NOT_METRICS, f"{path}: {name}"


NOT_METRICS = {"reward/component"}
"""Part of a name."""


def test_a_name_has_one_declaration(monkeypatch):
    monkeypatch.setattr(catalogue, "_metrics", dict(catalogue._metrics))
    declaring = Declaring("learner")
    metric = ("tried/waits_s", "s", "a trial", SECONDS)
    assert declaring.histogram(*metric) == declaring.histogram(*metric) == "tried/waits_s"
    assert (find("tried/waits_s").kinds, edges_of("tried/waits_s")) == (("histogram",), SECONDS)
    with pytest.raises(AssertionError, match="wire/refused is declared twice"):
        declaring.counter("wire/refused", "messages", "another meaning")


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("loss/clipped_fraction", "loss/*"),
        ("eval/gsm/mean", "eval/*/mean"),
        ("eval/gsm/component/form", "eval/*/component/*"),
        ("loss/policy", "loss/policy"),
        ("teacher/requests", "teacher/requests"),
    ],
)
def test_a_name_is_found_with_the_family_it_belongs_to(name, declared):
    assert find(name).name == declared
    assert find(f"unknown/{name}") is None


def test_an_undeclared_name_fails(monkeypatch):
    figures, histograms = Counters(), Histograms()
    assert catalogue.strict
    with pytest.raises(AssertionError, match="wire/surprises"):
        figures["wire/surprises"] = 1
    with pytest.raises(AssertionError, match="not as histogram"):
        histograms.observe("wire/refused", 1)
    with pytest.raises(AssertionError):
        figures.update({"no/such": 1})
    with pytest.raises(AssertionError):
        figures.setdefault("no/such", 1)
    monkeypatch.setattr(catalogue, "strict", False)
    figures["wire/surprises"] = 1
    assert figures == {"wire/surprises": 1}


@given(st.lists(st.floats(0, 1000), max_size=50))
def test_a_histogram_counts_each_value_in_its_bucket(values):
    histograms, name = Histograms(), "tickets/age_s"
    histograms.observe_all(name, values)
    taken = histograms.taken()
    if not values:
        assert taken == {}
        return
    edges = [float("-inf"), *edges_of(name), float("inf")]
    expected = [sum(low < value <= high for value in values) for low, high in zip(edges, edges[1:], strict=False)]
    assert taken[name].counts == expected
    assert taken[name].sum == pytest.approx(sum(values))
    ordered = sorted(values)
    for share in (0.5, 0.99):
        edge = quantile(taken[name].counts, edges_of(name), share)
        assert edge is not None
        assert sum(value <= edge for value in ordered) >= share * len(ordered)
