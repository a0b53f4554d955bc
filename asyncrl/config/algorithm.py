"""The loss of the policy and all that is added to it or multiplied with it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.section import OptionalPath, Positive, Seconds, Section

Estimator = Literal["k1", "k2", "k3"]
AboveZero = Annotated[float, Field(gt=0)]


class RejectConfig(Section):
    """Sequences that are left out because the policy has moved too far from the one that sampled them."""

    estimator: Estimator = "k3"
    """Estimator of a token's divergence: -log rho, (log rho)^2 / 2, or rho - 1 - log rho."""
    over: Literal["mean", "sum", "max"] = "mean"
    """Reduction of the tokens of a sequence to one number."""
    limit: AboveZero = 0.01
    """Largest absolute value at which a sequence is trained, nats."""


class CorrectionConfig(Section):
    """The factor of a token's loss where weights other than those trained have sampled it: rho is the ratio of its
    probabilities under the weights that the step began with and under those that sampled it."""

    weight: Literal["auto", "token", "sequence", "none"] = "auto"
    """min(rho, learner.tis_cap) of the token or of its sequence; auto is token, and none with a loss that takes its
    ratio against the engine's log-probs already."""
    mask: tuple[AboveZero, AboveZero] | None = Field(default=None, strict=False)
    """Tokens with rho outside of these two bounds have no gradient."""
    reject: RejectConfig | None = None
    """Sequences that have no gradient; none by default."""


class KLConfig(Section):
    """The divergence from a frozen reference, the policy that the run began with."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence; 0 is without, and then no reference is loaded unless a loss of yours asks for one."""
    place: Literal["loss", "reward"] = "loss"
    """A term of each token's loss, or subtracted from the reward before the advantages, summed over what the trajectory
    has sampled; in the reward the policy is the one that sampled the token."""
    estimator: Literal["auto", "k1", "k2", "k3"] = "auto"
    """log r, (log r)^2 / 2 or 1/r - 1 + log r, with r the ratio of the policy's probability to the reference's; auto is
    k3 in the loss and k1 in the reward."""
    path: OptionalPath = None
    """Folder of the reference; by default model.path. Scored by the learner, whose devices hold it while it scores and
    no longer."""

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
    """The server of a teacher, where learner.teacher is a URL."""

    model: str | None = None
    """Name of the model; by default the only one that the server has."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; empty: no key is sent."""
    concurrency: Positive = 16
    """Requests at once, each of a sequence."""
    timeout_s: Seconds = 120.0
    """Longest time of a request."""
    tries: Positive = 5
    """Times that a request is sent which the server refuses for the moment, or which does not reach it; then the run
    ends."""
