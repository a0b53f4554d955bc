"""Tables of pages that follow from code: built-in rewards, fields of TokenBatch, memory of the learner."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise

from asyncrl.config.training import LearnerConfig
from asyncrl.learner.algorithm.losses import TokenBatch
from asyncrl.learner.fsdp.model.policy import chunk_size
from asyncrl.learner.fsdp.startup.memory import ModelShape, TrainingShape, estimate
from asyncrl.reward.functions import BUILT_IN
from asyncrl.reward.reward_worker import ARGUMENTS

BFLOAT16_BYTES = 2
SHARDS = (1, 2, 8)
"""Numbers of GPUs in the table of memory."""


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
    for name, shape in MODELS.items():
        sizes = [estimate(shape, _load(shape, shards, offloaded=False)).device for shards in SHARDS]
        offloaded = estimate(shape, _load(shape, 1, offloaded=True))
        cells = [f"{size / 1e9:.0f} GB" for size in sizes]
        cells.append(f"{offloaded.device / 1e9:.0f} GB, and {offloaded.host / 1e9:.0f} GB of host memory")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def dense(
    *, layers: int, hidden: int, queries: int, keys: int, intermediate: int, vocabulary: int, tied: bool
) -> ModelShape:
    """The counts of a Qwen2 with these sizes, all of it trained."""
    layer = 2 * hidden * queries + queries + 2 * (hidden * keys + keys) + 3 * hidden * intermediate + 2 * hidden
    parameters = layers * layer + (1 if tied else 2) * vocabulary * hidden + hidden
    return ModelShape(
        parameters=parameters,
        trained=parameters,
        layer_parameters=layer,
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        intermediate=intermediate,
        vocabulary=vocabulary,
    )


MODELS = {
    "Qwen2.5-0.5B": dense(
        layers=24, hidden=896, queries=896, keys=128, intermediate=4864, vocabulary=151936, tied=True
    ),
    "Qwen2.5-1.5B": dense(
        layers=28, hidden=1536, queries=1536, keys=256, intermediate=8960, vocabulary=151936, tied=True
    ),
    "Qwen2.5-7B": dense(
        layers=28, hidden=3584, queries=3584, keys=512, intermediate=18944, vocabulary=152064, tied=False
    ),
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
