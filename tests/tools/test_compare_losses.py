"""The comparison of losses: which runs are made, which are kept, and the contents of its table."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config.load import validate_config
from tools import compare
from tools.asset_cache import Assets
from tools.compare import LOSSES, TAUGHT_BY, VARIANTS, Plan, Result, Variant, figures_of, markdown, plan_runs, run
from tools.live_run import RunEnded

LINES = [
    {"kind": "eval", "step": 0, "weights/version": 0, "eval/heldout/mean": 0.25, "eval/heldout_greedy/mean": 0.3},
    {"kind": "train", "step": 1, "weights/version": 1, "staleness/token_mean": 1.0, "policy/behaviour_kl": 0.5},
    {"kind": "train", "step": 2, "weights/version": 2, "staleness/token_mean": 2.0, "policy/behaviour_kl": 0.1},
    {"kind": "eval", "step": 2, "weights/version": 10, "eval/heldout/mean": 0.75, "eval/heldout_greedy/mean": 0.9},
    {"kind": "eval", "step": 2, "weights/version": 2, "eval/heldout/mean": 0.5, "eval/heldout_greedy/mean": 0.6},
]
FIGURES = {"before": 0.25, "after": 0.75, "greedy": 0.9, "staleness": 1.5, "behaviour_kl": 0.3}


def plan(folder, **tree):
    return Plan(Variant("decoupled", LOSSES), 1, folder / "decoupled", tree)


def test_each_variant_is_a_valid_configuration_of_its_own():
    plans = plan_runs(VARIANTS, [1, 2], Assets(Path("/assets")), Path("/runs"))
    assert len({plan.folder for plan in plans}) == len(plans) == 2 * len(VARIANTS)
    seen = set()
    for each in plans:
        config = validate_config(each.tree)
        assert (config.run.seed, config.learner.steps) == (each.seed, 25)
        learned = config.model_copy(
            update={"run": None, "learner": config.learner.model_copy(update={"teacher": None})}
        )
        seen.add((each.seed, learned.model_dump_json()))
        if each.variant.taught:
            teacher = next(p for p in plans if p.variant.name == TAUGHT_BY and p.seed == each.seed)
            assert config.learner.teacher == str(teacher.folder / "runs" / "live" / "export")
    assert len(seen) == len(plans)


def test_a_variant_with_a_teacher_runs_after_the_teacher():
    plans = plan_runs(VARIANTS, [1, 2], Assets(Path("/assets")), Path("/runs"))
    taught = [at for at, plan in enumerate(plans) if plan.variant.taught]
    teachers = [at for at, plan in enumerate(plans) if plan.variant.name == TAUGHT_BY]
    assert len(taught) == len(teachers) == 2 and max(teachers) < min(taught)


def test_the_first_and_the_last_version_are_compared():
    assert figures_of(LINES) == pytest.approx(FIGURES)


def test_a_finished_run_is_repeated_only_if_its_configuration_differs(tmp_path, monkeypatch):
    made = []

    def ended(tree, folder, timeout):
        folder.mkdir()
        made.append(tree)
        return SimpleNamespace(run_dir=folder)

    monkeypatch.setattr(compare, "run_to_end", ended)
    monkeypatch.setattr(compare, "read_metrics", lambda path: LINES)
    first = run(plan(tmp_path, learner={"steps": 1}))
    assert first == Result("decoupled", LOSSES, 1, "", **figures_of(LINES))
    assert run(plan(tmp_path, learner={"steps": 1})) == first and len(made) == 1
    assert run(plan(tmp_path, learner={"steps": 2})) == first and len(made) == 2


def test_a_failed_run_is_a_result_and_an_interrupted_one_is_repeated(tmp_path, monkeypatch):
    def ends(error):
        def ended(tree, folder, timeout):
            folder.mkdir()
            raise error

        monkeypatch.setattr(compare, "run_to_end", ended)

    ends(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        run(plan(tmp_path))
    ends(RunEnded("exit code 3: the last line"))
    assert run(plan(tmp_path)).failed == "exit code 3: the last line"
    ends(AssertionError("it is kept"))
    assert run(plan(tmp_path)).failed == "exit code 3: the last line"


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
