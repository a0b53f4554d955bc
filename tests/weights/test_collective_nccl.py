"""NCCL as far as it goes without a GPU: how buckets are packed, which library is taken, and who is refused."""

from __future__ import annotations

import ctypes.util
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.messages.weights import BucketLayout
from asyncrl.weights.collective import nccl
from asyncrl.weights.collective.packing import Run, packed_bytes, runs
from asyncrl.weights.collective.sender import Sender
from asyncrl.weights.segments import layout, size_of


def bucket(*named: tuple[str, str, tuple[int, ...]]) -> BucketLayout:
    specs, size = layout(list(named))
    return BucketLayout(size=size, tensors=specs)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (bucket(("a", "float32", (3,)), ("b", "float32", (5,))), [Run(0, 0, 12), Run(64, 12, 20)]),
        (bucket(("a", "float32", (16,)), ("none", "float32", (0, 4)), ("b", "float32", (1,))), [Run(0, 0, 68)]),
        (bucket(("none", "float32", (0,)), ("a", "float32", (1,))), [Run(0, 0, 4)]),
        (bucket(), []),
    ],
    ids=["padding", "empty between", "empty first", "nothing"],
)
def test_runs_leave_the_padding_out(made: BucketLayout, expected: list[Run]) -> None:
    assert runs(made) == expected


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16", "uint8"]),
)
def test_packed_tensors_lie_back_to_back(shapes: list[tuple[int, ...]], dtype: str) -> None:
    made = bucket(*((f"t{index}", dtype, shape) for index, shape in enumerate(shapes)))
    memory = torch.randint(0, 256, (max(made.size, 1),), dtype=torch.uint8)
    # As after a larger bucket.
    buffer = torch.zeros(packed_bytes(made) + 10, dtype=torch.uint8)
    nccl.pack(memory, made, buffer)
    assert packed_bytes(made) == sum(size_of(spec) for spec in made.tensors)
    at = 0
    for spec in made.tensors:
        size = math.prod(spec.shape) * getattr(torch, dtype).itemsize
        assert torch.equal(buffer[at : at + size], memory[spec.offset : spec.offset + size])
        at += size
    assert not buffer[at:].any()


def test_what_vllm_could_not_take_apart_is_refused() -> None:
    with pytest.raises(ValueError, match=r"b \(float32\) would lie at byte 6"):
        runs(bucket(("a", "bfloat16", (3,)), ("b", "float32", (1,))))


def test_library_is_chosen_as_vllm_does(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("VLLM_NCCL_SO_PATH", raising=False)
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda _: None)
    assert nccl.library_candidates() == ["libnccl.so.2"]

    def absent(_: str) -> None:
        raise ModuleNotFoundError("No module named 'nvidia'")

    monkeypatch.setattr(nccl.importlib.util, "find_spec", absent)
    assert nccl.library_candidates() == ["libnccl.so.2"]

    class Wheel:
        submodule_search_locations = [str(tmp_path / "nothing"), str(tmp_path)]

    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()
    monkeypatch.setattr(nccl.importlib.util, "find_spec", lambda _: Wheel)
    assert nccl.library_candidates() == [str(tmp_path / "lib" / "libnccl.so.2"), "libnccl.so.2"]
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/opt/mine.so")
    assert nccl.library_candidates() == ["/opt/mine.so"]


def test_without_nccl_or_a_gpu_the_sender_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = ctypes.util.find_library("c")
    assert libc is not None
    for path, words in (("/nowhere/libnccl.so.2", "cannot open shared object"), (libc, "undefined symbol")):
        monkeypatch.setenv("VLLM_NCCL_SO_PATH", path)
        with pytest.raises(ConfigError, match=f"weights.transport: nccl needs NCCL.*{words}"):
            Sender("nccl", "127.0.0.1", 1.0)
    monkeypatch.setattr(nccl, "Library", lambda _: None)
    monkeypatch.setattr(nccl.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="weights.transport: nccl needs a GPU"):
        Sender("nccl", "127.0.0.1", 1.0)
