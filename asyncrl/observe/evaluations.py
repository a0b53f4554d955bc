"""Results of evaluations with confidence intervals, and the paired comparison of two runs.

The learner writes the rewards of each evaluated prompt to evaluations.jsonl, all prompts of a round at once. A result
is made of the newest round of each set. An interval covers 95 %: the percentile bootstrap over prompts, RESAMPLES
resamples with a fixed seed. Samples of a prompt stay together, because they are not independent. A comparison resamples
the prompts that both runs have, so that a prompt's difficulty cancels out. Prompts without rewards are in no mean.

Pure, except the functions that read, which raise OSError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asyncrl.core.formatting import fixed

FILE = "evaluations.jsonl"
RESULT = "evaluation.json"
"""File in the run folder of ``asyncrl-eval``: its result as JSON."""
RESAMPLES = 10_000
TAIL = 0.025
"""Share of the resamples on each side of an interval."""
MEAN = "mean"
Rewards = Mapping[str, Sequence[float]]
"""Rewards of the samples of each prompt of a set, by the prompt's index and the digest of its row."""


class PromptRewards(msgspec.Struct, frozen=True):
    """The rewards of one prompt in one round, as in a line of evaluations.jsonl."""

    eval: str
    """Name of the evaluation."""
    uid: str
    """NAME@ROUND-INDEX."""
    row: str
    """Digest of the prompt's row."""
    rewards: list[float]
    """Rewards of the samples; empty for a prompt that failed."""


class ConfidenceInterval(msgspec.Struct, frozen=True):
    """A value, and the interval of 95 % around it."""

    value: float
    low: float
    high: float


class SetResult(msgspec.Struct, frozen=True):
    """The result of one evaluation set."""

    prompts: int
    failed: int
    """Prompts without rewards."""
    samples: int
    """Most samples of a prompt."""
    pass_at: float
    """Reward from which a sample passes (eval.NAME.pass_at)."""
    values: dict[str, ConfidenceInterval]
    """Mean reward over samples as ``mean``, and pass@k as ``pass@K``; empty if all prompts failed."""


class Difference(msgspec.Struct, frozen=True):
    """A set's values less those of another run, over the prompts that have rewards in both."""

    prompts: int
    unpaired: int
    """Prompts with rewards in one of the two runs alone."""
    values: dict[str, ConfidenceInterval]
    """As ``SetResult.values``; empty without a common prompt."""


