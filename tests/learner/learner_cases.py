"""A small model and made-up groups for the tests of the learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from asyncrl.checkpoint.contents import CheckpointState
from asyncrl.checkpoint.origin import Origin
from asyncrl.config import Config
from asyncrl.config.rollout import RolloutConfig, WeightsConfig
from asyncrl.config.training import DataConfig, LearnerConfig, ModelConfig, RewardConfig
from asyncrl.core.truncation import Truncation
from asyncrl.learner.algorithm import batch
from asyncrl.learner.algorithm.batch import OptimizerUpdatePlan, StepPlan
from asyncrl.learner.algorithm.packing import MicroBatch
from asyncrl.learner.algorithm.user_functions import find_advantage
from asyncrl.messages.groups import Group, Lease, Sequence, TokenRole, Trajectory, VersionSpan, sampled_positions
from asyncrl.messages.ledger import Ledger
from asyncrl.messages.token_sets import make_sets

VOCABULARY = 48
TEMPERATURE = 0.8


def save_small_model(folder: Path, *, tied: bool = False, seed: int = 0, **settings: Any) -> Path:
    """A Qwen2 whose distributions are far from uniform and whose attention matters."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            **(
                {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
                | settings
            ),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.normal_(0, 0.15)
            elif parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            else:
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_config(model: Path | None = None, *, ranks: int = 1, budget: int = 64, **learner: Any) -> Config:
    truncated = learner.pop("truncated", "score")
    bucket_bytes = learner.pop("bucket_bytes", 1 << 20)
    # Threads of a small model mostly wait for one another.
    defaults: dict[str, Any] = {"lr": 1e-3, "device": "cpu", "threads": 1, "collective_timeout_s": 30.0}
    return Config(
        model=ModelConfig(path=str(model) if model else None),
        # The check at start scores sequences as long as there may be.
        data=DataConfig(max_prompt_tokens=96),
        rollout=RolloutConfig(temperature=TEMPERATURE, max_tokens=32),
        reward=RewardConfig(truncated=truncated),
        weights=WeightsConfig(bucket_bytes=bucket_bytes),
        learner=LearnerConfig(ranks=ranks, tokens_per_microbatch=budget, **(defaults | learner)),
    )


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """The configuration with other values of these keys."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def context_of(batch: MicroBatch, position: int) -> list[int]:
    """The tokens of a sequence up to one at ``position`` of its row, from the first on."""
    ends = np.cumsum(batch.lengths)
    piece = int(np.searchsorted(ends, position, side="right"))
    own = batch.input_ids[ends[piece] - batch.lengths[piece] : position + 1].tolist()
    before = int(batch.prefixes[piece])
    return own if before < 0 else batch.input_ids[ends[before] - batch.lengths[before] : ends[before]].tolist() + own


def only(plan: StepPlan) -> OptimizerUpdatePlan:
    """The one update of a step."""
    (update,) = plan.updates
    return update


ROLES: dict[str, TokenRole] = {"s": "sampled", "c": "context", "r": "repeated"}


def make_sequence(
    tokens: list[int], *, roles: str | None = None, versions: int | list[int] = 0, **fields: Any
) -> Sequence:
    """``roles`` has the first letter of each token's; ``versions`` is of all sampled tokens, or for each token."""
    roles = "s" * len(tokens) if roles is None else roles
    each = [versions] * len(tokens) if isinstance(versions, int) else versions
    spans: list[VersionSpan] = []
    for i, (role, version) in enumerate(zip(roles, each, strict=True)):
        span = VersionSpan(version if role == "s" else -1, i, i + 1, role=ROLES[role])
        last = spans[-1] if spans else None
        if last and (last.version, last.role) == (span.version, span.role):
            spans[-1] = msgspec.structs.replace(last, end=i + 1)
        else:
            spans.append(span)
    fields.setdefault("spans", spans)
    fields.setdefault("logprobs", np.full(roles.count("s"), -1.0, dtype=np.float32))
    return Sequence(tokens=np.array(tokens, dtype=np.int32), **fields)


def make_trajectory(
    tokens: list[int] | None = None,
    *,
    sequences: list[Sequence] | None = None,
    reward: float | None = 0.0,
    sample: int = 0,
    version: int | list[int] = 0,
    **fields: Any,
) -> Trajectory:
    """A trajectory of the sequences given, or of one made of ``tokens``, ``version`` and the fields of a sequence."""
    if sequences is None:
        own = {
            name: fields.pop(name)
            for name in ("roles", "spans", "logprobs", "turns", "prompt_ids", "routes")
            if name in fields
        }
        sequences = [make_sequence(tokens or [], versions=version, **own)]
    fields.setdefault("finish_reason", "stop")
    return Trajectory(sample=sample, sequences=sequences, reward=reward, text="", **fields)


def make_group(index: int, prompt: list[int], trajectories: list[Trajectory]) -> Group:
    for sample, trajectory in enumerate(trajectories):
        trajectory.sample = sample
    lease = Lease(
        uid=f"0-{index}",
        number=index + 1,
        purpose="train",
        epoch=0,
        index=index,
        param_version=0,
        prompt_ids=np.array(prompt, dtype=np.int32),
        prompt="",
        row={},
        samples=len(trajectories),
        temperature=TEMPERATURE,
        max_tokens=32,
    )
    return Group(lease=lease, trajectories=trajectories)


