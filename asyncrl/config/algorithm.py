"""Keys of the loss and of trained weights: corrections, rejection, reference, teacher, adapters, supervised steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import NonNegative, OptionalPath, Positive, Seconds, Section

Estimator = Literal["k1", "k2", "k3"]
AboveZero = Annotated[float, Field(gt=0)]
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room; an adapter takes the room of the next."""


class RejectConfig(Section):
    """Leaves out sequences on which the policy has moved too far from the one that sampled them."""

    estimator: Estimator = "k3"
    """Divergence of a token: k1 is -log rho, k2 (log rho)^2 / 2, k3 rho - 1 - log rho."""
    over: Literal["mean", "sum", "max"] = "mean"
    """Reduction over the tokens of a sequence."""
    limit: AboveZero = 0.01
    """Largest absolute value at which a sequence is trained, nats."""


class CorrectionConfig(Section):
    """Correction for tokens that older weights sampled. rho is the ratio of a token's probability under the weights at
    the start of the step to that under the weights that sampled it."""

    weight: Literal["auto", "token", "sequence", "none"] = "auto"
    """Weight of a token's loss: min(rho, learner.tis_cap) of the token or its sequence. auto is token, or none if the
    loss uses the engine's log-probs itself."""
    mask: tuple[AboveZero, AboveZero] | None = Field(default=None, strict=False)
    """Bounds on rho; tokens outside have no gradient."""
    reject: RejectConfig | None = None
    """Rejection of whole sequences; off by default."""


class KLConfig(Section):
    """Divergence from a frozen reference."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence. At 0 no reference is loaded, unless a loss of your own asks for one."""
    place: Literal["loss", "reward"] = "loss"
    """A term of each token's loss; or subtracted from the reward before the advantages, summed over the tokens that the
    trajectory sampled."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """k1 is log r, k2 (log r)^2 / 2, k3 1/r - 1 + log r; r is the policy's probability over the reference's. auto is k3
    in the loss, k1 in the reward."""
    path: OptionalPath = None
    """The reference, as model.path, which is the default. The learner loads it while it scores."""

    @property
    def in_loss(self) -> bool:
        """Whether the divergence is a term of the loss."""
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the divergence is subtracted from the reward."""
        return self.coefficient > 0 and self.place == "reward"

    @property
    def estimator_used(self) -> Estimator:
        """The estimator, with auto resolved."""
        if self.estimator == "auto":
            return "k1" if self.place == "reward" else "k3"
        return self.estimator


class TeacherServerConfig(Section):
    """The server of a teacher, if learner.teacher is a URL."""

    model: str | None = None
    """Name of the model; by default the only one that the server has."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty sends no key."""
    concurrency: Positive = 16
    """Concurrent requests, one sequence each."""
    timeout_s: Seconds = 120.0
    """Timeout of a request."""
    tries: Positive = 5
    """Attempts at a request that the server rejects temporarily or that does not reach it; then the run ends."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685) on linear layers; the model's own weights do not change."""

    rank: NonNegative = 0
    """Rank of each adapter; 0 trains all weights without adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: an adapter adds (alpha / rank) B A x to its layer's output for x."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers with an adapter, by the last part of their names, for example ["q_proj", "v_proj"]; or every linear layer
    of the decoder."""
    publish: Literal["auto", "adapter", "merged"] = "auto"
    """Content of a version: the adapters (a few megabytes), or the whole weights with the adapters merged in. auto is
    adapter with vllm, else merged."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.rank > 0


class SftConfig(Section):
    """Supervised training on conversations: steps before the first version, and a term of each later step's loss."""

    data: OptionalPath = None
    """JSON lines of conversations (docs/algorithms.md), a file or a glob, also of the hub; tokenized as data.template
    says."""
    warm_steps: NonNegative = 0
    """Supervised steps before version 0 is published."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the supervised term in each step of reinforcement learning; 0 trains warm steps alone."""
    batch: Positive = 32
    """Conversations of a supervised step or term."""
    lr: Annotated[float, Field(ge=0)] | None = None
    """Peak learning rate of the warm steps, which have their own optimizer; by default learner.lr."""
    rise_steps: NonNegative = 0
    """Warm steps in which the rate rises; it then falls linearly, to 0 after the last."""
    max_tokens: Positive | None = None
    """Longest sequence of a conversation; by default the longest that the run samples."""
    on_long: Literal["error", "cut"] = "error"
    """A longer sequence stops the start with file and line, or is cut to max_tokens without its end token."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used stops the start with file and line, or is counted and skipped."""

    @property
    def is_on(self) -> bool:
        """Whether anything is trained by it."""
        return self.warm_steps > 0 or self.weight > 0