class Evaluation(msgspec.Struct, frozen=True):
    """The results of one evaluation, by set."""

    model: str
    run: str
    """Run folder, with rewards by prompt and samples."""
    sets: dict[str, SetResult]
    compared_with: str = ""
    """Run folder of the other run of a comparison."""
    differences: dict[str, Difference] = {}

    def to_json(self) -> str:
        """Return the result as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self)).decode() + "\n"

    def __str__(self) -> str:
        """Return the table that ``asyncrl-eval`` prints."""
        rows = ["intervals of 95 %: bootstrap over prompts"]
        if self.compared_with:
            rows.append(f"differences: this evaluation less {self.compared_with}, paired by prompt")
        for name, result in self.sets.items():
            failed = f", {result.failed} failed" if result.failed else ""
            rows += ["", f"eval/{name}: {result.prompts} prompts, up to {result.samples} samples each{failed}"]
            rows += [f"  {key:<8} {_words(value)}" for key, value in result.values.items()]
            if (difference := self.differences.get(name)) is None:
                continue
            unpaired = f", {difference.unpaired} in one run alone" if difference.unpaired else ""
            rows.append(f"  differences over {difference.prompts} prompts{unpaired}:")
            rows += [f"  {key:<8} {_words(value, '+')}" for key, value in difference.values.items()]
        return "\n".join(rows)


def _words(found: ConfidenceInterval, sign: str = "") -> str:
    """A value and its interval for the table; ``sign`` stands before a positive value."""
    value = fixed(found.value, 3)
    shown = f"{sign}{value}" if found.value > 0 else value
    return f"{shown:>7}  [{fixed(found.low, 3)}, {fixed(found.high, 3)}]"


def read_evaluation(run_dir: Path, model: str, limits: Mapping[str, float], other: Path | None = None) -> Evaluation:
    """Return the result of the newest round of each set of a run; ``model`` is its name in the result.

    ``limits`` has eval.NAME.pass_at of each set. With ``other``, another run folder, adds the differences to it.
    Raises OSError.
    """
    found = read_rewards(run_dir)
    sets = {name: evaluate(rewards, limits[name]) for name, rewards in found.items()}
    if other is None:
        return Evaluation(model, str(run_dir), sets)
    others = read_rewards(other)
    differences = {name: compare(found[name], others[name], limits[name]) for name in found if name in others}
    return Evaluation(model, str(run_dir), sets, str(other), differences)


def read_rewards(run_dir: Path) -> dict[str, dict[str, list[float]]]:
    """Read the rewards of the newest round of each set of a run, by set and prompt. Raises OSError."""
    newest: dict[str, int] = {}
    found: dict[str, dict[str, list[float]]] = {}
    for line in (run_dir / FILE).read_bytes().splitlines():
        try:
            prompt = msgspec.json.decode(line, type=PromptRewards)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # A killed learner may leave a torn line.
            continue
        round, _, index = prompt.uid.rpartition("@")[2].partition("-")
        if int(round) > newest.get(prompt.eval, -1):
            newest[prompt.eval] = int(round)
            found[prompt.eval] = {}
        if int(round) == newest[prompt.eval]:
            found[prompt.eval][f"{index}-{prompt.row}"] = prompt.rewards
    return found


def evaluate(rewards: Rewards, pass_at: float) -> SetResult:
    """Return the result of a set. A sample passes if its reward is ``pass_at`` or more."""
    scored = [each for each in rewards.values() if each]
    samples = max(map(len, scored), default=0)
    values = _intervals(scored, None, pass_at, pass_at_ks(samples)) if scored else {}
    return SetResult(len(rewards), len(rewards) - len(scored), samples, pass_at, values)


def compare(own: Rewards, other: Rewards, pass_at: float) -> Difference:
    """Compare two results of one set, prompt by prompt: ``own`` less ``other``."""
    scored, others = ({key for key, each in rewards.items() if each} for rewards in (own, other))
    # Sorted, because the order decides which prompts a resample takes.
    common = sorted(scored & others)
    values: dict[str, ConfidenceInterval] = {}
    if common:
        pair = [own[key] for key in common], [other[key] for key in common]
        samples = min(max(map(len, each)) for each in pair)
        values = _intervals(*pair, pass_at, pass_at_ks(samples))
    return Difference(len(common), len(scored ^ others), values)


def estimate_pass_at(k: int, samples: int, passed: int) -> float:
    """Probability that at least one of ``k`` samples of a prompt passes, if ``passed`` of ``samples`` do; k <= samples.

    The unbiased estimator 1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code",
    2021, arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def pass_at_ks(samples: int) -> list[int]:
    """The values of k that are reported: powers of 2 below ``samples``, and ``samples`` itself."""
    return sorted({1 << power for power in range(samples.bit_length()) if 1 << power < samples} | {samples})


def _intervals(
    own: Sequence[Sequence[float]], other: Sequence[Sequence[float]] | None, pass_at: float, ks: Iterable[int]
) -> dict[str, ConfidenceInterval]:
    """Return mean and pass@k of the prompts ``own``, or with ``other`` the differences, with their intervals."""
    ks = list(ks)
    tables = [_table(rewards, pass_at, ks) for rewards in (own, other) if rewards is not None]

    def values(weights: np.ndarray) -> np.ndarray:
        # A resample may have no prompt with k samples.
        with np.errstate(invalid="ignore"):
            own_values, *others = [weights @ sums / (weights @ counts) for sums, counts in tables]
        return np.subtract(own_values, others[0]) if others else np.asarray(own_values)

    random, size = np.random.default_rng(0), len(own)
    draws = [values(np.bincount(random.integers(size, size=size), minlength=size)) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(draws, (TAIL, 1.0 - TAIL), axis=0)
    found = zip(values(np.ones(size)).tolist(), low.tolist(), high.tolist(), strict=True)
    return dict(zip((MEAN, *(f"pass@{k}" for k in ks)), (ConfidenceInterval(*each) for each in found), strict=True))


def _table(rewards: Sequence[Sequence[float]], pass_at: float, ks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return what each prompt adds to the numerators and the denominators of mean and pass@k, [prompts, 1 + ks]."""
    sums, counts = [], []
    for each in rewards:
        passed, samples = sum(reward >= pass_at for reward in each), len(each)
        enough = [k <= samples for k in ks]
        counts.append([samples, *enough])
        estimates = (
            estimate_pass_at(k, samples, passed) if is_in else 0.0 for k, is_in in zip(ks, enough, strict=True)
        )
        sums.append([math.fsum(each), *estimates])
    return np.array(sums, np.float64), np.array(counts, np.float64)
