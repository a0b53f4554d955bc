"""Writes the tables of docs/ that follow from code into their pages: ``python -m tools.page_tables``.

A table is between the comments ``<!-- table NAME -->`` and ``<!-- end -->``. Raises ValueError if a page lacks one of
its tables.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from asyncrl.config.load import validate_config
from asyncrl.config.resuming import TABLE, Applies
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.engine_memory import EngineShape, estimate_engine
from asyncrl.gpu.learner_memory import USABLE, Estimate, TrainingShape, estimate, shape_of_settings
from asyncrl.gpu.memory_shares import plan_sharing
from asyncrl.learner.algorithm import advantages, losses
from asyncrl.learner.algorithm.losses import TokenBatch
from asyncrl.learner.fsdp.model.policy import chunk_size
from asyncrl.reward.functions import BUILT_IN
from asyncrl.reward.reward_worker import ARGUMENTS

DOCS = Path(__file__).parent.parent / "docs"
BFLOAT16_BYTES = 2
COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs in the table of hardware."""
CARD_BYTES = 80 << 30
"""Memory of each."""
STEP_TOKENS, SEQUENCES, CACHED_TOKENS = 8192, 256, 65_536
"""Tokens of an engine's step, sequences it decodes together, and tokens in its KV cache, in the table of hardware."""
CARDS = {"24 GB (L4)": 23_034, "48 GB (L40S)": 46_068, "80 GB (H100)": 81_559}
"""GPUs in the table of sharing, with the memory that the driver reports (MiB)."""
CONDITIONS: dict[Applies, str] = {
    Applies.GENERATED: "groups of the checkpoint are given back and generated again",
    Applies.PROMPTS: "refused if these differ, unless `resume.allow` has `data`",
    Applies.SEED: "refused, unless `resume.allow` has `seed`",
    Applies.BATCH: "refused, unless `resume.allow` has `batch`; groups of the checkpoint keep their size",
    Applies.REFUSED: "refused",
}
"""Further consequences of a change at a resume, in the table of docs/runs.md."""


def rewards() -> str:
    """The built-in reward functions with their options, of docs/first-run.md."""
    rows = ["| `reward.function` | `reward.options` | meaning |", "|---|---|---|"]
    for name, made in BUILT_IN.items():
        options = ", ".join(_option(each) for each in inspect.signature(made).parameters.values())
        rows.append(f"| `{name}` | {options or 'none'} | {_cell(inspect.getdoc(made) or '')} |")
    return "\n".join(rows)


def arguments() -> str:
    """The arguments of reward functions, of docs/first-run.md."""
    rows = ["| `reward.per` | argument | type | what it is |", "|---|---|---|---|"]
    for per, known in ARGUMENTS.items():
        rows += [f"| `{per}` | `{name}` | `{each.type}` | {each.about} |" for name, each in known.items()]
    return "\n".join(rows)


