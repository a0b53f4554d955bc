"""Differences between hosts, by tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import validate_config
from asyncrl.doctor.compare import (
    Offset,
    Way,
    best_offset,
    compare_clocks,
    compare_identities,
    compare_models,
    compare_versions,
    judge_gpus,
    judge_ways,
    needed_packages,
)
from asyncrl.doctor.protocol import Card, HostFacts
from asyncrl.launcher.terms.placement import PlacementHost, place
from asyncrl.launcher.terms.spec import HostOffer

VERSIONS = {"python": "3.11.7", "asyncrl": "0.1.0", "torch": "2.13.0", "vllm": "", "pyzmq": "27", "msgspec": "1"}


def facts(name, gpus=(), cards=(), problem="", **versions):
    return HostFacts(
        facts=HostOffer(version="0.1.0", hostname=name, cpus=8, gpus=list(gpus), interfaces={"eth0": "10.0.0.1"}),
        identity=name,
        versions=VERSIONS | versions,
        cards=dict(cards),
        gpu_problem=problem,
    )


def results(found):
    return {finding.host: finding.result for finding in found}


@pytest.mark.parametrize(
    ("ahead", "error", "result"),
    [
        (0.0, 0.01, "ok"),
        (0.49, 0.0, "ok"),
        (0.6, 0.01, "warn"),
        (-0.6, 0.01, "warn"),
        (0.8, 0.4, "ok"),
        (90, 1, "warn"),
    ],
)
def test_a_clock_that_is_surely_off_is_named(ahead, error, result):
    found = compare_clocks({"a": Offset(5.0, 0.0), "b": Offset(5.0 + ahead, error)}, "a")
    assert results(found) == {"b": result}
    if result == "warn":
        assert ("ahead of a" if ahead > 0 else "behind a") in found[0].detail and "chrony" in found[0].fix


@given(
    st.floats(-100, 100),
    st.lists(st.tuples(st.floats(0, 1000), st.floats(0.001, 5), st.floats(0, 1)), min_size=1, max_size=8),
)
def test_an_offset_is_never_wrong_by_more_than_it_says(ahead, rounds):
    told = best_offset([(asked, asked + way * share + ahead, asked + way) for asked, way, share in rounds])
    assert abs(told.ahead_s - ahead) <= told.error_s + 1e-9
    assert told.error_s == pytest.approx(min(way for _, way, _ in rounds) / 2, abs=1e-9)


def test_two_names_of_one_machine_are_one_host_too_many():
    found = compare_identities({"a": facts("x"), "b": facts("y"), "c": facts("x")})
    assert results(found) == {"c": "fail"} and "a" in found[0].detail


@pytest.mark.parametrize(
    ("there", "needed", "result", "said"),
    [
        ({}, [], "ok", "torch 2.13.0"),
        ({"torch": "2.13.0+cpu"}, ["torch"], "ok", ""),
        ({"asyncrl": "9.9.9"}, [], "fail", "asyncrl 9.9.9 (0.1.0 on a)"),
        ({"torch": ""}, [], "fail", "torch missing (2.13.0 on a)"),
        ({}, ["torch", "vllm"], "fail", "not installed: vllm"),
        ({"pyzmq": "26"}, [], "warn", "pyzmq 26 (27 on a)"),
        ({"python": "3.12.1"}, [], "warn", "python 3.12.1"),
        ({"python": "3.12.1", "vllm": "0.30"}, [], "fail", "vllm 0.30 (missing on a), python 3.12.1"),
    ],
)
def test_versions_are_those_of_the_head(there, needed, result, said):
    found = compare_versions({"a": facts("a"), "b": facts("b", **there)}, "a", {"b": needed})
    assert results(found) == {"a": "ok", "b": result}
    assert said in found[1].detail
    assert ("pip install 'asyncrl[vllm]' there" in found[1].fix) == ("vllm" in needed)
    found = compare_versions({"a": facts("a", gpus=["0"], torch="2.13.0+cpu")}, "a", {})
    assert results(found) == {"a": "fail"} and "CUDA" in found[0].fix, "which is no use to GPUs"


@pytest.mark.parametrize(("episode", "more"), [({}, []), ({"env": "pkg:Game"}, ["aiohttp"])])
def test_only_what_its_actors_import_has_to_be_there(episode, more):
    tree = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"gpus_per_replica": 1}}
    config = validate_config(tree | {"episode": episode})
    placed = place(config, [PlacementHost(name=name, cpus=8, gpus=("0",)) for name in "ab"])
    assert needed_packages(config, placed) == {"a": ["torch", "transformers"], "b": ["torch", "vllm", *more]}


H100 = Card(name="H100", driver="550", total_bytes=80 << 30, used_bytes=1 << 20)
OLD = Card(name="H100", driver="535", total_bytes=80 << 30, used_bytes=1 << 20)
BUSY = Card(name="H100", driver="550", total_bytes=80 << 30, used_bytes=60 << 30)


@pytest.mark.parametrize(
    ("b", "result", "said"),
    [
        (facts("b", ["0", "1"], {"0": H100, "1": H100}), "ok", "2 GPUs (H100, driver 550)"),
        (facts("b", ["0"], {"0": OLD}), "warn", "a has H100, driver 550"),
        (facts("b", ["0", "1"], {"0": H100, "1": BUSY}), "warn", "GPU 1 60.0 GiB of 80.0 GiB"),
        (facts("b", ["0"], {"0": H100, "1": BUSY}), "ok", "1 GPUs"),
        (facts("b", problem="nvidia-smi ends with 9: no driver"), "fail", "no driver"),
        (facts("b"), "ok", "no GPU"),
    ],
)
def test_gpus(b, result, said):
    found = judge_gpus({"a": facts("a", ["0"], {"0": H100}), "b": b}, "a", [])
    assert results(found) == {"a": "ok", "b": result}
    assert said in found[1].detail


@pytest.mark.parametrize(
    ("digests", "bad"), [({"a": "1", "b": "1"}, {}), ({"a": "1", "b": ""}, {}), ({"a": "1", "b": "2"}, {"b": "fail"})]
)
def test_models_are_those_of_the_head(digests, bad):
    assert results(compare_models(digests, "a")) == bad


def test_a_closed_way_is_named_with_its_direction_and_who_is_to_blame():
    hosts = ["a", "b", "c"]
    shut = {("a", "c"): "nothing comes back", ("b", "c"): "nothing comes back"}
    ways = [Way(one, other, shut.get((one, other), "")) for one in hosts for other in hosts if one != other]
    found = {finding.host: finding for finding in judge_ways(ways, "5000-5100")}
    assert results(found.values()) == {"a": "fail", "b": "fail", "c": "ok"}
    assert found["a"].detail == "a to c is closed: nothing comes back; c to a is open"
    assert "the firewall of c" in found["a"].fix and "TCP ports 5000-5100 of c for a" in found["a"].fix
    assert found["c"].detail == "reaches a, b"

    found = judge_ways([Way("a", "b", "x"), Way("b", "a", "y", needed=False), Way("a", "c", "")], "0")
    assert [(one.host, one.result) for one in found] == [("a", "fail"), ("b", "warn")]
    assert "b to a is closed, too" in found[0].detail and "every TCP port" in found[0].fix
