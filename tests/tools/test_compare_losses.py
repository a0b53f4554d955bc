"""The comparison of losses: which runs are made, which are kept, and the contents of its table."""

import sys
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.core.errors import PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE
from tools.asset_cache import Assets
from tools.compare import LOSSES, RESULT, TAUGHT_BY, VARIANTS, Plan, Result, Variant, markdown, plan_runs, run

RUN = """
import json, pathlib, sys
here = pathlib.Path(sys.argv[1])
count = here.parent / "count"
count.write_text(str(int(count.read_text() or 0) + 1) if count.exists() else "1")
(here / "run").mkdir()
lines = [
    {"kind": "eval", "step": 0, "weights/version": 0, "eval/heldout/mean": 0.25, "eval/heldout_greedy/mean": 0.3},
    {"kind": "train", "step": 1, "staleness/token_mean": 9.0, "policy/behaviour_kl": 9.0},
    {"kind": "train", "step": 1, "staleness/token_mean": 1.0, "policy/behaviour_kl": 0.5},
    {"kind": "train", "step": 2, "staleness/token_mean": 2.0, "policy/behaviour_kl": 0.1},
    {"kind": "eval", "step": 2, "weights/version": 10, "eval/heldout/mean": 0.75, "eval/heldout_greedy/mean": 0.9},
    {"kind": "eval", "step": 2, "weights/version": 2, "eval/heldout/mean": 0.5, "eval/heldout_greedy/mean": 0.6},
]
(here / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
print("the last line")
sys.exit(int(sys.argv[2]))
"""


def plan(folder, code=0, name="decoupled"):
    here = folder / name
    return Plan(Variant(name, LOSSES), 1, here, [sys.executable, "-c", RUN, str(here), str(code)])


def test_each_variant_is_a_valid_configuration_of_its_own():
    plans = plan_runs(VARIANTS, [1, 2], Assets(Path("/assets")), Path("/runs"), ["--learner.steps", "7"])
    assert len({plan.folder for plan in plans}) == len(plans) == 2 * len(VARIANTS)
    seen = set()
    for each in plans:
        flags = [word for word in each.command if word not in ("-m", "asyncrl.cli.launch")][1:]
        config = load_config(
            [flags[0]], {k.removeprefix("--"): v for k, v in zip(flags[1::2], flags[2::2], strict=True)}
        )
        assert (config.run.seed, config.learner.steps) == (each.seed, 7)
        learned = config.model_copy(
            update={"run": None, "learner": config.learner.model_copy(update={"teacher": None})}
        )
        seen.add((each.seed, learned.model_dump_json()))
        if each.variant.taught:
            teacher = next(p for p in plans if p.variant.name == TAUGHT_BY and p.seed == each.seed)
            assert config.learner.teacher == str(teacher.folder / "run" / "export")
    assert len(seen) == len(plans)


def test_a_variant_with_a_teacher_runs_after_the_teacher():
    variants = [Variant("taught", LOSSES, taught=True), Variant("decoupled", LOSSES)]
    plans = plan_runs(variants, [1, 2], Assets(Path("/assets")), Path("/runs"), [])
    assert [plan.variant.name for plan in plans] == ["decoupled", "decoupled", "taught", "taught"]


def test_a_finished_run_is_repeated_only_if_its_command_differs(tmp_path):
    first = run(plan(tmp_path))
    expected = Result("decoupled", LOSSES, 1, "", before=0.25, after=0.75, greedy=0.9, staleness=1.5, behaviour_kl=0.3)
    assert first == expected
    assert run(plan(tmp_path)) == expected
    assert (tmp_path / "count").read_text() == "1"
    changed = plan(tmp_path)
    changed.command.append("--learner.lr")
    assert run(changed) == expected
    assert (tmp_path / "count").read_text() == "2"


@pytest.mark.parametrize("code", [3, PREEMPTED_EXIT_CODE, STOPPED_EXIT_CODE])
def test_a_failed_run_is_shown_with_its_last_lines_and_an_interrupted_one_is_repeated(tmp_path, code):
    found = run(plan(tmp_path, code))
    assert found.failed == f"exit code {code}\nthe last line"
    assert (tmp_path / "decoupled" / RESULT).exists() == (code == 3)


def test_the_table_shows_each_seed_and_names_the_failed_runs():
    results = [
        Result("decoupled", LOSSES, 1, "", before=0.2, after=0.8, greedy=0.9, staleness=1.0, behaviour_kl=0.01),
        Result("decoupled", LOSSES, 2, "", before=0.3, after=0.6, greedy=0.7, staleness=2.0, behaviour_kl=0.03),
        Result("decoupled", LOSSES, 3, "exit code 1"),
        Result("gspo", LOSSES, 1, "exit code 1"),
    ]
    table = markdown(results)
    assert "Held-out reward before: 0.250." in table
    assert "| decoupled | 0.700 | 0.800, 0.600, failed | 0.800 | 1.50 | 0.0200 |" in table
    assert "| gspo | failed | 1 of 1 | | | |" in table