def make_state(version: int = 3, **fields: Any) -> CheckpointState:
    """The state in a checkpoint of a run that has trained the prompts 0, 1 and 5."""
    ledger = Ledger()
    for index in (0, 1, 5):
        ledger.record("trained", 0, index)
    made: dict[str, Any] = {
        "version": version,
        "step": 2 * version,
        "ledger": ledger.state,
        "fingerprint": "abc",
        "seed": 4,
        "rounds_closed": ["set@0"],
        "origin": Origin(),
    }
    return CheckpointState(**(made | fields))


def random_groups(
    seed: int, count: int, *, samples: int = 3, longest: int = 24, truncated: bool = False
) -> list[Group]:
    """Groups with lengths, context, forks, rewards and behaviour log-probs of all kinds; ``truncated``: and sets."""
    random = np.random.default_rng(seed)
    groups = []
    for index in range(count):
        trajectories = []
        for _ in range(samples):
            first = _random_sequence(random, int(random.integers(1, longest)))
            sequences = [first]
            if random.random() < 0.3:
                sequences.append(_random_sequence(random, int(random.integers(1, longest)), after=first))
            trajectories.append(make_trajectory(sequences=sequences, reward=float(random.normal())))
        groups.append(make_group(index, random.integers(0, VOCABULARY, 5).tolist(), trajectories))
    return [_with_sets(group, random) for group in groups] if truncated else groups


def _with_sets(group: Group, random: np.random.Generator) -> Group:
    """Give each sampled token a random set with it."""
    for sequence in (sequence for trajectory in group.trajectories for sequence in trajectory.sequences):
        tokens = sequence.tokens[sampled_positions(sequence)].tolist()
        others = [random.integers(0, VOCABULARY, random.integers(0, 9)).tolist() for _ in tokens]
        sequence.sets = make_sets([sorted({token, *more}) for token, more in zip(tokens, others, strict=True)])
    lease = msgspec.structs.replace(group.lease, truncation=Truncation(top_k=9))
    return msgspec.structs.replace(group, lease=lease)


def _random_sequence(random: np.random.Generator, length: int, after: Sequence | None = None) -> Sequence:
    """Its first token is sampled; ``after`` another one it repeats some of that, under a prompt of its own."""
    roles = "s" + "".join("s" if random.random() < 0.9 else "c" for _ in range(length - 1))
    tokens = random.integers(0, VOCABULARY, length).tolist()
    prompt_ids = None
    if after is not None:
        repeated = after.tokens[: int(random.integers(1, len(after.tokens) + 1))].tolist()
        roles, tokens = "r" * len(repeated) + roles, repeated + tokens
        prompt_ids = random.integers(0, VOCABULARY, 4).astype(np.int32)
    logprobs = (-4.0 * random.random(roles.count("s"))).astype(np.float32)
    return make_sequence(tokens, roles=roles, logprobs=logprobs, prompt_ids=prompt_ids)


def build_step(groups: list[Group], *, config: Config, **given: Any) -> StepPlan:
    """The plan of a step under the advantage of ``config``."""
    return batch.build_step(groups, advantage=find_advantage(config.learner), config=config, **given)


def plan_of(backend: Any, config: Config, step: int, count: int = 4) -> StepPlan:
    """A step of random groups, as the backend computes it."""
    return build_step(
        random_groups(step, count, truncated=config.rollout.truncation is not None),
        version=0,
        config=config,
        world_size=config.learner.row_groups,
        packed=backend.packed,
        shared=backend.shares_prefixes,
    )


def train(backend: Any, config: Config, step: int, count: int = 4) -> dict[str, float]:
    metrics: dict[str, float] = backend.train(plan_of(backend, config, step, count))
    return metrics


def exact_model(folder: Path) -> Any:
    """The model of a folder in float64, as transformers loads it."""
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def exact_scores(model: Any, group: Group, sequence: Sequence) -> tuple[Any, Any]:
    """Log-probs of the sampled tokens of a sequence by a model, and the entropies there: float64 [N] each, nats."""
    import torch

    prompt = (group.lease.prompt_ids if sequence.prompt_ids is None else sequence.prompt_ids).tolist()
    ids, places = torch.tensor([*prompt, *sequence.tokens.tolist()]), sampled_positions(sequence) + len(prompt)
    logp = torch.log_softmax(model(ids[None]).logits[0, places - 1].double() / TEMPERATURE, dim=-1)
    return logp[torch.arange(len(places)), ids[places]], -(logp.exp() * logp).sum(-1)


def gradients_of(backend: Any) -> list[dict[str, np.ndarray]]:
    """Grows by rank 0's shards of the gradient of each update to come, before the optimizer sees it."""
    found: list[dict[str, np.ndarray]] = []
    named = {name.removeprefix("model."): p for name, p in backend.policy.named_parameters() if p.requires_grad}
    backend._optimizer.register_step_pre_hook(
        lambda *_: found.append({name: p.grad.to_local().clone().numpy() for name, p in named.items()})
    )
    return found


def read_checkpoint(target: Path) -> dict[str, np.ndarray]:
    """Arrays that DCP's own tool makes of a trainer's folder."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = target.with_suffix(".pt")
    dcp_to_torch_save(target, whole)
    return {name: tensor.numpy() for name, tensor in torch.load(whole, weights_only=True).items()}


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
