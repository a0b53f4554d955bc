"""A packed row on its device, its token sets, and context parallelism: ranks that share each row.

The token sets (messages/token_sets.py) mask the logits of the head. A chunk of positions gets a mask of that chunk
alone, so scoring in chunks needs no mask of the whole row.

Context parallelism is Ulysses (arXiv 2309.14509). The ranks of a row group get the same row. Outside of attention each
of them computes an equal slice of the row's tokens. Inside, an exchange gives each rank all tokens, for its share of
the heads, and a second one gives the slices back. At the end ``gather`` gives every rank the scores of the whole row,
so all compute the same loss.

    tokens      a row is padded to a multiple of the group's size, by a piece of its own that nothing scores
    heads       keys and values are repeated if there are fewer heads of them than ranks, or the numbers do not divide
    gradients   each exchange is the transpose of the other. ``gather`` passes each rank the gradient of its own
                scores, so the gradients of the group's ranks add up to that of the row

Invariant: a row's tokens see the same keys as on one rank. Works for layers that see other tokens in attention alone;
the check at start (startup_check.py) refuses other models, and compares split rows with whole ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

_GROUPS: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
"""Process groups by name, until they are destroyed. torch.compile takes a name for a constant."""


@dataclass(frozen=True, slots=True)
class RowSets:
    """The set of each of N scored positions; M members in all. A position without members has the whole vocabulary."""

    ids: Tensor
    """Members: int64 [M], one set after the other."""
    positions: Tensor
    """The scored position of each member: int64 [M], ascending."""
    whole: Tensor
    """Whether a position has no members: bool [N]."""
    starts: np.ndarray
    """Index of each position's first member, and M: int64 [N + 1], on the host."""

    def outside(self, chunk: slice, vocabulary: int) -> Tensor:
        """Return the mask of the tokens outside of the sets: bool [positions of the chunk, vocabulary]."""
        whole = self.whole[chunk]
        first, last = self.starts[[chunk.start, chunk.start + len(whole)]].tolist()
        mask = (~whole)[:, None].repeat(1, vocabulary)
        mask[self.positions[first:last] - chunk.start, self.ids[first:last]] = False
        return mask

    def at(self, places: Tensor) -> RowSets:
        """Return the sets of these scored positions alone, ascending indices, int64 [n]."""
        kept = torch.isin(self.positions, places)
        sizes = np.diff(self.starts)[places.cpu().numpy()]
        return RowSets(
            ids=self.ids[kept],
            positions=torch.searchsorted(places, self.positions[kept]),
            whole=self.whole[places],
            starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]),
        )


def make_row_sets(ids: np.ndarray, sizes: np.ndarray, device: torch.device) -> RowSets | None:
    """Put the sets of a MicroBatch on ``device``; None if it has no sets."""
    if not len(ids):
        return None

    def put(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return RowSets(
        ids=put(ids.astype(np.int64)),
        positions=put(np.repeat(np.arange(len(sizes)), sizes)),
        whole=put(sizes == 0),
        starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]),
    )


@dataclass(frozen=True, slots=True)
class PackedRow:
    """A packed row on its device."""

    input_ids: Tensor
    """Token ids: int64 [1, T]."""
    position_ids: Tensor
    """Positions: int64 [1, T], from 0 in each sequence; a piece with a prefix continues those of the prefix."""
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
    """The token after each position in ``predict``: int64 [N]."""
    sets: RowSets | None = None
    """Sets from which the targets were sampled; None if all were sampled from the whole vocabulary."""
    routes: Tensor | None = None
    """Routes of the tokens (messages/routes.py): [T, layers, chosen]; None if the routers choose for themselves."""


class RowGroup(NamedTuple):
    """The ranks that share this rank's rows."""

    size: int
    rank: int
    """This rank's index in the group: it computes slice ``rank`` of each row."""
    name: str
    """Name of the process group in torch."""


