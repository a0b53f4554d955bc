"""Limits, memory and GPUs of a host."""

import pytest

from asyncrl.config.engines import ENGINES
from asyncrl.doctor.machine import (
    find_cards,
    gather_facts,
    judge_memory,
    judge_shm,
    memory_bytes,
    parse_cards,
    shm_bytes,
)
from asyncrl.launcher.fleet.hosts import find_facts

GIB = 1 << 30


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
    facts = gather_facts(find_facts())
    assert facts.versions["asyncrl"] == facts.facts.version
    assert facts.versions.keys() >= {"aiohttp", *(name for traits in ENGINES.values() for name in traits.packages)}
    assert facts.versions["pyzmq"] and facts.facts.interfaces["lo"] == "127.0.0.1"
    assert facts.identity == gather_facts(find_facts()).identity
    total, available = memory_bytes()
    assert 0 < available <= total
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
