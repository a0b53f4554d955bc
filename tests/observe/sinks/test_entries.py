"""Values that go to the sinks, and their names there."""

import math
import re

import pytest
from msgspec.structs import replace
from sinks_cases import evaluation, snapshot, train, update

from asyncrl.messages.monitor import Histogram
from asyncrl.observe import catalogue
from asyncrl.observe.sinks.history_sinks import Entries, numbers, run_values
from asyncrl.observe.sinks.prometheus import GAUGES, families_of, prometheus_name

HEARD = ("counter", "gauge", "histogram")
"""Kinds of what comes with heartbeats."""


def test_only_finite_numbers_are_metrics():
    line = train(3, a=None, b="shm", c=math.nan, d=math.inf, e=True, f=2)
    assert dict(numbers(line)) == {"weights/version": 3.0, "reward/mean": 0.03, "f": 2.0}


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        ([train(1), train(2), evaluation(2)], [(1, True), (2, False), (2, False)]),
        # An update of any version has the step in which it ended.
        ([train(4), update(3) | {"step": 4}, train(5)], [(4, True), (4, False), (5, False)]),
        # A learner resumed from its checkpoint of step 3.
        ([train(5), train(4, start=2), train(5, start=2)], [(5, True), (4, True), (5, False)]),
        # As after the sinks were started again.
        ([update(41), train(42)], [(41, False), (42, True)]),
        ([evaluation(0), train(1)], [(0, False), (1, True)]),
    ],
)
def test_steps(lines, steps):
    entries = Entries()
    assert [entries.take(line)[:2] for line in lines] == steps


@pytest.mark.parametrize("free", [None, 0, 10**11])
def test_free_disk_space_is_exported_if_it_is_known(free):
    made = snapshot()
    figures = run_values(replace(made, run=replace(made.run, disk_free_bytes=free)))
    assert figures.get("run/disk_free_bytes") == free
    assert None not in figures.values()


def test_actors_that_left_the_run_are_not_exported():
    lines = [update(7), update(6, "rollouter/5")]
    replicas = families_of(lines, snapshot())["asyncrl_update_stall_s"].values
    assert replicas == {(("replica", "rollouter/0"),): 0.25}
    assert len(families_of(lines, None)["asyncrl_update_stall_s"].values) == 2


def test_members_of_an_evaluation_are_labels():
    numbers = {"eval/gsm/component/a/b": 0.5, "eval/gsm/pass_at/4": 0.75, "eval/gsm/pass_at_k": 0.8}
    found = families_of([evaluation(1) | numbers], None)
    assert found["asyncrl_eval_component"].values == {(("component", "a/b"), ("eval", "gsm")): 0.5}
    assert found["asyncrl_eval_pass_at"].values == {(("eval", "gsm"), ("k", "4")): 0.75}
    assert found["asyncrl_eval_pass_at_k"].values == {(("eval", "gsm"),): 0.8}


def test_stages_of_episodes_are_labels():
    made = snapshot()
    figures = {"rollout/episodes_at/tool search": 3.0, "rollout/episodes_ended/stop": 7.0}
    actors = [replace(made.actors[0], metrics=figures)]
    found = families_of([train(7, rollout__episode_share__engine=0.5)], replace(made, actors=actors))
    stages, ended = found["asyncrl_actor_rollout_episodes_at"], found["asyncrl_actor_rollout_episodes_ended"]
    who = (("actor", "rollouter/0"), ("host", "node1"))
    assert (stages.kind, stages.values) == ("gauge", {(*who, ("stage", "tool search")): 3.0})
    assert (ended.kind, ended.values) == ("counter", {(*who, ("outcome", "stop")): 7.0})
    assert found["asyncrl_rollout_episode_share"].values == {(("stage", "engine"),): 0.5}


def everything():
    """(lines, snapshot) with every figure that the catalogue knows, all of them with one actor."""
    names = [metric.name.replace("*", "made") for metric in catalogue.every()]
    lines = [
        {"kind": kind, "replica": "rollouter/0"} | dict.fromkeys(names, 1.0) for kind in ("train", "eval", "update")
    ]
    (actor,) = snapshot().actors
    heard = {kind: [metric for metric in catalogue.every() if kind in metric.kinds] for kind in HEARD}
    actor = replace(
        actor,
        metrics={metric.name: 1.0 for kind in ("counter", "gauge") for metric in heard[kind]},
        histograms={metric.name: Histogram([1] * (len(metric.edges) + 1), 1.0) for metric in heard["histogram"]},
    )
    return lines, replace(snapshot(), actors=[actor])


def test_every_metric_reaches_prometheus_with_its_kind_and_a_name_of_its_own():
    found = families_of(*everything())
    for metric in catalogue.every():
        for kind in set(metric.kinds) & set(HEARD):
            family = found[prometheus_name(f"actor/{metric.name.removesuffix('/*')}")]
            assert family.kind == kind
            assert len(family.histograms if kind == "histogram" else family.values) == 1
    assert found["asyncrl_actor_learner_step"].text == catalogue.find("learner/step").text
    (actor,) = everything()[1].actors
    names = ["up", "restarts", *(name for name, _ in GAUGES.values()), *actor.metrics, *actor.histograms]
    assert len({prometheus_name(f"actor/{name}") for name in names}) == len(names)
    # As they are exposed, where counters and the parts of a histogram get an ending.
    endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
    exposed = [name + ending for name, family in found.items() for ending in endings[family.kind]]
    assert len(set(exposed)) == len(exposed)
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in (*exposed, prometheus_name("7 ä/b")))
