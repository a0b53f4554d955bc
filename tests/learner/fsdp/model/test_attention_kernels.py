"""The choice of the attention kernel, through torch's own registry, with kernels that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl

from asyncrl.learner.fsdp.model import attention, attention_kernels
from asyncrl.learner.fsdp.model.attention import Heads
from asyncrl.learner.fsdp.model.attention_kernels import ABSENT, KERNELS, choose_kernel, kernel_problem, use_kernel

CPU = torch.device("cpu")
HEADS = Heads(queries=4, keys=2, width=16)


def test_the_kernel_is_tried_on_the_device_of_the_run(kernel, monkeypatch) -> None:
    attend = attention.attend

    def tried(windowed: bool = True) -> str | None:
        return kernel_problem(CPU, torch.bfloat16, HEADS, windowed=windowed)

    assert tried() is None
    assert "float32" not in str(kernel_problem(CPU, torch.float16, HEADS, windowed=True))
    assert "soft cap" in str(kernel_problem(CPU, torch.bfloat16, Heads(4, 2, 16, softcap=9.0), windowed=False))

    def wider(*values: Any, sliding_window: int | None, **named: Any) -> Any:
        return attend(*values, sliding_window=sliding_window and sliding_window + 1, **named)

    monkeypatch.setattr(attention, "attend", wider)
    assert tried(windowed=False) is None
    assert "away from float32" in str(tried())

    def broken(*_values: Any, **_named: Any) -> Any:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(attention, "attend", broken)
    assert tried() == "RuntimeError: no kernel image is available"


class Packages:
    """Made-up packages of kernels: each scales the result of attention by its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.scales: dict[str, float] = {}
        attend = attention.attend
        # An installed module stands for each package.
        made_up = tuple(each._replace(module="json") for each in KERNELS)
        monkeypatch.setattr(attention_kernels, "KERNELS", made_up)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(
            attention,
            "attend",
            lambda *values, **named: (
                self.scales.get(current_flash_attention_impl() or "", 1.0) * attend(*values, **named)
            ),
        )
        monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {})

    def add(self, name: str, scale: float = 1.0, error: Exception | None = None) -> None:
        def register() -> Any:
            if error is not None:
                raise error
            return SimpleNamespace(remove=lambda: None)

        self.scales[name] = scale
        _registry.register_flash_attention_impl(name, register_fn=register)

    def choose(self, *others: str | None, is_policy: bool = True) -> tuple[str | None, list[str]]:
        """Choose as one rank; ``others`` are the problems of the other ranks with each kernel in turn."""
        answers = iter(others)

        def agree(problem: str | None, what: str) -> list[str]:
            return [each for each in (problem, next(answers, None)) if each is not None]

        return choose_kernel(CPU, torch.bfloat16, HEADS, windowed=False, agree=agree, is_policy=is_policy)


@pytest.fixture
def packages(kernel, monkeypatch):
    yield Packages(monkeypatch)
    restore_flash_attention_impl(_raise_warn=False)


def test_torch_uses_its_own_kernel_without_packages(packages) -> None:
    assert packages.choose() == (None, [])
    assert current_flash_attention_impl() is None


def test_the_fastest_correct_kernel_is_used(packages, monkeypatch) -> None:
    packages.add("FA3")
    assert packages.choose() == (None, []) and current_flash_attention_impl() == "FA3"
    packages.add("FA4")
    assert packages.choose() == (None, []) and current_flash_attention_impl() == "FA4"
    # Blackwell has no FlashAttention 3.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    packages.scales["FA4"] = 1.1
    problem, texts = packages.choose()
    assert problem is None and current_flash_attention_impl() is None
    assert texts[0].startswith("FlashAttention 4 is not used for attention: what the kernel gives is 0.1")
    assert texts[1] == "FlashAttention 3 is not used for attention: it supports devices of capability 9.x"


def test_a_package_that_cannot_be_imported_is_not_used(packages) -> None:
    packages.add("FA4", error=OSError("libcute.so: cannot open"))
    packages.add("FA3")
    assert packages.choose() == (
        None,
        ["FlashAttention 4 is not used for attention: OSError: libcute.so: cannot open"],
    )
    assert current_flash_attention_impl() == "FA3"


def test_all_ranks_use_the_same_kernel(packages) -> None:
    packages.add("FA4")
    packages.add("FA3")
    # Another rank lacks the first package, and cannot use the second.
    problem, texts = packages.choose(ABSENT, "RuntimeError: no kernel image")
    assert problem is None and current_flash_attention_impl() is None
    assert texts == ["FlashAttention 3 is not used for attention: RuntimeError: no kernel image"]
    # A kernel that no rank can use leaves torch's own problem.
    assert packages.choose("a", "b", "c")[0] == "c"


def test_a_model_that_only_scores_changes_no_kernel(packages) -> None:
    packages.add("FA4", scale=1.1)
    packages.add("FA3")
    assert packages.choose()[0] is None and current_flash_attention_impl() == "FA3"
    # The fastest works for the other model, and still is not used.
    packages.scales["FA4"] = 1.0
    assert packages.choose(is_policy=False) == (None, []) and current_flash_attention_impl() == "FA3"
    packages.scales["FA3"] = 1.1
    problem, texts = packages.choose(is_policy=False)
    assert "away from float32" in str(problem) and texts == [] and current_flash_attention_impl() == "FA3"


def test_an_installed_package_that_this_torch_does_not_know_is_absent(monkeypatch) -> None:
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_IMPLS", {})
    assert [use_kernel(each, CPU) for each in KERNELS] == [ABSENT, ABSENT]
    assert attention_kernels._import_problem("no_such_package.module") == ABSENT


def test_a_package_that_fails_at_its_import_is_named(packages, tmp_path, monkeypatch) -> None:
    (tmp_path / "broken_kernels").mkdir()
    (tmp_path / "broken_kernels" / "__init__.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = KERNELS[0]._replace(module="broken_kernels.interface")
    monkeypatch.setattr(attention_kernels, "KERNELS", (broken,))
    packages.add("FA4")
    assert packages.choose() == (None, ["FlashAttention 4 is not used for attention: OSError: undefined symbol"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("name", [None, *(each.name for each in KERNELS)])
def test_the_kernels_of_a_gpu(name: str | None, width: int, windowed: bool) -> None:
    device = torch.device("cuda")
    problem = use_kernel(next((each for each in KERNELS if each.name == name), None), device)
    if problem is not None:
        pytest.skip(f"{name}: {problem}")
    try:
        heads = Heads(queries=8, keys=2, width=width)
        assert kernel_problem(device, torch.bfloat16, heads, windowed=windowed) is None
    finally:
        use_kernel(None, device)
