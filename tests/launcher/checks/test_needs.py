"""Findings, and estimates of memory, disk, open files and ports."""

import json
import resource
from pathlib import Path

import pytest
from disks import fill, small_disk
from side_by_side import held_and_free

from asyncrl.config.load import config_to_json, validate_config
from asyncrl.core.disk import free_bytes, in_bytes, nearest_folder
from asyncrl.launcher.checks.check_list import ORDER, CheckedHost, check_folders, in_order
from asyncrl.launcher.checks.findings import CheckOrder, as_json, counts, exit_code, fail, ok, on_host, rows, warn
from asyncrl.launcher.checks.needs import (
    ModelSize,
    Need,
    checkpoints_need,
    descriptors_need,
    memory_need,
    run_dir_need,
)
from asyncrl.launcher.checks.network import check_ports, ports_needed, ports_of
from asyncrl.launcher.checks.resources import check_folder, judge_descriptors, same_disk
from asyncrl.rpc.linux import descriptor_limit

GIB = 1 << 30
HERE = "127.0.0.1"
SIZE = ModelSize(parameters=GIB, bytes=2 * GIB)


def config(**sections):
    tree = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"engine": "vllm", "replicas": 2}}
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return validate_config(tree)


# --- findings ---

FINE, ODD, BAD = (
    ok("shm", "enough", "a"),
    warn("clock", "late", "set it", "b"),
    fail("placement", "no room", "ask less", key="rollout"),
)


def test_findings_are_objects_of_six_texts_or_rows_with_a_fix():
    assert json.loads(as_json([FINE, ODD, BAD])) == [
        {"host": "a", "check": "shm", "result": "ok", "detail": "enough", "fix": "", "key": ""},
        {"host": "b", "check": "clock", "result": "warn", "detail": "late", "fix": "set it", "key": ""},
        {"host": "", "check": "placement", "result": "fail", "detail": "no room", "fix": "ask less", "key": "rollout"},
    ]
    assert [exit_code(found) for found in ([], [FINE, ODD], [BAD, ODD])] == [0, 0, 1]
    found = [FINE, ODD, fail("model", "two\nlines", "mend\nit", key="model.path")]
    lines = rows(found)
    assert lines[0].split() == ["ok", "a", "shm", "enough"] and lines[1].endswith("late; fix: set it")
    assert lines[2].startswith("fail  all hosts  model") and lines[2].endswith("model.path: two lines; fix: mend it")
    assert counts(found) == "1 ok, 1 warn, 1 fail"
    assert rows([fail("model", "gone", "copy it")]) == ["fail  model  gone; fix: copy it"]


def test_order_is_by_host_and_then_by_check():
    found = [*on_host("b", [ok(check, "") for check in reversed(ORDER)]), FINE, BAD]
    placed = in_order(found, ["b", "a"])
    assert [one.check for one in placed] == ["placement", *ORDER, "shm"]
    assert [one.host for one in placed] == ["", *["b"] * len(ORDER), "a"]


def test_bytes():
    words = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 30: "5.0 GiB", 3 << 40: "3.0 TiB"}
    assert {count: in_bytes(count) for count in words} == words


# --- disks ---


def test_a_checkpoint_needs_twelve_bytes_per_parameter_for_each_that_is_kept():
    size = ModelSize(parameters=1000, bytes=2000)
    need = checkpoints_need(config(checkpoint={"keep": 2}), size)
    assert (need.least, need.wanted) == (12_000, 36_000)
    need = checkpoints_need(config(checkpoint={"keep": 2, "keep_every_steps": 25}, learner={"steps": 100}), size)
    assert need.wanted == 12_000 * 7
    # A checkpoint only at preemption, so the run may start without room for one.
    need = checkpoints_need(config(checkpoint={"every_versions": 0}), size)
    assert (need.least, need.wanted) == (0, 12_000)
    assert checkpoints_need(config(), None).wanted == 0
    # Adapters need room for themselves alone.
    adapters = ModelSize(parameters=1000, bytes=2000, adapters=500)
    assert checkpoints_need(config(lora={"rank": 8}, checkpoint={"keep": 2}), adapters).wanted == 18_000


def test_the_export_is_in_the_run_folder():
    plain = run_dir_need(config(), SIZE, is_head=False).wanted
    assert run_dir_need(config(), SIZE, is_head=True).wanted == plain + 2 * GIB
    assert run_dir_need(config(checkpoint={"export_at_end": False}), SIZE, is_head=True).wanted == plain


def test_room_and_rights(tmp_path):
    here = tmp_path / "not" / "there" / "yet"
    assert nearest_folder(here) == tmp_path and same_disk(here, tmp_path)
    free = free_bytes(here)
    for least, wanted, result in ((1, 1, "ok"), (1, free * 2, "warn"), (free * 2, free * 2, "fail")):
        assert check_folder("run_dir", "run.dir", here, Need(least=least, wanted=wanted)).result == result
    (tmp_path / "file").write_text("")
    for path, said in ((tmp_path / "file" / "x", "is not a folder"), ("/proc/1/x", "cannot be written to")):
        found = check_folder("run_dir", "run.dir", Path(path), Need(least=0, wanted=0))
        assert found.result == "fail" and said in found.detail and "run.dir" in found.fix
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file"]