def join_row_group(size: int, timeout_s: float) -> RowGroup | None:
    """All ranks of the learner together: put each ``size`` consecutive ranks into a group; None for a size of 1."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_s))  # type: ignore[no-untyped-call]
    _GROUPS[group.group_name] = group
    return RowGroup(size, dist.get_rank(group), group.group_name)


def own_tokens(tokens: int, group: RowGroup) -> tuple[int, int]:
    """Return where this rank's slice of a row of so many ``tokens`` begins, and its length with padding."""
    length = -(-tokens // group.size)
    return group.rank * length, length


def own_slice(row: PackedRow, group: RowGroup) -> tuple[PackedRow, Tensor, int]:
    """Return the row as this rank computes it, the indices of its scored positions, and its number of tokens.

    The indices are among the scored positions of the whole row, and padding is not counted. Tokens, positions, targets,
    sets and routes are those of its slice. The rest, for attention, is of the padded row.
    """
    tokens = row.input_ids.shape[1]
    padding = -tokens % group.size
    if padding:
        more = torch.arange(padding, device=row.input_ids.device)
        keys = sum(row.key_lengths) + padding
        row = replace(
            row,
            input_ids=F.pad(row.input_ids, (0, padding)),
            position_ids=torch.cat([row.position_ids, more[None]], dim=1),
            lengths=(*row.lengths, padding),
            key_lengths=(*row.key_lengths, padding),
            cu_seqlens=F.pad(row.cu_seqlens, (0, 1), value=tokens + padding),
            cu_seqlens_k=F.pad(row.cu_seqlens_k, (0, 1), value=keys),
            key_index=None if row.key_index is None else torch.cat([row.key_index, tokens + more]),
            routes=None if row.routes is None else torch.cat([row.routes, row.routes[-1:].expand(padding, -1, -1)]),
        )
    start, length = own_tokens(tokens, group)
    end = start + length
    places = ((row.predict >= start) & (row.predict < end)).nonzero()[:, 0]
    own = replace(
        row,
        input_ids=row.input_ids[:, start:end],
        position_ids=row.position_ids[:, start:end],
        predict=row.predict[places] - start,
        targets=row.targets[places],
        sets=None if row.sets is None else row.sets.at(places),
        routes=None if row.routes is None else row.routes[start:end],
    )
    return own, places, max(0, min(tokens - start, length))


def gather(values: Tensor, places: Tensor, count: int, group: RowGroup) -> Tensor:
    """All ranks of the group together: put each rank's ``values`` [n, ...] at its ``places``, int64 [n].

    Returns [count, ...], the same on all ranks. The gradient of a rank's values is that of its own result.
    """
    whole: Tensor = _Gather.apply(values, places, count, group.name)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    """``gather`` with its own backward pass, which exchanges nothing."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, count: int, name: str) -> Tensor:
        ctx.save_for_backward(places)
        # Each place has one rank, so the sum is exact.
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, places, values)
        dist.all_reduce(whole, group=_GROUPS[name])
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradient[places], None, None, None


def _exchange(parts: Tensor, name: str) -> Tensor:
    """All ranks of group ``name`` together: send part i of ``parts`` [size, ...] to rank i; part i of the result is
    that of rank i.
    """
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=_GROUPS[name])
    return received


# Operators of torch, so that torch.compile need not see what they do.


@torch.library.custom_op("asyncrl::all_tokens", mutates_args=())
def all_tokens(parts: Tensor, size: int, name: str) -> Tensor:
    """All ranks of a group together: exchange the parts of this rank's tokens for this rank's part of all tokens.

    ``parts`` [n, size, W] has for each of n tokens a part for each rank. Returns [n * size, W], in order of tokens.
    """
    return _exchange(parts.transpose(0, 1).contiguous(), name).flatten(0, 1)


@torch.library.custom_op("asyncrl::all_parts", mutates_args=())
def all_parts(tokens: Tensor, size: int, name: str) -> Tensor:
    """All ranks of a group together: the inverse of ``all_tokens``, from [n * size, W] to [n, size, W]."""
    parts = tokens.contiguous().view(size, -1, tokens.shape[1])
    return _exchange(parts, name).transpose(0, 1).contiguous()


@all_tokens.register_fake
def _(parts: Tensor, size: int, name: str) -> Tensor:
    return parts.new_empty(parts.shape[0] * size, parts.shape[2])


@all_parts.register_fake
def _(tokens: Tensor, size: int, name: str) -> Tensor:
    return tokens.new_empty(tokens.shape[0] // size, size, tokens.shape[1])


def _keep_group(ctx: Any, inputs: tuple[Tensor, int, str], output: Tensor) -> None:
    _, ctx.size, ctx.name = inputs


# As linear maps, each operator is the transpose of the other, and so its gradient.
for _operator, _transpose in ((all_tokens, all_parts), (all_parts, all_tokens)):
    _operator.register_autograd(
        lambda ctx, gradient, transpose=_transpose: (transpose(gradient, ctx.size, ctx.name), None, None),
        setup_context=_keep_group,
    )


def sharing_heads(attend: Callable[..., tuple[Tensor, None]]) -> Callable[..., tuple[Tensor, None]]:
    """Let an attention implementation for whole rows work where a group of ranks shares them.

    ``Policy.forward`` passes ``row_group`` there; without it, the implementation is called unchanged. The wrapper
    gets and returns this rank's slice of the tokens, all heads. ``attend`` gets all tokens, this rank's share of heads.
    Signature, shapes and result are those that transformers calls.
    """

    @functools.wraps(attend)
    def shared(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        row_group: RowGroup | None = None,
        **named: Any,
    ) -> tuple[Tensor, None]:
        if row_group is None:
            return attend(module, query, key, value, attention_mask, **named)
        # The smallest number that gives every rank equally many heads; torch.compile cannot trace math.gcd.
        repeats = 1
        while key.shape[1] * repeats % row_group.size:
            repeats += 1
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        query, key, value = _all_tokens((query, key, value), row_group)
        output, _ = attend(module, query, key, value, attention_mask, **named)
        return _all_heads(output, row_group), None

    return shared


def _all_tokens(tensors: tuple[Tensor, ...], group: RowGroup) -> list[Tensor]:
    """Exchange a slice of tokens for a share of heads: [1, heads, T / size, D] each to [1, heads / size, T, D]."""
    # [T / size, size, heads / size * D] each: of every token, a part for each rank.
    parts = [x[0].transpose(0, 1).reshape(x.shape[2], group.size, -1) for x in tensors]
    received: Tensor = all_tokens(torch.cat(parts, dim=2), group.size, group.name)
    split = torch.split(received, [part.shape[2] for part in parts], dim=1)
    shapes = [(len(received), x.shape[1] // group.size, x.shape[3]) for x in tensors]
    return [part.reshape(shape).transpose(0, 1)[None] for part, shape in zip(split, shapes, strict=True)]


def _all_heads(output: Tensor, group: RowGroup) -> Tensor:
    """Exchange a share of heads for a slice of tokens: [1, T, heads / size, D] to [1, T / size, heads, D]."""
    _, tokens, heads, width = output.shape
    # [T / size, size, heads / size * D]: the parts are runs of heads.
    received: Tensor = all_parts(output.reshape(tokens, -1), group.size, group.name)
    return received.reshape(1, len(received), heads * group.size, width)
