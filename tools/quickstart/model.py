"""The model, its tokenizer, and its warm-up: training until sampled responses begin to be right, and no longer.

Fails with RuntimeError when that takes more than ``settings.max_steps`` steps.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from tools import small_model
from tools.quickstart.settings import Settings
from tools.quickstart.task import CHARACTERS, DOT, Problem, draw_dots, is_right, write_out
from tools.small_model import IGNORED, train
from tools.small_model import save as save

LONGEST = 64
"""Tokens after which a solution is given up."""


def make_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token a character, and an end token with id 0."""
    return small_model.make_tokenizer("<end>", characters)


def make_model(settings: Settings) -> Qwen2ForCausalLM:
    """A new model."""
    return small_model.make_model(settings, len(settings.characters) + 1)


def warm_up(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    demonstrated: Iterator[Problem],
    probes: Sequence[Problem],
) -> float:
    """Train ``model`` in place on solutions of ``demonstrated``; returns the share of ``probes`` that it solves."""
    teacher = random.Random(settings.seed)
    problems = (list(islice(demonstrated, settings.batch)) for _ in range(settings.max_steps))
    batches = (
        [_labelled(tokenizer, each, _demonstrate(each, teacher, settings)) for each in some] for some in problems
    )
    start = time.monotonic()
    solved = 0.0
    for step, loss in enumerate(train(model, settings, batches), 1):
        if step % settings.check_every == 0:
            progress = f"  warm-up step {step}: loss {loss:.3f}"
            if loss < settings.check_below:
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


def _labelled(tokenizer: PreTrainedTokenizerFast, problem: Problem, solution: str) -> tuple[list[int], list[int]]:
    """Token ids and labels; only the response and its end token carry a label."""
    prompt, response = tokenizer(problem.prompt).input_ids, [*tokenizer(solution).input_ids, tokenizer.eos_token_id]
    return [*prompt, *response], [IGNORED] * len(prompt) + response