def test_missing_disk_space_is_reported_once_with_its_parts(tmp_path):
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        order = CheckOrder(
            config=config_to_json(config()),
            actors=["learner/0"],
            address=HERE,
            run=str(disk / "runs" / "mine"),
            is_head=True,
            several=False,
        )
        (found,) = check_folders(CheckedHost(order=order), ModelSize(parameters=1000, bytes=4000))
        fill(disk)
        full = check_folder("run_dir", "run.dir", disk / "runs", Need(least=0, wanted=0))
    assert (found.check, found.result) == ("checkpoint_dir", "warn")
    taken = "11.7 KiB for each of 3 checkpoints, 1.0 GiB for logs, metrics and samples of a long run, 3.9 KiB for the"
    assert taken in found.detail, found.detail
    assert full.result == "fail" and f"no space left on {disk}" in full.detail and "make room" in full.fix


# --- memory ---


@pytest.mark.parametrize(
    ("settings", "actors", "on_gpu", "gib"),
    [
        # Two versions of the weights.
        ({}, ["learner/0", "rollouter/0"], True, 4),
        ({}, ["reward/0"], True, 0),
        # Training or an engine on the CPU needs more.
        ({"learner": {"ranks": 2}}, ["learner/0"], False, 12),
        # So does a rank on a GPU whose weights and optimizer states are in host memory, always or in turn.
        ({"learner": {"offload": True}}, ["learner/0"], True, 20),
        ({"placement": {"share": "time_slice"}}, ["learner/0", "rollouter/0"], True, 20),
        # A sleeping engine keeps the model below the adapters, and the rank has its frozen weights in host memory.
        ({"placement": {"share": "time_slice"}, "lora": {"rank": 8}}, ["rollouter/0"], True, 6),
        ({"rollout": {"gpus_per_replica": 0}}, ["rollouter/0", "rollouter/1"], False, 8.5),
    ],
)
def test_memory_is_two_versions_of_the_weights_and_the_work_on_the_cpu(settings, actors, on_gpu, gib):
    need = memory_need(config(**settings), actors, SIZE, on_gpu=on_gpu)
    assert need.least == gib * GIB + 0 < need.wanted < (int(gib) + 1) * GIB


def test_adapters_need_memory_only_for_themselves():
    size = ModelSize(parameters=GIB, bytes=2 * GIB, adapters=1000)

    def need(size, **lora):
        return memory_need(config(lora=lora), ["learner/0"], size, on_gpu=False).wanted

    alone, merged = need(size, rank=8), need(size, rank=8, publish="merged")
    assert 4 * GIB <= alone < 5 * GIB and merged == alone + 4 * GIB - 2 * 4 * 1000
    assert need(SIZE) == merged + 12 * (GIB - 1000)


# --- descriptors and ports ---


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


SIM = {"rollout": {"engine": "sim"}, "learner": {"backend": "sim"}}
ON_GPU = {"rollout": {"gpus_per_replica": 1}}


@pytest.mark.parametrize(
    ("settings", "actors", "count"),
    [
        # The host's agent needs one too, and the ranks one where they meet.
        ({}, ["controller/0", "learner/0", "rollouter/0"], 5),
        ({}, ["learner/1", "rollouter/0"], 3),
        (SIM, ["controller/0", "learner/0", "rollouter/0"], 4),
        # The members of a broadcast meet the learner: at its links, and under gloo also at a store.
        (SIM | {"weights": {"transport": "gloo"}}, ["controller/0", "learner/0", "rollouter/0"], 6),
        (ON_GPU | {"weights": {"transport": "nccl"}}, ["learner/0"], 4),
        (ON_GPU, ["learner/0"], 4),
        ({}, [], 0),
        (ON_GPU | {"learner": {"device": "cpu"}}, ["learner/0"], 3),
        (ON_GPU | {"lora": {"rank": 8}}, ["learner/0"], 3),
        (ON_GPU | {"weights": {"transport": "nccl"}}, ["learner/1", "rollouter/0"], 3),
        ({"network": {"ports": "5000-5010", "controller_port": 6000}}, ["controller/0", "rollouter/0"], 2),
        ({"network": {"ports": "5000-5010", "controller_port": 5003}}, ["controller/0", "rollouter/0"], 3),
    ],
)
def test_each_actor_needs_a_port(settings, actors, count):
    assert ports_needed(config(**settings), actors) == count


def test_ports_are_counted():
    with held_and_free(HERE) as pair:
        ports = f"{pair}-{pair + 1}"
        assert list(ports_of(ports)) == [pair, pair + 1] and list(ports_of("0")) == [0]
        for asked, needed, result, key, said in (
            ((HERE, "0", 0), 5, "ok", "", ""),
            ((HERE, ports, 0), 0, "ok", "", ""),
            ((HERE, ports, 0), 1, "warn", "network.ports", "1 of 2 ports"),
            ((HERE, ports, 0), 2, "fail", "network.ports", "Address already in use"),
            ((HERE, "0", pair), 1, "fail", "network.controller_port", str(pair)),
            (("203.0.113.9", "0", 0), 1, "fail", "network.host", "cannot be bound"),
        ):
            found = check_ports(*asked, needed)
            assert (found.result, result == "ok" or found.key) == (result, result == "ok" or key), found
            assert said in found.detail
        assert "4 ports or more" in check_ports(HERE, ports, 0, 2).fix
