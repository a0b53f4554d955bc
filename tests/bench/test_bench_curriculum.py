"""The prompts and the count of tokens of the benchmark of the curriculum."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.load import validate_config
from tools.asset_cache import Assets
from tools.bench.curriculum import PROMPTS, SIDES, mixed_rows, points_of
from tools.bench.quickstart import Point
from tools.live_run import quickstart


def test_a_third_of_the_prompts_is_solved_and_a_third_hopeless(tmp_path: Path) -> None:
    own = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(1000, 1000 + 2 * PROMPTS)]
    assets = Assets(tmp_path)
    assets.write(own, [])
    rows = mixed_rows(assets)
    hopeless = [row for row in rows if row["answer"] == "none"]
    useful = [row for row in rows if row in own]
    solved = [row for row in rows if row not in hopeless and row not in useful]
    assert len(hopeless) == len(useful) == len(solved) == PROMPTS
    for row in solved:
        left, right = row["prompt"].rstrip("=").split("+")
        assert int(left) + int(right) == int(row["answer"])
        assert all(int(a) + int(b) < 10 for a, b in zip(left, right, strict=True))
    assert rows == mixed_rows(assets)


def test_tokens_count_filtered_groups() -> None:
    lines = [
        {"kind": "eval", "eval/heldout/mean": 0.3, "weights/version": 0},
        {"kind": "train", "step": 1, "ledger/trained": 2, "ledger/filtered": 0, "rollout/length_mean": 10.0},
        {"kind": "train", "step": 2, "ledger/trained": 4, "ledger/filtered": 3, "rollout/length_mean": 20.0},
        {"kind": "eval", "eval/heldout/mean": 0.7, "weights/version": 2},
        {"kind": "update"},
    ]
    assert points_of(lines, samples=4) == [Point(0, 0.0, 0.3), Point(2, 80.0 + 400.0, 0.7)]


def test_both_sides_are_valid_configurations() -> None:
    for further in SIDES.values():
        assert validate_config(quickstart(Assets(Path("x")), further)).data.curriculum.is_on == bool(further)