def token_batch() -> str:
    """The fields of TokenBatch, of docs/algorithms.md."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(TokenBatch))).body
    assert isinstance(body, ast.ClassDef)
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for field, text in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            kind = ast.unparse(field.annotation).replace(" | ", " or ")
            rows.append(f"| `{ast.unparse(field.target)}` | `{kind}` | {_cell(ast.literal_eval(text.value))} |")
    return "\n".join(rows)


def resuming() -> str:
    """The data that a change of each key at a resume applies to, of docs/runs.md."""
    rows = ["| keys | a change applies |", "|---|---|"]
    for kind, entries in TABLE.items():
        if kind is not Applies.NOW:
            words = f"{kind.value}; {CONDITIONS[kind]}" if kind in CONDITIONS else kind.value
            sections = groupby(entries.split(), key=lambda entry: entry.partition(".")[0])
            keys = "; ".join(", ".join(f"`{entry}`" for entry in of_section) for _, of_section in sections)
            rows.append(f"| {keys} | {words} |")
    return "\n".join([*rows, f"| every other key | {Applies.NOW.value} |"])


def hardware() -> str:
    """GPUs that the learner and an engine need at least, by model, of docs/models.md."""
    rows = ["| sizes of | all weights | LoRA | all weights, `learner.offload` | an engine |", "|---|---|---|---|---|"]
    for name, settings in MODELS.items():
        weights, adapters, offloaded = (
            {count: _rank(settings, count, **kind) for count in COUNTS}
            for kind in ({}, {"lora": 32}, {"offloaded": True})
        )
        cells = [
            _fewest({count: each.device for count, each in kind.items()}) for kind in (weights, adapters, offloaded)
        ]
        cells[-1] += f", and {offloaded[1].host / 1e9:.0f} GB of host memory"
        cells.append(_fewest({count: _engine_bytes(settings, count) for count in COUNTS}))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _fewest(sizes: Mapping[int, int]) -> str:
    """The least number of GPUs on which the size on each fits."""
    return next((str(count) for count, size in sizes.items() if size <= USABLE * CARD_BYTES), f"over {COUNTS[-1]}")


def _rank(settings: Mapping[str, Any], ranks: int, lora: int = 0, offloaded: bool = False) -> Estimate:
    """The memory of one of ``ranks`` with the default keys on CUDA and full checkpointing."""
    shape = shape_of_settings(settings, lora)
    tokens = LearnerConfig().tokens_per_microbatch
    chunk = min(tokens, chunk_size(shape.vocabulary))
    return estimate(shape, TrainingShape(ranks, tokens, chunk, BFLOAT16_BYTES, "full", offloaded))


def _engine_bytes(settings: Mapping[str, Any], gpus: int) -> int:
    engine = EngineShape(gpus, STEP_TOKENS, SEQUENCES, 0, BFLOAT16_BYTES)
    need = estimate_engine(shape_of_settings(settings), engine)
    return need.without_cache + CACHED_TOKENS * need.token


def sharing() -> str:
    """The table of docs/first-run.md: for each model and size of one shared GPU, the weights that can be trained."""
    rows = [f"| sizes of | {' | '.join(CARDS)} |", "|---|" + "---|" * len(CARDS)]
    for name in SHARED:
        cells = [_trainable(MODELS[name], size << 20) for size in CARDS.values()]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _trainable(settings: Mapping[str, Any], total: int) -> str:
    """The kinds of training that fit on a GPU of ``total`` bytes together with an engine."""
    kinds = list[str]()
    for rank, kind in ((0, "all weights"), (32, "LoRA")):
        tree = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "lora": {"rank": rank}}
        with contextlib.suppress(ConfigError):
            plan_sharing(validate_config(tree | {"rollout": {"gpus_per_replica": 1}}), settings, total)
            kinds.append(kind)
    return ", ".join(kinds) or "neither"


def _qwen(hidden: int, layers: int, heads: int, intermediate: int, **more: Any) -> dict[str, Any]:
    """The sizes in the config.json of a Qwen3."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
    } | more


def _experts(count: int, chosen: int, width: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": count, "num_experts_per_tok": chosen, "moe_intermediate_size": width} | more


MODELS = {
    "Qwen3-0.6B": _qwen(1024, 28, 16, 3072, tie_word_embeddings=True),
    "Qwen3-1.7B": _qwen(2048, 28, 16, 6144, tie_word_embeddings=True),
    "Qwen3-4B": _qwen(2560, 36, 32, 9728, tie_word_embeddings=True),
    "Qwen3-8B": _qwen(4096, 36, 32, 12_288),
    "Qwen3-14B": _qwen(5120, 40, 40, 17_408),
    "Qwen3-32B": _qwen(5120, 64, 64, 25_600),
    "Qwen3-30B-A3B": _qwen(2048, 48, 32, 6144, num_key_value_heads=4, **_experts(128, 8, 768)),
    "Mixtral-8x7B": _qwen(4096, 32, 32, 14_336, vocab_size=32_000, model_type="mixtral", **_experts(8, 2, 14_336)),
    "GLM-4.5-Air": _qwen(
        *(4096, 46, 96, 10_944),
        **_experts(128, 8, 1408, n_shared_experts=1, first_k_dense_replace=1),
        vocab_size=151_552,
    ),
}
SHARED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B")
"""Models in the table of sharing."""


def _option(parameter: inspect.Parameter) -> str:
    if parameter.default is inspect.Parameter.empty:
        return f"`{parameter.name}` (required)"
    if parameter.default is None:
        return f"`{parameter.name}` (unset)"
    default = f'"{parameter.default}"' if isinstance(parameter.default, str) else parameter.default
    return f"`{parameter.name} = {default}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").split()).replace("|", "\\|")


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "arguments": ("first-run.md", arguments),
    "losses": ("algorithms.md", partial(losses.BUILT_IN.document, "`loss`", "token loss", "options", "for")),
    "advantages": ("algorithms.md", partial(advantages.BUILT_IN.document, "`advantage`", "A of a turn", "for")),
    "resume": ("runs.md", resuming),
    "rewards": ("first-run.md", rewards),
    "token batch": ("algorithms.md", token_batch),
    "hardware": ("models.md", hardware),
    "sharing": ("first-run.md", sharing),
}


def renewed(page: str, text: str) -> str:
    """Return the text of a page with current tables. Raises ValueError."""
    for name, (where, made) in TABLES.items():
        if where == page:
            before, begin, rest = text.partition(f"<!-- table {name} -->\n")
            _, end, after = rest.partition("<!-- end -->")
            if not end:
                raise ValueError(f"{page} has no table {name}")
            text = f"{before}{begin}\n{made()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for each in sorted({where for where, _ in TABLES.values()}):
        (DOCS / each).write_text(renewed(each, (DOCS / each).read_text()))
