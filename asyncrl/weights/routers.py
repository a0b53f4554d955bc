"""The routers of a mixture of experts: they record which experts they choose, or take a recorded choice.

In a layer with experts, a router scores all experts for a token, and the layer computes the best few of them. The ids
of these few are the token's **route** in this layer. Engine and learner round differently, so near a tie they would
choose different experts. Then their log-probs differ by far more than rounding explains. So the learner *replays* the
routes with which the engine sampled.

``Routers`` finds the routers of a model of transformers and replaces one step of each: the ``torch.topk`` that takes
the best experts. In a replay the step takes the recorded experts, and their scores from the scores of all experts. So a
gradient reaches the router, and the router weighs the experts by its own code.

Invariant: a router without recorded routes computes what it computes in transformers, bit for bit. Fails with
ValueError for routes of another shape.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asyncrl.messages.routes import Experts

_ROUTER = re.compile(r"Top[kK]Router$")
"""Names of the classes of routers in transformers."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Routers:
    """The routers of one model, which must stay the model's; none in a model without experts."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = [
            _Router(module, int(found[1]))
            for name, module in model.named_modules()
            if _ROUTER.search(type(module).__name__) and (found := _LAYER.search(name))
        ]
        self._balance: Callable[..., Any] | None = getattr(
            sys.modules[type(model).__module__], "load_balancing_loss_func", None
        )
        """Load-balance loss in the model's module of transformers; None without one."""
        self.experts: Experts | None = None
        """The model's experts; None in a model without known routers."""
        if self._routers:
            text = model.config.get_text_config()  # type: ignore[operator, union-attr]
            self.experts = Experts(
                layers=text.num_hidden_layers,
                count=max(router.count for router in self._routers),
                chosen=max(router.chosen for router in self._routers),
            )

    @property
    def has_balance(self) -> bool:
        """Whether the model has experts, and its code in transformers a load-balance loss."""
        return self.experts is not None and self._balance is not None

    def replay(self, routes: Tensor | None, *, follow: bool = True, counted: int | None = None) -> None:
        """Set the routes of the tokens of the next passes: integers [T, layers, chosen], or None.

        They stay set, because activation checkpointing computes a layer again in the backward pass. Without ``follow``
        the routers choose for themselves, and only count the differences. ``counted`` is the number of tokens whose
        differences count, the first ones; None counts all.
        """
        if routes is not None:
            assert self.experts is not None, "a model without experts has no routes"
            expected = (self.experts.layers, self.experts.chosen)
            if tuple(routes.shape[1:]) != expected:
                raise ValueError(
                    f"routes of shape {tuple(routes.shape)} for {expected[0]} layers of {expected[1]} experts"
                )
        for router in self._routers:
            router.replayed = None if routes is None else routes[:, router.layer].long()
            router.follow, router.counted = follow, counted

    def recorded(self) -> Tensor:
        """Return the routes of the last pass: int64 [T, layers, chosen], ascending in a layer; 0 without experts."""
        assert self.experts is not None
        first = self._routers[0].own
        assert first is not None, "no pass has been computed"
        routes = first.new_zeros(len(first), self.experts.layers, self.experts.chosen)
        for router in self._routers:
            assert router.own is not None
            routes[:, router.layer] = router.own.sort(dim=-1).values
        return routes

    def keep_logits(self) -> None:
        """Keep the scores of all experts after each pass, which ``balance_loss`` needs. They take memory."""
        for router in self._routers:
            router.keeps_logits = True

    def balance_loss(self, complete: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return the load-balance loss of the last pass, with its gradient: a number.

        ``complete`` makes a layer's scores of a whole row, [T, count], of those that were computed here. Call it if
        ``has_balance``, after ``keep_logits``.
        """
        assert self.experts is not None
        assert self._balance is not None
        kept = tuple(router.logits for router in self._routers if router.logits is not None)
        whole = kept if complete is None else tuple(complete(each) for each in kept)
        loss: Tensor = self._balance(whole, self.experts.count, self.experts.chosen)
        return loss

    def take_differing(self) -> tuple[float, float]:
        """Return how many recorded experts the routers would not have chosen, and how many were compared.

        Counts all passes with routes since the last call, and resets both counts. A pass that is computed again counts
        again.
        """
        differing = sum(float(router.differing) for router in self._routers if router.differing is not None)
        total = sum(router.total for router in self._routers)
        for router in self._routers:
            router.differing, router.total = None, 0
        return differing, float(total)


class _Router:
    """One router, whose choice is recorded or replaced."""

    def __init__(self, module: nn.Module, layer: int) -> None:
        self.layer = layer
        weight: Any = module.weight
        chosen: Any = module.top_k
        self.count, self.chosen = int(weight.shape[0]), int(chosen)
        self.replayed: Tensor | None = None
        """Recorded experts of each token: int64 [T, chosen]; None without."""
        self.follow = True
        self.counted: int | None = None
        """As in ``Routers.replay``, like ``follow``."""
        self.own: Tensor | None = None
        """Experts that the router itself chose in the last pass: int64 [T, chosen]."""
        self.keeps_logits = False
        self.logits: Tensor | None = None
        """If kept: scores of all experts in the last pass, before any softmax: [T, count]."""
        self.differing: Tensor | None = None
        """Number of recorded experts that the router did not choose itself; None before the first."""
        self.total = 0
        """Number of recorded experts that were compared with the router's own choice."""
        self._choice = _Choice(self)
        self._forward: Callable[..., Any] = module.forward
        module.forward = self._route

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _route(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the module's forward: calls it while ``_choice`` takes its topk."""
        with self._choice:
            results = self._forward(*args, **kwargs)
        if self.keeps_logits:
            self.logits = results[0]
        return results

    def choose(self, scores: Tensor, best: Any) -> Any:
        """Return the scores and ids of the chosen experts, as torch.topk does.

        ``scores`` is [T, count], ``best`` the result of the router's own topk.
        """
        self.own = best.indices.detach()
        if self.replayed is None:
            return best
        if len(self.replayed) != len(scores):
            raise ValueError(f"routes of {len(self.replayed)} tokens for a row of {len(scores)}")
        # Whether the router would have chosen each recorded expert: [T, chosen].
        known = (self.replayed[:, :, None] == self.own[:, None, :]).any(dim=-1)[: self.counted]
        differing = known.numel() - known.sum(dtype=torch.float64)
        self.differing = differing if self.differing is None else self.differing + differing
        self.total += known.numel()
        if not self.follow:
            return best
        return torch.return_types.topk((scores.gather(-1, self.replayed), self.replayed))


class _Choice(TorchFunctionMode):
    """Hands the ``topk`` over all experts to their router. A ``topk`` over groups of experts has another shape."""

    def __init__(self, router: _Router) -> None:
        super().__init__()
        self._router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, router = args[0], self._router
        if scores.ndim != 2 or scores.shape[-1] != router.count or result.indices.shape[-1] != router.chosen:
            return result
        return router.choose(scores, result)
