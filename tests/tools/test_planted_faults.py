"""The planted faults: their table matches the code, and the tool reports correctly which tests catch them."""

import pytest

from tools.planted_faults.__main__ import ROOT, find, main, nearest_tests
from tools.planted_faults.faults import FAULTS, Fault

LIMIT = "def limit(value):\n    return min(value, 3)\n"
HIGHER = Fault("higher", "min(value, 3)", "min(value, 4)", "the limit is 3")
LOWER = Fault("lower", "min(value, 3)", "min(value, 3, 2 ** 70)", "nothing that a test could see")
SEEN = "from asyncrl.limit import limit\n\n\ndef test_limit():\n    assert limit(5) == 3\n"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "asyncrl").mkdir()
    # Without it, a package of this name later on the path would be used instead.
    (tmp_path / "asyncrl" / "__init__.py").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "asyncrl" / "limit.py").write_text(LIMIT)
    return tmp_path


def test_each_of_forty_faults_matches_one_place_and_every_invariant_is_broken():
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 40
    assert all(find(fault, ROOT).is_relative_to(ROOT / "asyncrl") for fault in FAULTS)
    assert all(fault.right != fault.wrong for fault in FAULTS)
    assert {f"I{number}" for number in range(1, 9)} <= {fault.breaks.partition(":")[0] for fault in FAULTS}


@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        (Fault("gone", "max(value, 3)", "max(value, 4)", ""), "does: nowhere"),
        (Fault("twice", "value", "other", ""), "limit.py, asyncrl/limit.py"),
        (Fault("broken", "min(value, 3)", "min(value, 3", ""), "would not compile"),
    ],
)
def test_a_fault_that_matches_no_place_is_refused(tree, fault, reported):
    with pytest.raises(ValueError, match=rf"{fault.name}: .*{reported}"):
        find(fault, tree)


def test_tests_that_import_the_module_run_first(tree):
    texts = {
        "asyncrl/gate.py": "from asyncrl.limit import limit\n",
        "asyncrl/run.py": "from asyncrl import gate\n",
        "tests/test_early.py": SEEN,
        "tests/test_limit.py": SEEN,
        "tests/helper.py": "import asyncrl.gate\n",
        "tests/dataloader/test_gate.py": "from helper import gate\n",
        "tests/test_run.py": "import asyncrl.run\n",
    }
    (tree / "tests" / "dataloader").mkdir()
    for place, text in texts.items():
        (tree / place).write_text(text)
    near = nearest_tests(tree / "asyncrl" / "limit.py", tree)
    assert list(near) == [["tests/test_limit.py"], ["tests/test_early.py"], ["tests/dataloader/test_gate.py"]]


def test_a_fault_is_caught_by_a_test_that_fails_only_with_it(tree, capsys, monkeypatch):
    monkeypatch.setattr("tools.planted_faults.__main__.WORKERS", ())
    # They take four times as long to start as a runner of one test.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tree / "tests" / "test_limit.py").write_text(SEEN)
    (tree / "tests" / "test_always.py").write_text("def test_always():\n    assert False\n")
    assert main([], faults=[HIGHER, LOWER], root=tree) == 1
    higher, lower, sum_of_both = capsys.readouterr().out.splitlines()
    assert " caught " in higher and higher.endswith("tests/test_limit.py::test_limit")
    assert " NOT caught " in lower and lower.endswith("breaks nothing that a test could see")
    assert sum_of_both == "1 of 2 faults are caught"
    assert main(["--only", "higher", "--tests", "tests/test_always.py"], faults=[HIGHER, LOWER], root=tree) == 1
    assert "test_always fails without it, too" in capsys.readouterr().out
    assert (tree / "asyncrl" / "limit.py").read_text() == LIMIT
