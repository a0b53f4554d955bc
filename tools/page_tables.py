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
from itertools import pairwise
from pathlib import Path
from typing import Any

from asyncrl.config import resuming
from asyncrl.config.load import validate_config
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.gpu.learner_memory import ModelShape, TrainingShape, estimate, shape_of_settings
from asyncrl.gpu.memory_shares import plan_sharing
from asyncrl.learner.algorithm import advantages, losses
from asyncrl.learner.algorithm.losses import TokenBatch
from asyncrl.learner.fsdp.model.policy import chunk_size
from asyncrl.reward.functions import BUILT_IN
from asyncrl.reward.reward_worker import ARGUMENTS

DOCS = Path(__file__).parent.parent / "docs"
BFLOAT16_BYTES = 2
SHARDS = (1, 2, 8)
"""Numbers of GPUs in the table of memory."""
CARDS = {"24 GB (L4)": 23_034, "48 GB (L40S)": 46_068, "80 GB (H100)": 81_559}
"""GPUs in the table of sharing, with the memory that the driver reports (MiB)."""


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


def memory() -> str:
    """Estimated memory of each GPU of the learner by model, of docs/learner.md."""
    columns = [f"{count} GPU{'s' if count > 1 else ''}" for count in SHARDS]
    rows = [f"| sizes of | {' | '.join(columns)} | 1 GPU, `learner.offload` |", "|---|" + "---|" * (len(SHARDS) + 1)]
    for name, settings in MODELS.items():
        shape = shape_of_settings(settings)
        sizes = [estimate(shape, _load(shape, shards, offloaded=False)).device for shards in SHARDS]
        offloaded = estimate(shape, _load(shape, 1, offloaded=True))
        cells = [f"{size / 1e9:.0f} GB" for size in sizes]
        cells.append(f"{offloaded.device / 1e9:.0f} GB, and {offloaded.host / 1e9:.0f} GB of host memory")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def sharing() -> str:
    """The table of docs/first-run.md: for each model and size of one shared GPU, the weights that can be trained."""
    rows = [f"| sizes of | {' | '.join(CARDS)} |", "|---|" + "---|" * len(CARDS)]
    for name, settings in MODELS.items():
        cells = [_trainable(settings, size << 20) for size in CARDS.values()]
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


def _qwen(hidden: int, layers: int, heads: int, keys: int, intermediate: int, *, tied: bool) -> dict[str, Any]:
    """The sizes in the config.json of a Qwen2.5."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "intermediate_size": intermediate,
        "vocab_size": 151_936 if tied else 152_064,
        "tie_word_embeddings": tied,
    }


MODELS = {
    "Qwen2.5-0.5B": _qwen(896, 24, 14, 2, 4864, tied=True),
    "Qwen2.5-1.5B": _qwen(1536, 28, 12, 2, 8960, tied=True),
    "Qwen2.5-3B": _qwen(2048, 36, 16, 2, 11008, tied=True),
    "Qwen2.5-7B": _qwen(3584, 28, 28, 4, 18944, tied=False),
}


def _load(shape: ModelShape, shards: int, *, offloaded: bool) -> TrainingShape:
    """The defaults on CUDA."""
    tokens = LearnerConfig().tokens_per_microbatch
    return TrainingShape(
        shards=shards,
        tokens=tokens,
        chunk=min(tokens, chunk_size(shape.vocabulary)),
        compute_bytes=BFLOAT16_BYTES,
        checkpointing="full",
        offloaded=offloaded,
    )


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
    "resume": ("runs.md", resuming.document),
    "rewards": ("first-run.md", rewards),
    "token batch": ("algorithms.md", token_batch),
    "memory": ("learner.md", memory),
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
