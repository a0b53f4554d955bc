"""Limits, memory and GPUs of a host."""

import resource

import pytest

from asyncrl.config.load import validate_config
from asyncrl.doctor.machine import (
    descriptor_limit,
    find_cards,
    gather_facts,
    judge_descriptors,
    judge_memory,
    judge_shm,
    memory_bytes,
    parse_cards,
    shm_bytes,
)
from asyncrl.doctor.needs import (
    ModelSize,
    checkpoints_need,
    descriptors_need,
    memory_need,
    run_dir_need,
)

GIB = 1 << 30


def config(**sections):
    tree = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"engine": "vllm", "replicas": 2}}
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return validate_config(tree)


@pytest.mark.parametrize(("hard", "result"), [(999, "fail"), (1000, "warn"), (1999, "warn"), (2000, "ok")])
def test_descriptors(hard, result):
    found = judge_descriptors(hard, 1000)
    assert (found.result, bool(found.fix)) == (result, result != "ok")


@pytest.mark.parametrize(
    ("there", "result"), [(None, "fail"), ((64 << 20, 1 << 20), "fail"), ((64 << 20,) * 2, "warn"), ((GIB,) * 2, "ok")]
)
def test_shm(there, result):
    assert judge_shm(there).result == result


@pytest.mark.parametrize(
    ("total", "available", "result"), [(8, 4, "fail"), (16, 4, "warn"), (16, 10, "ok"), (16, 16, "ok")]
)
def test_memory(total, available, result):
    found = judge_memory(total * GIB, available * GIB, 10 * GIB)
    assert found.result == result and f"{available}.0 GiB of {total}.0 GiB" in found.detail


def test_what_this_host_is():
    facts = gather_facts()
    assert facts.versions["asyncrl"] == facts.facts.version
    assert facts.versions["pyzmq"] and facts.facts.interfaces["lo"] == "127.0.0.1"
    assert facts.identity == gather_facts().identity
    total, available = memory_bytes()
    assert 0 < available <= total
    assert descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert shm_bytes() is not None


def test_gpus_are_read_from_the_tool(tmp_path, monkeypatch):
    table = "0, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 512\n1, NVIDIA H100 80GB HBM3, 550.54.15, [N/A], [N/A]\n"
    cards = parse_cards(table)
    assert cards["0"].total_bytes == 81559 << 20 and cards["0"].used_bytes == 512 << 20
    assert cards["1"].driver == "550.54.15" and cards["1"].total_bytes == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it cannot talk to the driver\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    there, problem = find_cards()
    assert there == {} and problem.startswith("nvidia-smi ends with 9: NVIDIA-SMI has failed")


def test_a_checkpoint_is_twelve_bytes_a_parameter_and_so_many_are_kept():
    size = ModelSize(parameters=1000, bytes=2000)
    need = checkpoints_need(config(checkpoint={"keep": 2}), size)
    assert (need.least, need.wanted) == (12_000, 36_000)
    need = checkpoints_need(config(checkpoint={"keep": 2, "keep_every_steps": 25}, learner={"steps": 100}), size)
    assert need.wanted == 12_000 * 7
    assert checkpoints_need(config(checkpoint={"every_versions": 0}), size).wanted == 12_000
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


def test_the_export_is_in_the_run_folder():
    size = ModelSize(parameters=GIB, bytes=2 * GIB)
    plain = run_dir_need(config(), size, is_head=False).wanted
    assert run_dir_need(config(), size, is_head=True).wanted == plain + 2 * GIB
    assert run_dir_need(config(checkpoint={"export_at_end": False}), size, is_head=True).wanted == plain


def test_descriptors_grow_with_the_run():
    few, many = config(), config(rollout={"replicas": 200, "gpus_per_replica": 0})
    assert descriptors_need(None, None) < descriptors_need(few, None) < descriptors_need(many, None)
    assert descriptors_need(few, None) < descriptors_need(few, ModelSize(parameters=1, bytes=64 * GIB))
