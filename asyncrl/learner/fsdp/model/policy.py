"""The policy: a causal LM that scores packed rows, wrapped for FSDP2; and its head, a chunk of logits at a time.

A packed row holds several sequences. transformers recognises them by ``position_ids`` that restart at 0, with
``use_cache=False`` and no attention mask. With the cache left on, or a mask of ones, it silently treats the row as one
long sequence. A common beginning of several sequences may be in the row once (algorithm/packing.py). Positions then
continue behind it, and attention.py copies its keys and values for each sequence. attention.py also explains pieces.
recurrence.py copies hidden states for layers that carry a state from token to token.

The head computes log-probs and entropies from hidden states. It is applied in chunks of positions, and again in the
backward pass. A chunk's softmax statistics are float32. On CUDA the arithmetic of a chunk is compiled into two kernels,
one forward and one backward; where the compiler fails, it runs as it is written, which is logged once.

Invariants: the head is applied only to positions that have a loss, and all their logits are never in memory. The
gradient of the head's weights is summed over chunks in float32, in every compute type, so more chunks do not make it
worse. A frozen head gets no gradient and no memory for one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from asyncrl.gpu.learner_memory import CHUNK_BYTES
from asyncrl.learner.fsdp.model import attention
from asyncrl.learner.fsdp.model.attention import connect
from asyncrl.learner.fsdp.model.packed_row import PackedRow, RowGroup, RowSets, gather, own_slice, own_tokens
from asyncrl.learner.fsdp.model.recurrence import separate
from asyncrl.weights.routers import Routers

_LOG = logging.getLogger(__name__)
OUTSIDE = -1e30
"""Logit of a token outside of the sampled set. Its probability is 0; -inf times a gradient of 0 would be NaN."""
Attention = Literal["varlen", "packed", "loaded", "plain"]
"""Attention implementations: VARLEN and PACKED of attention.py, the one that transformers chose at loading, and plain
matrix products, which support everything that a model asks for."""


Further = Callable[[Tensor, Callable[[Tensor], Tensor]], tuple[Tensor, ...]]
"""Function to further results of a row's N scored positions. It gets their entropies, float32 [N], and a function from
C chosen positions, int64 [C], to their logits, [C, V]. All these logits are in memory at once."""


class Policy(nn.Module):
    """Scores packed rows with a causal LM of transformers.

    If ``chunked`` is True, the head is applied here, chunk by chunk. If False, the model computes the logits of the
    whole row. A model that does more after its last layer than to apply the head and a soft cap needs False.
    """

    def __init__(self, model: Any, *, chunked: bool = True) -> None:
        super().__init__()
        self.model = model
        self.chunked = chunked
        self.routers = Routers(model)
        self.routes: Literal["replay", "compare", "ignore"] = "replay"
        """Use of a row's routes, as learner.routes: "compare" lets the routers choose, and counts the differences."""
        self.entropy_gradient = False
        """Whether entropies have a gradient."""
        self.row_group: RowGroup | None = None
        """The ranks that share rows under VARLEN and PACKED. Under other attention each computes the whole row.

        None if this rank has rows of its own.
        """
        self._attention: str = model.config._attn_implementation
        """The attention that transformers chose at loading."""
        self._softcap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        """Bound c of the logits (``score_hidden``); None without one."""
        for layer in self.decoder_layers():
            separate(layer)

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

    def forward(self, row: PackedRow, temperature: float, further: Further | None = None) -> tuple[Tensor, ...]:
        """Compute the log-prob of each target with logits divided by ``temperature``, and the entropy at its position.

        Both are of the distribution over the target's set if the row has ``sets``. Returns two float32 [N], nats, and
        then the results of ``further``. Raises NotImplementedError for a row with shared beginnings, unless the
        attention is VARLEN or PACKED.
        """
        counted: int | None = None
        implementation, count = self.model.config._attn_implementation, len(row.predict)
        group = self._sharers()
        if group is not None:
            row, places, counted = own_slice(row, group)
        routes = None if self.routes == "ignore" else row.routes
        self.routers.replay(routes, follow=self.routes == "replay", counted=counted)
        arguments: dict[str, Any] = {"input_ids": row.input_ids, "position_ids": row.position_ids, "use_cache": False}
        if implementation == attention.VARLEN:
            longest = attention.round_longest(max(row.key_lengths))
            arguments |= {"cu_seqlens": row.cu_seqlens, "cu_seqlens_k": row.cu_seqlens_k, "max_seqlen": longest}
        if implementation in (attention.PACKED, attention.VARLEN):
            # Created here, since FSDP's root would move tensors among its arguments to the device.
            arguments |= {"sequence_lengths": torch.tensor(row.lengths), "key_lengths": torch.tensor(row.key_lengths)}
            arguments |= {"key_index": row.key_index} | ({"row_group": group} if group is not None else {})
        elif row.key_index is not None:
            raise NotImplementedError(f"{implementation} attention cannot share what sequences begin with")
        if not self.chunked:
            found = _pick(self.model(**arguments).logits[0], row.predict)
            scores = score_logits(
                found, row.targets, temperature, sets=row.sets, entropy_gradient=self.entropy_gradient
            )
        else:
            found = _pick(self.model.base_model(**arguments).last_hidden_state[0], row.predict)
            head = self.model.get_output_embeddings()
            scores = score_hidden(
                found,
                head.weight,
                head.bias,
                row.targets,
                temperature,
                softcap=self._softcap,
                sets=row.sets,
                entropy_gradient=self.entropy_gradient,
            )
        if group is not None:
            scores = gather(scores[0], places, count, group), gather(scores[1], places, count, group)
        if further is None:
            return scores
        if group is not None:
            found = gather(found, places, count, group)
        if not self.chunked:
            return *scores, *further(scores[1], lambda at: found[at])
        project = functools.partial(F.linear, weight=head.weight, bias=head.bias)
        return *scores, *further(scores[1], lambda at: _capped(project(found[at]), self._softcap))

    def score(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """Call ``forward`` with FSDP's hooks. Returns log-probs and entropies, float32 [N] each, nats."""
        logprobs, entropies = self(row, temperature)
        return logprobs, entropies

    def _sharers(self) -> RowGroup | None:
        """Return the ranks that share rows under the present attention; None if each rank computes whole rows."""
        return (
            self.row_group if self.model.config._attn_implementation in (attention.PACKED, attention.VARLEN) else None
        )

    def balance_loss(self, row: PackedRow) -> Tensor:
        """Return the load-balance loss of ``row``, which was scored last, with its gradient: a number.

        Ranks that share the row compute the same loss, and each the gradient of its own tokens.
        """
        group, tokens = self._sharers(), row.input_ids.shape[1]
        if group is None:
            return self.routers.balance_loss()
        start, length = own_tokens(tokens, group)
        places = torch.arange(start, min(start + length, tokens), device=row.input_ids.device)
        return self.routers.balance_loss(lambda scores: gather(scores[: len(places)], places, tokens, group))

    def reshard(self) -> None:
        """Shard again the parameters that FSDP has left gathered for a backward pass, if none will come."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def count_active(self, *, trained: bool) -> int:
        """Count the parameters that compute a token: in a layer with experts, of these only the chosen ones.

        With ``trained``, frozen parameters do not count.
        """
        experts = self.routers.experts
        share = experts.chosen / experts.count if experts is not None else 1.0
        counts: list[float] = [
            parameter.numel() * (share if ".experts." in name else 1.0)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad or not trained
        ]
        return round(sum(counts))

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
    input_ids: Any,
    lengths: Any,
    predict: Any,
    targets: Any,
    device: torch.device,
    *,
    prefixes: Any = None,
    sets: RowSets | None = None,
    routes: Any = None,
) -> PackedRow:
    """Make a row on ``device`` from the arrays of a MicroBatch; without ``prefixes`` each piece is a whole sequence.

    ``routes`` has the shape of PackedRow.routes.
    """

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
        sets=sets,
        routes=None if routes is None else put(routes),
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


def chunk_size(vocabulary: int) -> int:
    """Return the number of positions whose logits are in memory at once, for a vocabulary of this size."""
    return max(1, CHUNK_BYTES // (4 * vocabulary))


def score_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    sets: RowSets | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute log softmax(logits / temperature) at the targets, and the entropy -sum p log p, in nats.

    ``logits`` [N, V] and ``targets`` [N] give two float32 [N]. With ``sets`` the softmax is over each target's set.

    With ``entropy_gradient`` the entropy has a gradient, at the cost of one more [N, V] in the backward pass.
    """
    outside = None if sets is None else sets.outside(slice(0, len(logits)), logits.shape[-1])
    logits = _masked(logits.float() / temperature, outside)
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        logs = logits - normaliser[:, None]
        entropies = _entropies(logs)
    return logprobs, entropies


def score_hidden(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    *,
    softcap: float | None = None,
    sets: RowSets | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``score_logits`` of ``hidden @ weight.T + bias`` chunk by chunk. Returns two float32 [N].

    The shapes are: ``hidden`` [N, H], ``weight`` [V, H], ``bias`` [V] or None, ``targets`` [N].

    With a ``softcap`` c logits x become c tanh(x / c) before the temperature (Gemma 2, arXiv 2408.00118, section 2).
    """
    size = chunk_size(weight.shape[0])
    scores: tuple[Tensor, Tensor] = _ScoreHidden.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature, softcap, sets, entropy_gradient, size
    )
    return scores


class _ScoreHidden(torch.autograd.Function):
    """``score_hidden`` with its own backward pass, so that no chunk's logits are kept for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        sets: RowSets | None,
        entropy_gradient: bool,
        size: int,
    ) -> tuple[Tensor, Tensor]:
        """Score the positions in chunks of ``size``; keep hidden states, entropies and normalisers, but no logits."""
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        scores = _on(hidden.device.type, _scores)
        for chunk in _chunks(len(hidden), size):
            logits = F.linear(hidden[chunk], weight, bias)
            outside = None if sets is None else sets.outside(chunk, len(weight))
            chunk_scores = scores(logits, targets[chunk], temperature, softcap, outside)
            logprobs[chunk], entropies[chunk], normalisers[chunk] = chunk_scores
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, normalisers)
        ctx.temperature, ctx.softcap, ctx.size, ctx.entropy_gradient = temperature, softcap, size, entropy_gradient
        ctx.sets = sets
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the logits again, chunk by chunk, and the gradients.

        ``of_x`` is the gradient of the loss with respect to x.
        """
        hidden, weight, bias, targets, entropies, normalisers = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden)
        of_weight, of_bias = (
            torch.zeros_like(p, dtype=torch.float32) if needed else None
            for p, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        logit_gradients = _on(hidden.device.type, _logit_gradients)
        for chunk in _chunks(len(hidden), ctx.size):
            of_logits = logit_gradients(
                F.linear(hidden[chunk], weight, bias),
                targets[chunk],
                normalisers[chunk],
                entropies[chunk],
                of_logprobs[chunk],
                of_entropies[chunk] if ctx.entropy_gradient else None,
                ctx.temperature,
                ctx.softcap,
                None if ctx.sets is None else ctx.sets.outside(chunk, len(weight)),
            )
            of_hidden[chunk] = of_logits @ weight
            # A chunk's gradient has the compute type, and is added to a sum in float32.
            if of_weight is not None:
                of_weight += of_logits.T @ hidden[chunk]
            if of_bias is not None:
                of_bias += of_logits.sum(dim=0)
        of_head = (None if total is None else total.to(weight.dtype) for total in (of_weight, of_bias))
        return of_hidden, *of_head, None, None, None, None, None, None


def _scores(
    logits: Tensor, targets: Tensor, temperature: float, softcap: float | None, outside: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a chunk's log-probs, entropies and normalisers (logarithms of the softmax's denominators)."""
    logits = _masked(_capped(logits, softcap).float() / temperature, outside)
    normalisers = torch.logsumexp(logits, dim=-1)
    logs = logits - normalisers[:, None]
    entropies = _entropies(logs)
    return logs.gather(-1, targets[:, None])[:, 0], entropies, normalisers


