"""Figures, their histograms, and the catalogue that declares them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry import catalogue, metrics
from asyncrl.telemetry.catalogue import EDGES, declare, document, every, find, quantile
from asyncrl.telemetry.catalogue_table import SECONDS, Metric, read
from asyncrl.telemetry.metrics import Figures, Histograms

ROOT = Path(__file__).parents[2]
GROUPS = {metric.name.partition("/")[0] for metric in every() if "/" in metric.name}
NAME = re.compile(rf"\"((?:{'|'.join(sorted(GROUPS))})/[a-z][a-z0-9_]*)\"")


def test_the_page_is_what_the_catalogue_says():
    assert (ROOT / "docs" / "metrics.md").read_text() == document(), (
        "python -m asyncrl.telemetry.catalogue > docs/metrics.md"
    )


def test_every_name_is_declared_once():
    names = [metric.name for metric in every()]
    assert len(names) == len(set(names))
    for metric in every():
        assert metric.text
        assert bool(metric.edges) == ("histogram" in metric.kinds)
        assert list(metric.edges) == sorted(set(metric.edges))


def test_every_name_in_the_code_is_declared():
    """Strict figures catch what is counted in a test; this what is counted only where something goes wrong."""
    for path in (ROOT / "asyncrl").rglob("*.py"):
        # The sinks have names of their own, for what they derive from snapshots.
        for name in NAME.findall(path.read_text()) if "asyncrl/sinks" not in str(path) else ():
            assert find(name) is not None or name in NOT_METRICS, f"{path}: {name}"


NOT_METRICS = {"reward/component"}
"""First part of a name."""


def test_rows_of_the_table_have_the_kinds_and_actors_of_their_heading():
    table = "[gauge line] a; b\nx/y | | not\n    whole\n\n[histogram] c\nx/z_s | s | of x | SECONDS"
    assert list(read(table)) == [
        Metric("x/y", ("gauge", "line"), "", "a; b", "not whole"),
        Metric("x/z_s", ("histogram",), "s", "c", "of x", SECONDS),
    ]


@pytest.mark.parametrize(
    "malformed",
    [
        "[counters] a",
        "[]",
        "x/y | groups",
        "x/y | groups | ",
        "x/y | groups  | trained",
        "x/y|groups|trained",
        "x/y | groups | trained | and filtered",
        "x/y | groups | trained | SECONDS",
        "  x/y | groups | trained",
    ],
)
def test_a_malformed_row_of_the_table_is_told(malformed):
    with pytest.raises(ValueError, match=re.escape(malformed)):
        list(read(f"[counter] a\n{malformed}"))


@pytest.mark.parametrize(
    "table", ["x/y | s | text", "[histogram] a\nx/y | s | text", "[histogram] a\nx | s | t | SOON"]
)
def test_a_row_of_the_table_has_kinds_and_a_histogram_has_edges(table):
    with pytest.raises(ValueError, match=re.escape(table.rpartition("\n")[2])):
        list(read(table))


def test_a_name_is_declared_for_one_figure(monkeypatch):
    monkeypatch.setattr(catalogue, "_BY_NAME", dict(catalogue._BY_NAME))
    monkeypatch.setattr(catalogue, "EDGES", dict(EDGES))
    figure = ("tried/waits_s", "histogram", "s", "learner", "for a trial", SECONDS)
    assert declare(*figure) == declare(*figure) == "tried/waits_s"
    assert (find("tried/waits_s").kinds, catalogue.EDGES["tried/waits_s"]) == (("histogram",), SECONDS)
    with pytest.raises(AssertionError, match="wire/refused is declared twice"):
        declare("wire/refused", *figure[1:])


def test_an_undeclared_name_is_an_error(monkeypatch):
    figures, histograms = Figures(), Histograms()
    assert metrics.strict
    with pytest.raises(AssertionError, match="wire/surprises"):
        figures["wire/surprises"] = 1
    with pytest.raises(AssertionError, match="not histogram"):
        histograms.observe("wire/refused", 1)
    with pytest.raises(AssertionError):
        figures.update({"no/such": 1})
    with pytest.raises(AssertionError):
        figures.setdefault("no/such", 1)
    monkeypatch.setattr(metrics, "strict", False)
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
    edges = [float("-inf"), *EDGES[name], float("inf")]
    expected = [sum(low < value <= high for value in values) for low, high in zip(edges, edges[1:], strict=False)]
    assert taken[name].counts == expected
    assert taken[name].sum == pytest.approx(sum(values))
    ordered = sorted(values)
    for share in (0.5, 0.99):
        edge = quantile(taken[name].counts, EDGES[name], share)
        assert edge is not None
        assert sum(value <= edge for value in ordered) >= share * len(ordered)
