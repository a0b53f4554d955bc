from __future__ import annotations

import functools
import math
import shutil

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from asyncrl.learner.fsdp.model import policy
from asyncrl.learner.fsdp.model.packed_row import RowSets, make_row_sets
from asyncrl.learner.fsdp.model.policy import score_hidden, score_logits

VOCABULARY, WIDTH, COUNT = 64, 16, 50


def _case(*, bias: bool, frozen: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(COUNT, WIDTH), 0.3 * torch.randn(VOCABULARY, WIDTH)
    shift = torch.randn(VOCABULARY) if bias else None
    leaves = [hidden.requires_grad_(), *(p if p is None else p.requires_grad_(not frozen) for p in (weight, shift))]
    return (*leaves, torch.randint(0, VOCABULARY, (COUNT,)), torch.randn(COUNT), torch.randn(COUNT))


def _sets(targets: torch.Tensor) -> tuple[RowSets, torch.Tensor]:
    """Sets of all sizes that contain the targets, some of them whole, and the masks of the tokens outside of them."""
    random = np.random.default_rng(1)
    members = [
        sorted({target, *random.integers(0, VOCABULARY, random.integers(0, 20)).tolist()}) if i % 7 else []
        for i, target in enumerate(targets.tolist())
    ]
    rows = [[bool(each) and token not in each for token in range(VOCABULARY)] for each in members]
    ids = np.array([token for each in members for token in each], np.int32)
    sizes = np.array([len(each) for each in members], np.int32)
    sets = make_row_sets(ids, sizes, targets.device)
    assert sets is not None
    return sets, torch.tensor(rows, device=targets.device)


def _compare(found, case, temperature, softcap, entropy_gradient, within=1e-5, outside=None) -> None:
    """Compare scores of a case, and the gradients of their weighted sum, with a plain head in float64."""
    *leaves, targets, by_logprob, by_entropy = case
    exact = [leaf if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(*exact)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    if outside is not None:
        logits = logits.masked_fill(outside, -1e9)
    logs = logits.log_softmax(-1)
    expected = logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
    for scores in (found, expected):
        (scores[0] * by_logprob + scores[1] * by_entropy * entropy_gradient).sum().backward()
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)
    for ours, truth in zip(leaves, exact, strict=True):
        if ours is not None and ours.requires_grad:
            assert float((ours.grad - truth.grad).norm() / truth.grad.norm()) < within


@pytest.mark.parametrize(
    ("positions", "entropy_gradient", "bias", "softcap", "frozen", "temperature"),
    [
        (1, True, True, None, False, 0.7),
        (7, False, False, None, False, 0.7),
        (7, True, True, 0.5, False, 0.6),
        (7, True, True, 3.0, False, 1.0),
        (50, False, True, 0.5, False, 0.7),
        (1000, True, False, None, False, 1.0),
        # A frozen head gets no gradient, and what is below it the same.
        (7, False, True, None, True, 0.7),
    ],
)
@pytest.mark.parametrize("truncated", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_values_and_gradients_of_the_head_match_float64(
    chunked, truncated, positions, entropy_gradient, bias, softcap, frozen, temperature, monkeypatch
) -> None:
    monkeypatch.setattr(policy, "CHUNK_BYTES", 4 * VOCABULARY * positions)
    case = _case(bias=bias, frozen=frozen)
    hidden, weight, shift, targets, *_ = case
    sets, outside = _sets(targets) if truncated else (None, None)
    options = {"sets": sets, "entropy_gradient": entropy_gradient}
    if chunked:
        found = score_hidden(hidden, weight, shift, targets, temperature, softcap=softcap, **options)
    else:
        logits = F.linear(hidden, weight, shift)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        found = score_logits(logits, targets, temperature, **options)
    assert found[1].requires_grad == entropy_gradient
    _compare(found, case, temperature, softcap, entropy_gradient, outside=outside)
    assert (weight.grad is None) == frozen


def test_more_chunks_do_not_make_the_gradient_of_the_head_worse(monkeypatch) -> None:
    """Advantages of both signs, as in a step: their sum is much smaller than the parts."""
    torch.manual_seed(0)
    count = 2048
    hidden, weight = torch.randn(count, 64).bfloat16(), (0.05 * torch.randn(512, 64)).bfloat16()
    targets, advantages = torch.randint(0, 512, (count,)), torch.randn(count).sign() + 0.05

    def gradient(dtype: torch.dtype, positions: int) -> torch.Tensor:
        monkeypatch.setattr(policy, "CHUNK_BYTES", 4 * 512 * positions)
        leaf = weight.to(dtype, copy=True).requires_grad_()
        (score_hidden(hidden.to(dtype), leaf, None, targets, 1.0)[0] * advantages / count).sum().backward()
        return leaf.grad.double()

    truth = gradient(torch.float64, count)
    errors = [float((gradient(torch.bfloat16, n) - truth).norm() / truth.norm()) for n in (count, count // 64)]
    assert errors[1] < 1.5 * errors[0] < 0.01


def test_the_entropy_and_its_gradient_are_finite_for_probabilities_of_0() -> None:
    logits = torch.tensor([[0.0, -200.0, -1e4], [3.0, 2.0, float("-inf")]], requires_grad=True)
    _, entropies = score_logits(logits, torch.zeros(2, dtype=torch.int64), 1.0, entropy_gradient=True)
    entropies.sum().backward()
    p, q = torch.tensor([3.0, 2.0]).softmax(0).tolist()
    entropy = -p * math.log(p) - q * math.log(q)
    expected = [[0.0, 0.0, 0.0], [-p * (math.log(p) + entropy), -q * (math.log(q) + entropy), 0.0]]
    torch.testing.assert_close(entropies.detach(), torch.tensor([0.0, entropy]))
    torch.testing.assert_close(logits.grad, torch.tensor(expected))


def test_the_gradients_of_a_head_are_finite_for_probabilities_of_0() -> None:
    hidden = torch.tensor([[0.0, 1.0], [200.0, 1.0]]).requires_grad_()
    weight = torch.tensor([[0.0, 0.0], [-1.0, 0.0], [1.0, -1e38]]).requires_grad_()
    scores = score_hidden(hidden, weight, None, torch.tensor([0, 0]), 1.0, entropy_gradient=True)
    (scores[0].sum() + scores[1].sum()).backward()
    assert all(bool(torch.isfinite(each).all()) for each in (*scores, hidden.grad, weight.grad))


def _check_compiled(
    device: str, softcap: float | None, entropy_gradient: bool, truncated: bool, monkeypatch, caplog
) -> None:
    """Compare with float64, and require that nothing ran as it is written."""
    # vLLM's engines on CPU set it in the process that they were started in.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    functions = functools.cache(policy._on.__wrapped__)
    monkeypatch.setattr(policy, "_on", lambda _, function: functions("cuda", function))
    # A last chunk of 2 positions: sizes differ, and no other graph is made for them.
    monkeypatch.setattr(policy, "CHUNK_BYTES", 4 * VOCABULARY * 16)
    case = [leaf.detach().to(device).requires_grad_(leaf.requires_grad) for leaf in _case(bias=True, frozen=False)]
    hidden, weight, shift, targets, *_ = case
    sets, outside = _sets(targets) if truncated else (None, None)
    options = {"softcap": softcap, "sets": sets, "entropy_gradient": entropy_gradient}
    found = score_hidden(hidden, weight, shift, targets, 0.7, **options)
    _compare(found, case, 0.7, softcap, entropy_gradient, within=1e-4, outside=outside)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 2 and "not compiled" not in caplog.text
    torch.compiler.reset()


# Dynamo looks at the inputs' gradients when it makes a graph.
DYNAMO_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
ENDS = pytest.mark.parametrize(
    ("softcap", "entropy_gradient", "truncated"), [(None, False, False), (3.0, True, False), (3.0, True, True)]
)


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="Inductor needs a C++ compiler on CPUs"
)
@DYNAMO_WARNS
@ENDS
def test_a_compiled_head_has_the_numbers_of_float64(softcap, entropy_gradient, truncated, monkeypatch, caplog) -> None:
    """With the compiler of CUDA, which writes C++ here."""
    _check_compiled("cpu", softcap, entropy_gradient, truncated, monkeypatch, caplog)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@DYNAMO_WARNS
@ENDS
def test_a_compiled_head_of_a_gpu_is_exact(softcap, entropy_gradient, truncated, monkeypatch, caplog) -> None:
    _check_compiled("cuda", softcap, entropy_gradient, truncated, monkeypatch, caplog)


@pytest.mark.parametrize("fails", [False, True])
def test_a_head_runs_uncompiled_if_the_compiler_fails(fails, monkeypatch, caplog) -> None:
    def compile_it(function, dynamic):
        def run(*arguments):
            made.append(function)
            if fails:
                raise RuntimeError("Failed to find C compiler")
            return function(*arguments)

        return run

    made = []
    monkeypatch.setattr(torch, "compile", compile_it)
    functions = functools.cache(policy._on.__wrapped__)
    monkeypatch.setattr(policy, "_on", lambda _, function: functions("cuda", function))
    values = []
    for _ in range(2):
        hidden, weight, shift, targets, *_ = _case(bias=True, frozen=False)
        score_hidden(hidden, weight, shift, targets, 0.7)[0].sum().backward()
        values.append((hidden.grad, weight.grad, shift.grad))
    assert all(torch.equal(*pair) for pair in zip(*values, strict=True))
    # Once for each function, and not again where it has failed.
    assert [function.__name__ for function in made] == ["_scores", "_logit_gradients"] * (1 if fails else 2)
    assert caplog.text.count("Failed to find C compiler") == 2 * fails


def test_out_of_memory_in_a_head_does_not_count_as_a_failed_compilation(monkeypatch) -> None:
    def lacks_memory(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: lacks_memory)
    with pytest.raises(torch.OutOfMemoryError):
        policy._on.__wrapped__("cuda", policy._scores)()