def _logit_gradients(
    logits: Tensor,
    targets: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    temperature: float,
    softcap: float | None,
    outside: Tensor | None,
) -> Tensor:
    """Compute the loss's gradient with respect to a chunk's logits (before the soft cap), in their type.

    ``of_logprobs`` and ``of_entropies`` are the gradients with respect to log-probs and entropies. The latter may be
    missing (None).

    With p the softmax of z, and H its entropy: d log p_t / d z_j = [j = t] - p_j, and d H / d z_j = -p_j (log p_j + H).
    """
    capped = _capped(logits, softcap)
    logs = _masked(capped.float() / temperature, outside) - normalisers[:, None]
    p = logs.exp()
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    gradient = of_logprobs[:, None] * ((tokens == targets[:, None]).float() - p)
    if of_entropies is not None:
        gradient = gradient - of_entropies[:, None] * p * (_finite(logs) + entropies[:, None])
    if softcap is not None:
        gradient = gradient * (1 - (capped.float() / softcap) ** 2)
    return (gradient / temperature).to(logits.dtype)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _masked(logits: Tensor, outside: Tensor | None) -> Tensor:
    """Give probability 0 to the tokens ``outside`` of a set, bool [N, V]; the logits are overwritten."""
    return logits if outside is None else logits.masked_fill_(outside, OUTSIDE)


def _entropies(logs: Tensor) -> Tensor:
    """-sum p log p of log-probs [N, V]: float32 [N]."""
    return -(logs.exp() * _finite(logs)).sum(dim=-1)


def _finite(logs: Tensor) -> Tensor:
    """Replace -inf, the logarithm of probability 0, by the least finite number, so that p log p is 0 and not NaN."""
    return logs.clamp(min=torch.finfo(logs.dtype).min)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


@functools.cache
def _on(device_type: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` for a type of device: compiled on CUDA, as it is elsewhere or if compiling fails."""
    if device_type != "cuda":
        return function
    compiled: Callable[..., Any] | None = torch.compile(function, dynamic=True)

    def run(*arguments: Any) -> Any:
        nonlocal compiled
        if compiled is not None:
            try:
                return compiled(*arguments)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                # Errors of running, not of compiling.
                raise
            except Exception as error:
                # For example, Triton needs a C compiler.
                _LOG.warning("the head is not compiled: %s: %s", type(error).__name__, error)
                compiled = None
        return function(*arguments)

    return run
