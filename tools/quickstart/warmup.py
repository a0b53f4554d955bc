"""The warm-up: supervised training until sampled responses begin to be right, and no longer.

Fails with RuntimeError when that takes more than ``settings.max_steps`` steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tools.quickstart.settings import Settings
from tools.quickstart.task import DOT, Problem, draw_dots, is_right, write_out

LONGEST = 64
"""Tokens after which a solution is given up."""
IGNORED = -100
"""The label of a token that is not learned."""
BETAS = (0.9, 0.99)


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    demonstrated: Iterator[Problem],
    probes: Sequence[Problem],
) -> float:
    """Train ``model`` in place on solutions of ``demonstrated``; returns the share of ``probes`` that it solves."""
    teacher = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=BETAS, weight_decay=0.0)
    start = time.monotonic()
    solved = 0.0
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / settings.rise)
        problems = list(islice(demonstrated, settings.batch))
        solutions = [_demonstrate(problem, teacher, settings) for problem in problems]
        ids, labels = _demonstrations(tokenizer, problems, solutions)
        # Padding is on the right, behind everything that is learned: causal attention needs no mask.
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % settings.check_every == 0:
            progress = f"  warm-up step {step}: loss {loss.item():.3f}"
            if loss.item() < settings.check_below:
                solved = solved_share(model, tokenizer, probes)
                progress += f", {solved:.0%} of samples right"
            print(f"{progress} ({time.monotonic() - start:.0f} s)", flush=True)
            if solved >= settings.signal:
                return solved
    raise RuntimeError(
        f"the warm-up solves {solved:.0%} of its samples after {settings.max_steps} steps, less than "
        f"{settings.signal:.0%}: raise max_steps in tools/quickstart/settings.py"
    )


@torch.no_grad()
def solved_share(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> float:
    """Share of ``problems`` whose answer ends a response sampled at temperature 1."""
    prompts = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True, padding_side="left")
    length = prompts["input_ids"].shape[1]
    ids = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        # Text behind the answer is not looked at.
        eos_token_id=[i for i in (tokenizer.eos_token_id, tokenizer.get_vocab().get(DOT)) if i is not None],
        max_new_tokens=LONGEST,
    )
    responses = tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)
    right = [is_right(response, problem) for problem, response in zip(problems, responses, strict=True)]
    return sum(right) / len(right)


def _demonstrate(problem: Problem, teacher: random.Random, settings: Settings) -> str:
    solution = write_out(problem, teacher, settings.forget)
    if not settings.dots:
        return solution
    return solution + draw_dots(teacher, settings.dots, settings.dots_sigma, settings.most_dots)


def _demonstrations(
    tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], solutions: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64 [batch, length]; only the response and its end token carry a label."""
    end = tokenizer.eos_token_id
    rows, labels = [], []
    for problem, solution in zip(problems, solutions, strict=True):
        prompt, response = tokenizer(problem.prompt).input_ids, [*tokenizer(solution).input_ids, end]
        rows.append([*prompt, *response])
        labels.append([IGNORED] * len(prompt) + response)
    longest = max(map(len, rows))
    return (
        torch.tensor([row + [end] * (longest - len(row)) for row in rows]),
        torch.tensor([label + [IGNORED] * (longest - len(label)) for label in labels]),
    )
