"""The policy: a causal LM that scores packed rows, wrapped for FSDP2.

Invariant: the head is applied only to positions that have a loss, and all their logits are never in memory (head.py).

A packed row holds several sequences. transformers recognises them by ``position_ids`` that restart at 0, with
``use_cache=False`` and no attention mask. With the cache left on, or a mask of ones, it silently treats the row as one
long sequence. A common beginning of several sequences may be in the row once (algorithm/packing.py). Positions then
continue behind it, and attention.py copies its keys and values for each sequence. attention.py also explains pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.attention import connect
from asyncrl.learner.fsdp.model.head import find_likeliest, head_logits, score_hidden, score_logits

Attention = Literal["varlen", "packed", "loaded", "plain"]
"""Attention implementations: VARLEN and PACKED of attention.py, the one that transformers chose at loading, and plain
matrix products, which support everything that a model asks for."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A packed row on its device."""

    input_ids: Tensor
    """Token ids: int64 [1, T]."""
    position_ids: Tensor
    """Positions: int64 [1, T], restarting at 0 in each sequence."""
    lengths: tuple[int, ...]
    """Lengths of the pieces; they sum to T."""
    key_lengths: tuple[int, ...]
    """Number of tokens that each piece attends to: its prefix and itself; sums to K."""
    cu_seqlens: Tensor
    """Beginnings of the pieces, and T: int32 [pieces + 1]."""
    cu_seqlens_k: Tensor
    """Beginnings of the tokens that each piece attends to, and K: int32 [pieces + 1]."""
    key_index: Tensor | None
    """Indices in the row of the tokens that each piece attends to: int64 [K]; None if no piece has a prefix."""
    predict: Tensor
    """Positions whose next token is scored: int64 [N]."""
    targets: Tensor
    """Token that each of these positions predicts: int64 [N]."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """A request for the likeliest next tokens at some of a row's N scored positions."""

    choose: Callable[[Tensor], Tensor]
    """Function from the entropies, float32 [N], to the chosen positions, int64 [C] below N."""
    temperature: float
    count: int
    """Number K of tokens of each position."""

    def find(self, entropies: Tensor, logits: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Choose C positions by entropy. Returns their likeliest tokens, int64 [C, K], and log-probs, float32 [C, K].

        ``logits`` computes the logits of chosen positions, [C, V], which are all in memory at once.
        """
        return find_likeliest(logits(self.choose(entropies)), self.temperature, self.count)


class Policy(nn.Module):
    """Scores packed rows with a causal LM of transformers.

    If ``chunked`` is True, the head is applied here, chunk by chunk. If False, the model computes the logits of the
    whole row. A model needs that if it does more after its last layer than to apply the head and a soft cap.
    """

    def __init__(self, model: Any, *, chunked: bool = True) -> None:
        super().__init__()
        self.model = model
        self.chunked = chunked
        self.entropy_gradient = False
        """Whether entropies have a gradient."""
        self._attention: str = model.config._attn_implementation
        self._softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def use_attention(self, name: Attention) -> None:
        """Switch the model to this attention implementation. Raises ValueError if the model does not have it."""
        attention.register()
        implementations = {
            "varlen": attention.VARLEN,
            "packed": attention.PACKED,
            "loaded": self._attention,
            "plain": "eager",
        }
        self.model.set_attn_implementation(implementations[name])

    def forward(self, row: PackedRow, temperature: float, likeliest: Likeliest | None = None) -> tuple[Tensor, ...]:
        """Compute the log-prob of each target with logits divided by ``temperature``, and the entropy at its position.

        Returns two float32 [N], nats. With ``likeliest`` also returns the results of ``likeliest.find``. Raises
        NotImplementedError for a row with shared beginnings, unless the attention is VARLEN or PACKED.
        """
        arguments: dict[str, Any] = {"input_ids": row.input_ids, "position_ids": row.position_ids, "use_cache": False}
        implementation = self.model.config._attn_implementation
        if implementation == attention.VARLEN:
            longest = attention.round_longest(max(row.key_lengths))
            arguments |= {"cu_seqlens": row.cu_seqlens, "cu_seqlens_k": row.cu_seqlens_k, "max_seqlen": longest}
        if implementation in (attention.PACKED, attention.VARLEN):
            # Created here, since FSDP's root would move tensors among its arguments to the device.
            arguments |= {"sequence_lengths": torch.tensor(row.lengths), "key_lengths": torch.tensor(row.key_lengths)}
            arguments["key_index"] = row.key_index
        elif row.key_index is not None:
            raise NotImplementedError(f"{implementation} attention cannot share what sequences begin with")
        if not self.chunked:
            logits = _pick(self.model(**arguments).logits[0], row.predict)
            scores = score_logits(logits, row.targets, temperature, entropy_gradient=self.entropy_gradient)
            return scores if likeliest is None else (*scores, *likeliest.find(scores[1], lambda at: logits[at]))
        hidden = _pick(self.model.base_model(**arguments).last_hidden_state[0], row.predict)
        head = self.model.get_output_embeddings()
        scores = score_hidden(
            hidden,
            head.weight,
            head.bias,
            row.targets,
            temperature,
            softcap=self._softcap,
            entropy_gradient=self.entropy_gradient,
        )
        if likeliest is None:
            return scores
        found = likeliest.find(scores[1], lambda at: head_logits(self._softcap, hidden[at], head.weight, head.bias))
        return *scores, *found

    def score(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """Call ``forward`` with its hooks. Returns log-probs and entropies, float32 [N] each, nats."""
        logprobs, entropies = self(row, temperature)
        return logprobs, entropies

    def score_likeliest(self, row: PackedRow, likeliest: Likeliest) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Call ``score`` at temperature 1 and ``likeliest.find`` in one forward pass, without a gradient."""
        with torch.no_grad():
            logprobs, entropies, tokens, values = self(row, 1.0, likeliest)
        return logprobs, entropies, tokens, values

    def reshard(self) -> None:
        """Shard again the parameters that FSDP has left gathered for a backward pass, if none will come."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def decoder_layers(self) -> list[nn.Module]:
        """Find the repeated blocks of the model, which are sharded, compiled and checkpointed as units."""
        kinds = set(self.model._no_split_modules or ())
        layers: dict[str, nn.Module] = {}
        for name, module in self.model.named_modules():
            # Some models name a block and also modules inside it.
            inside = any(name.startswith(outer + ".") for outer in layers)
            if type(module).__name__ in kinds and not inside:
                layers[name] = module
        # If a model names no block, its longest list of modules is used.
        lists = [list(m) for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        return list(layers.values()) or max(lists, key=len, default=[])


def make_row(
    input_ids: Any, lengths: Any, predict: Any, targets: Any, device: torch.device, *, prefixes: Any = None
) -> PackedRow:
    """Make a row on ``device`` from the arrays of a MicroBatch; without ``prefixes`` each piece is a whole sequence."""

    def put(values: Any) -> Tensor:
        return torch.as_tensor(values).to(device=device, dtype=torch.int64)

    pieces = connect(lengths, prefixes)
    cu_seqlens = attention.cumulate(pieces.lengths, device)
    shared = pieces.key_index is not None
    return PackedRow(
        input_ids=put(input_ids)[None],
        position_ids=put(pieces.positions)[None],
        lengths=pieces.lengths,
        key_lengths=pieces.key_lengths,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=attention.cumulate(pieces.key_lengths, device) if shared else cu_seqlens,
        key_index=put(pieces.key_index) if shared else None,
        predict=put(predict),
        targets=put(targets),
    )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached; the whole tensor if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts(policy: Policy) -> dict[str, Tensor]:
    """Return this rank's shards of all parameters, and the whole buffers, by their names in Policy."""
    return {name: local(tensor) for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]}


def _pick(values: Tensor, places: Tensor) -> Tensor:
    """Return the rows of ``values`` [T, D] at the indices ``places``, int64 [N], which may repeat: [N, D]."""
    # Not ``values[places]``: on several threads its gradient would be summed in a different order at each call.
    return nn.functional.embedding(places, values)
