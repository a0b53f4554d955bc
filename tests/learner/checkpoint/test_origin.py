"""The configuration and the files that the groups of a checkpoint were made with, and when they are given back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import msgspec
import pytest
from learner.learner_cases import make_state
from model_files import write_model
from run_settings import simulated_run

from asyncrl.checkpoint import DIGESTS
from asyncrl.checkpoint.contents import read_state, write_contents
from asyncrl.checkpoint.origin import Origin, digests, record
from asyncrl.core.files import find_source


def read_back(origin: Origin) -> Origin:
    return msgspec.json.decode(msgspec.json.encode(origin), type=Origin)


def test_the_origin_is_kept_in_the_checkpoint(tmp_path) -> None:
    config = simulated_run(rollout={"temperature": 0.5})
    write_contents(tmp_path, make_state(origin=Origin.of(config)), [], [])
    found = read_state(tmp_path).origin
    assert found == Origin.of(config)
    same = found.compare(config)
    assert (same.changes, same.gives_back, same.describe(3)) == ([], "", [])


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"reward": {"function": "constant"}, "learner": {"signal": "x"}}, "reward.function, learner.signal"),
        ({"learner": {"lr": 1.0, "kl": {"coefficient": 0.1}}, "staleness": {"max": 3}}, ""),
        ({"data": {"size": 4}, "run": {"seed": 2}, "learner": {"groups_per_step": 3}}, ""),
    ],
)
def test_only_changed_keys_that_affect_groups_return_them(sections, reason) -> None:
    found = read_back(Origin.of(simulated_run())).compare(simulated_run(**sections))
    assert found.gives_back == reason
    *lines, last = found.describe(12)
    assert len(found.changes) == len(lines) + (not reason) and lines[0].startswith("changed: ")
    back = f"12 groups of the checkpoint are given back and generated again: {reason}"
    assert (last == back) == bool(reason)
    # Without groups nothing is given back.
    assert not any("given back" in line for line in found.describe(0))


def test_code_is_compared_by_its_file_and_never_imported(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit")
    code = package / "rewards.py"
    code.write_text("def score(): return 1.0")
    config = simulated_run(reward={"function": "mine.rewards:score"}, learner={"loss": "mine.losses:loss"})
    before = read_back(Origin.of(config))
    assert before.files.keys() == {"reward.function"}
    assert before.compare(config).changes == []
    code.write_text("def score(): return 2.0")
    (change,) = before.compare(config).changes
    assert change.describe() == (
        f"reward.function names files whose contents differ ({code}); the change applies to groups that are generated "
        "from now on"
    )
    # Another function in another file is one change, and not two.
    (package / "others.py").write_text("def score(): return 2.0")
    (change,) = before.compare(
        simulated_run(reward={"function": "mine.others:score"}, learner={"loss": "mine.losses:loss"})
    ).changes
    assert 'is "mine.others:score"' in change.difference
    # A file that is not found here says nothing.
    code.unlink()
    assert before.compare(config).changes == []
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("files", "module"),
    [
        (["first/m.py", "first/m/__init__.py"], "m"),
        (["first/p/readme", "second/p/m.py"], "p.m"),
        (["first/p/m.py", "second/p/__init__.py", "second/p/m.py"], "p.m"),
        (["first/p.py", "second/p/__init__.py", "second/p/m.py"], "p.m"),
        (["first/p/q/r/m.py", "second/p/q/__init__.py"], "p.q.r.m"),
        (["first/p/q/r/m.py"], "p.q.r.m"),
        (["first/p/q/r/m.py"], "p.q.r"),
        (["first/m/readme"], "m"),
        (["first/m.py"], "no_such"),
        (["first/m.py"], ".m"),
        (["first/m.py"], "no\0such"),
    ],
)
def test_the_file_of_a_module_is_found_as_an_import_finds_it(tmp_path, monkeypatch, files, module) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), *map(str, places)])
    found = find_source(module)
    before = set(sys.modules)
    importlib.invalidate_caches()
    try:
        file = importlib.import_module(module).__file__
    except (ImportError, TypeError):
        file = None
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert found == (Path(file) if file else None)


def test_a_file_edited_during_a_run_is_compared_as_it_was_at_the_start(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, run_dir = tmp_path / "mine.py", tmp_path / "run"
    run_dir.mkdir()
    code.write_text("def score(): return 1.0")
    config = simulated_run(reward={"function": "mine:score"})
    record(run_dir, digests(config))
    first = Origin.recorded(config, run_dir)
    assert first == Origin.of(config)
    code.write_text("def score(): return 2.0")
    # A learner that starts again, and then the next attempt of the run.
    assert Origin.recorded(config, run_dir) == first
    record(run_dir, digests(config))
    assert first.compare(config, Origin.recorded(config, run_dir)).gives_back == "reward.function"


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"reward.function": 3}', b"\xff"])
def test_code_is_read_from_its_files_if_the_run_has_no_digests(tmp_path, monkeypatch, content) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def score(): return 1.0")
    if content is not None:
        (tmp_path / DIGESTS).write_bytes(content)
    config = simulated_run(reward={"function": "mine:score"})
    assert Origin.recorded(config, tmp_path) == Origin.of(config)


def test_the_description_says_that_groups_of_changed_data_are_not_trained() -> None:
    allowed = simulated_run(rollout={"temperature": 0.5}, resume={"allow": ["data"]})
    last = Origin.of(simulated_run()).compare(allowed).describe(12)[-1]
    assert last == (
        "12 groups of the checkpoint are not trained: rollout.temperature; their prompts are generated again only if "
        "the prompts of the run have not changed (--allow-changed-data)"
    )


def test_a_renamed_model_folder_with_the_same_files_returns_no_groups(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = write_model(Path("model"))
    before = read_back(Origin.of(simulated_run(model={"path": str(model)})))
    moved = model.rename("moved")
    found = before.compare(simulated_run(model={"path": str(moved)}))
    assert found.gives_back == ""
    (line,) = found.describe(3)
    reported = f'changed: model.path was "{model}", is "{moved}"'
    assert line == f"{reported}, with the same tokenizer, chat template and configuration; the change applies at once"
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    assert before.compare(simulated_run(model={"path": str(moved)})).gives_back == "model.path"
    # A folder that is not there cannot be compared.
    assert before.compare(simulated_run(model={"path": str(model)})).gives_back == ""
    assert before.compare(simulated_run(model={"path": "missing"})).gives_back == "model.path"


def test_a_changed_chat_template_in_the_model_folder_is_detected(tmp_path) -> None:
    model = write_model(tmp_path / "model")
    config = simulated_run(model={"path": str(model)})
    before = Origin.of(config)
    (model / "README.md").write_text("of no account")
    assert before.compare(config).gives_back == ""
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert before.compare(config).gives_back == "model.path"
    assert str(model) in before.compare(config).describe(0)[0]
