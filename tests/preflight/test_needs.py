"""Needs of memory, disk and descriptors; and whether a host has the descriptors and the ports."""

import resource

import pytest
from side_by_side import held_and_free

from asyncrl.config.load import validate_config
from asyncrl.preflight.needs import (
    ModelSize,
    Need,
    checkpoints_need,
    descriptors_need,
    memory_need,
    run_dir_need,
)
from asyncrl.preflight.room import check_ports, descriptor_limit, judge_descriptors, ports_needed, ports_of

GIB = 1 << 30
HERE = "127.0.0.1"


def config(**sections):
    tree = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"engine": "vllm", "replicas": 2}}
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return validate_config(tree)


def test_a_checkpoint_is_twelve_bytes_a_parameter_and_so_many_are_kept():
    size = ModelSize(parameters=1000, bytes=2000)
    need = checkpoints_need(config(checkpoint={"keep": 2}), size)
    assert (need.least, need.wanted) == (12_000, 36_000)
    need = checkpoints_need(config(checkpoint={"keep": 2, "keep_every_steps": 25}, learner={"steps": 100}), size)
    assert need.wanted == 12_000 * 7
    # None but when the run makes way, so it may begin without room for one.
    need = checkpoints_need(config(checkpoint={"every_versions": 0}), size)
    assert (need.least, need.wanted) == (0, 12_000)
    assert checkpoints_need(config(), None).wanted == 0


def test_memory_is_two_versions_of_the_weights_and_what_computes_on_the_cpu():
    size = ModelSize(parameters=GIB, bytes=2 * GIB)
    on_gpu = memory_need(config(), ["learner/0", "rollouter/0"], size, on_gpu=True)
    assert 4 * GIB <= on_gpu < 5 * GIB
    assert memory_need(config(), ["reward/0"], size, on_gpu=True) < GIB
    with_delta = memory_need(config(weights={"delta": True}), ["rollouter/0"], size, on_gpu=True)
    assert 6 * GIB <= with_delta < 7 * GIB
    on_cpu = memory_need(config(learner={"ranks": 2}), ["learner/0"], size, on_gpu=False)
    assert 12 * GIB <= on_cpu < 13 * GIB
    engine = memory_need(config(rollout={"gpus_per_replica": 0}), ["rollouter/0", "rollouter/1"], size, on_gpu=False)
    assert 8 * GIB + (512 << 20) <= engine < 9 * GIB


def test_adapters_need_room_for_themselves_alone():
    size, none = ModelSize(parameters=GIB, bytes=2 * GIB, adapters=1000), ModelSize(parameters=GIB, bytes=2 * GIB)
    actors = ["learner/0"]
    lora = config(lora={"rank": 8})
    assert checkpoints_need(config(lora={"rank": 8}, checkpoint={"keep": 2}), size).wanted == 36_000
    alone = memory_need(lora, actors, size, on_gpu=False)
    assert 4 * GIB <= alone < 5 * GIB
    merged = memory_need(config(lora={"rank": 8, "publish": "merged"}), actors, size, on_gpu=False)
    assert merged == alone + 4 * GIB - 2 * 4 * 1000
    assert memory_need(config(), actors, none, on_gpu=False) == merged + 12 * (GIB - 1000)


def test_the_export_is_in_the_run_folder():
    size = ModelSize(parameters=GIB, bytes=2 * GIB)
    plain = run_dir_need(config(), size, is_head=False).wanted
    assert run_dir_need(config(), size, is_head=True).wanted == plain + 2 * GIB
    assert run_dir_need(config(checkpoint={"export_at_end": False}), size, is_head=True).wanted == plain


@pytest.mark.parametrize(("hard", "result"), [(99, "fail"), (100, "warn"), (999, "warn"), (1000, "ok")])
def test_descriptors(hard, result):
    assert descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1], "the hard one, which actors take"
    found = judge_descriptors(hard, Need(least=100, wanted=1000))
    assert (found.result, bool(found.fix)) == (result, result != "ok")
    assert f"{hard} files" in found.detail and "100" in found.detail and "1000" in found.detail


def test_descriptors_grow_with_the_run():
    few, many = config(), config(rollout={"replicas": 200})
    for kind in ("least", "wanted"):
        bare, small, large = (getattr(descriptors_need(one, None), kind) for one in (None, few, many))
        assert bare < small < large
        assert small < getattr(descriptors_need(few, ModelSize(parameters=1, bytes=64 * GIB)), kind)
    # The largest actor of 32 rollouters was seen to hold so many, and a laptop's limit.
    assert 197 <= descriptors_need(config(rollout={"replicas": 32}), None).least < 1024


def test_each_actor_needs_a_port_and_the_ranks_one_where_they_meet():
    trained, simulated = config(), config(rollout={"engine": "sim"}, learner={"backend": "sim"})
    assert ports_needed(trained, ["controller/0", "learner/0", "rollouter/0"]) == 4
    assert ports_needed(trained, ["learner/1", "rollouter/0"]) == 2
    assert ports_needed(simulated, ["controller/0", "learner/0", "rollouter/0"]) == 3
    elsewhere = config(network={"ports": "5000-5010", "controller_port": 6000})
    assert ports_needed(elsewhere, ["controller/0", "rollouter/0"]) == 1
    among = config(network={"ports": "5000-5010", "controller_port": 5003})
    assert ports_needed(among, ["controller/0", "rollouter/0"]) == 2


@pytest.fixture
def pair():
    with held_and_free(HERE) as port:
        yield port


def test_ports_are_counted(pair):
    ports = f"{pair}-{pair + 1}"
    assert list(ports_of(ports)) == [pair, pair + 1] and list(ports_of("0")) == [0]
    assert check_ports(HERE, "0", 0, 5).result == "ok"
    assert check_ports(HERE, ports, 0, 0).result == "ok"
    short = check_ports(HERE, ports, 0, 1)
    assert short.result == "warn" and "1 of 2 ports" in short.detail and "Address already in use" in short.detail
    small = check_ports(HERE, ports, 0, 2)
    assert small.result == "fail" and small.key == "network.ports" and "4 ports or more" in small.fix
    held = check_ports(HERE, "0", pair, 1)
    assert held.result == "fail" and held.key == "network.controller_port" and str(pair) in held.detail
    elsewhere = check_ports("203.0.113.9", "0", 0, 1)
    assert elsewhere.result == "fail" and elsewhere.key == "network.host" and "cannot be bound" in elsewhere.detail
