"""Runs and evaluations that a Python program starts, on simulated engines and learner."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from launcher.launched import Launched, command_line, end_marked, marked, next_output, sim_tree
from run_settings import SIMULATED, laid_over

import asyncrl
from asyncrl.api import runs as api
from asyncrl.api.functions import MODULE, Functions
from asyncrl.config.keys import default_words
from asyncrl.config.load import validate_config
from asyncrl.core.errors import UsageError
from asyncrl.rpc.linux import children_of
from asyncrl.workers.user_code import find_place
from tools.waiting import wait_until

ROWS = [{"prompt": f"{i}+1=", "bonus": i} for i in range(400)]


def tree(folder, **tables):
    """A simulated run whose rewards come from a function of the test."""
    found = sim_tree(folder, run={"samples_per_step": 2}, learner={"steps": 6})
    del found["reward"]["options"], found["data"]
    return laid_over(found, tables)


def scale_by(factor):
    return lambda *, completion, row: factor * len(completion) + row["bonus"]


def of_this_module(*, completion, row):
    return float(len(completion))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a closure and rows, at its end."""
    folder = tmp_path_factory.mktemp("script")
    run = asyncrl.train(tree(folder), reward=scale_by(0.5), data=ROWS, progress=False)
    assert run.status == "running" and run.folder == folder / "runs" / "trial"
    assert run.wait() == "done"
    return run


def test_a_closure_scores_the_given_rows(run):
    metrics = run.metrics
    assert list(metrics.index) == [1, 2, 3, 4, 5, 6] and metrics["reward/mean"].notna().all()
    [newest, *_] = run.samples()
    assert newest["step"] == 6 and {group["step"] for group in run.samples(2)} == {2}
    number = int(newest["prompt"].partition("+")[0])
    for each in newest["trajectories"]:
        assert each["reward"] == pytest.approx(number + 0.5 * len(each["text"]))
    assert repr(run) == f"<Run {run.folder}: done>"
    assert len(list((run.folder / "inputs").iterdir())) == 2


def test_a_finished_run_is_continued_with_more_steps(run):
    assert run.resume({"learner.steps": 8}) is run and run.wait() == "done"
    assert run.metrics.index[-1] == 8
    assert (run.folder / "logs" / "attempt_2").is_dir()
    # With nothing left to do, no attempt begins.
    assert run.resume({"checkpoint.export_at_end": False}) is run and run.wait() == "done"
    assert not (run.folder / "logs" / "attempt_3").exists()


def test_an_ended_run_is_read_without_starting_anything(run, tmp_path):
    opened = asyncrl.open_run(run.folder)
    assert opened.folder == run.folder and opened.metrics.equals(run.metrics)
    assert opened.samples(2) == run.samples(2) != []
    for name in ("a", "b"):
        (tmp_path / "samples").mkdir(exist_ok=True)
        shutil.copy(run.folder / "samples" / "step_000002.jsonl", tmp_path / "samples" / f"eval_{name}_000002.jsonl")
    assert api.RunRecords(tmp_path).samples(kind="evaluation") == 2 * run.samples(2)
    with pytest.raises(UsageError, match="may be trained, filtered, evaluation"):
        opened.samples(kind="eval")
    with pytest.raises(UsageError, match="no such folder"):
        asyncrl.open_run("nowhere")


def test_an_empty_list_of_rows_is_refused(tmp_path):
    with pytest.raises(UsageError, match="data: the list of rows is empty"):
        asyncrl.train(tree(tmp_path), reward=of_this_module, data=[], progress=False)
    assert not (tmp_path / "runs").exists()


def test_a_stopped_run_is_resumed_by_name_of_its_folder(tmp_path):
    config = validate_config(tree(tmp_path, learner={"steps": 1000}, data={"source": "synthetic", "size": 400}))
    first = asyncrl.train(config, reward=of_this_module, overrides={"run.name": "long"}, progress=False)
    wait_until(lambda: (first.folder / "metrics.jsonl").exists() and len(first.metrics) > 2, "some steps")
    with pytest.raises(TimeoutError, match="has not ended after 0 s"):
        first.wait(0)
    with pytest.raises(UsageError, match="is live; stop it first"):
        first.resume()
    assert first.stop() == "preempted" and first.wait() == "preempted"
    trained = len(first.metrics)
    assert json.loads((first.folder / "config.json").read_text())["reward"]["function"] == "test_runs:of_this_module"
    again = asyncrl.train(config, reward=of_this_module, resume=first.folder, progress=False)
    assert again.folder == first.folder
    # The node agent learns a moment after the first step that the run has begun; before that, it would stop it at once.
    wait_until(lambda: len(again.metrics) > trained + 5, "more steps")
    assert again.stop() == "preempted"


def test_an_error_of_a_function_names_its_file_and_line(tmp_path):
    def broken(*, completion, row):
        return row["missing"]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(asyncrl.RunFailed) as failed:
        asyncrl.train(tree(tmp_path), reward=broken, data=ROWS, progress=False)
    assert f"raised KeyError: 'missing' ({__file__}:{line})" in str(failed.value)
    with pytest.raises(asyncrl.RunFailed, match=rf"returned None; .*{__file__}:\d+"):
        asyncrl.train(tree(tmp_path), reward=lambda *, completion: None, data=ROWS, progress=False)
    assert not list(tmp_path.glob("runs/*"))


def test_tools_beside_an_episode_of_ones_own_are_refused(tmp_path):
    with pytest.raises(UsageError, match="give one of the two"):
        asyncrl.train(tree(tmp_path), tools=[print], episode=lambda task, client: 1.0, progress=False)


def test_a_wrong_configuration_is_one_exception_with_the_text_of_the_terminal(tmp_path):
    wrong = tree(tmp_path, learner={"stepz": 3}, data={"source": "synthetic"}, rollout={"replicas": 0})
    with pytest.raises(asyncrl.RunFailed) as failed:
        asyncrl.train(wrong, progress=False)
    assert failed.value.exit_code == 78 and "stepz" in str(failed.value)
    (tmp_path / "wrong.toml").write_text("".join(f"{key} = {default_words(table)}\n" for key, table in wrong.items()))
    argv = [sys.executable, "-m", "asyncrl.cli.launch", str(tmp_path / "wrong.toml")]
    shown = subprocess.run(argv, capture_output=True, text=True, check=False).stderr
    assert shown.replace(f" ({tmp_path}/wrong.toml)", "").replace("asyncrl-launch: ", "") == (
        str(failed.value).replace(" (set in Python)", "") + "\n"
    )
    with pytest.raises(asyncrl.RunFailed, match=r"nowhere.toml: cannot be read"):
        asyncrl.train(tmp_path / "nowhere.toml", progress=False)
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_needs_no_training_prompts(tmp_path):
    given = tree(tmp_path, eval={"other": {"data": {"source": "synthetic"}}})
    reward = lambda *, completion, row: float(row["bonus"] >= 2)  # noqa: E731
    found = asyncrl.evaluate(None, ROWS[:8], reward, config=given, n=2, progress=False)
    assert isinstance(found, asyncrl.Evaluation) and found.run == str(tmp_path / "runs" / "trial-eval")
    [(name, result)] = found.sets.items()
    assert (name, result.prompts, result.samples) == ("data", 8, 2)
    assert {value.value for value in result.values.values()} == {0.75}


SCRIPT = """
    import sys
    import asyncrl

    rows = [{"prompt": f"{i}=", "bonus": i} for i in range(400)]
    weight = float(sys.argv[2])

    def bonus(row):
        return weight * row["bonus"]

    def reward(*, completion, row):
        return len(completion) + bonus(row)

    run = asyncrl.train(sys.argv[1], reward=reward, data=rows)
    print("started", run.folder, flush=True)
    print("ended", run.wait(), flush=True)
"""


class Script(Launched):
    """A script that trains, in a process of its own."""

    def __init__(self, folder, steps):
        self.folder, self.run_dir, self.out = folder, folder / "runs" / "trial", next_output(folder)
        config = tree(folder, learner={"steps": steps})
        (folder / "sim.toml").write_text("".join(f"{key} = {default_words(table)}\n" for key, table in config.items()))
        (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
        with self.out.open("w") as out:
            argv = [sys.executable, str(folder / "script.py"), str(folder / "sim.toml"), "2.0"]
            self.process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT)

    def below(self):
        pids = [self.process.pid]
        for pid in pids:
            pids += children_of(pid)
        return pids[1:]

    def close(self):
        self.process.kill()
        self.process.wait()
        end_marked(self.folder)


@pytest.fixture
def script(tmp_path):
    found = Script(tmp_path, steps=200)
    yield found
    found.close()


def test_a_killed_program_leaves_a_checkpoint_and_no_process(script):
    script.wait_to_show("step 3/200")
    pids = script.below()
    assert len(pids) > 5
    script.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(command_line(pid) for pid in pids) and not marked(script.folder), "the end of all")
    assert list((script.run_dir / "checkpoints").glob("v*/COMPLETE"))
    assert not list(script.run_dir.glob("private*"))


def test_an_interrupted_program_ends_its_run_in_order(script):
    script.wait_to_show("step 1/200")
    script.process.send_signal(signal.SIGINT)
    code, shown = script.end()
    assert code == -signal.SIGINT and "KeyboardInterrupt" in shown
    assert any(line.startswith("preempted by") for line in shown), shown
    assert not marked(script.folder)


def test_functions_and_rows_become_keys_of_the_configuration(monkeypatch):
    monkeypatch.setattr(api, "Run", lambda order, functions, progress: order)
    given = {"tools": [of_this_module, "mine:Tools"], "overrides": {"learner.steps": 3, "rollout.stop": ["\n"]}}
    order = asyncrl.train("mine.toml", data=[{"prompt": "a", "n": np.int64(3), "v": np.ones(2)}], **given)
    tools = {"episode": {"tools": ["test_runs:of_this_module", "mine:Tools"]}}
    assert order["layers"] == ["mine.toml", tools, {"data": {"source": "auto"}}]
    assert order["overrides"] == {"learner.steps": "3", "rollout.stop": '["\\n"]'}
    assert order["rows"] == {"data": '{"prompt": "a", "n": 3, "v": [1.0, 1.0]}\n'}
    for given, key in ((of_this_module, "function"), (Launched, "env")):
        assert [*asyncrl.train({}, episode=given, data="mine.jsonl")["layers"][1]["episode"]] == [key]
    config = validate_config({"run": {"name": "whole"}, "data": {"source": "synthetic"}, **SIMULATED})
    assert asyncrl.train(config)["layers"][0]["run"]["name"] == "whole"
    with pytest.raises(TypeError, match="a row holds .* of type object, which is not JSON"):
        asyncrl.train({}, data=[{"prompt": object()}])


def test_functions_of_modules_keep_their_names_and_others_are_pickled_with_their_places(tmp_path, monkeypatch):
    functions = Functions()
    assert functions.spec("rewards:exact") == "rewards:exact"
    assert functions.spec(of_this_module) == "test_runs:of_this_module" and functions.text() == ""
    first, second = scale_by(1.0), scale_by(2.0)
    names = [functions.spec(each) for each in (first, second, first)]
    assert names == [f"{MODULE}:function", f"{MODULE}:function_", f"{MODULE}:function"]
    (tmp_path / f"{MODULE}.py").write_text(functions.text())
    monkeypatch.syspath_prepend(tmp_path)
    assert find_place(names[1]) == f"{__file__}:{scale_by.__code__.co_firstlineno + 1}"
    made = __import__(MODULE)
    monkeypatch.delitem(sys.modules, MODULE)
    assert made.function_(completion="abc", row={"bonus": 1}) == 7.0
    assert made.function.__code__.co_filename == __file__
    assert Functions(functions).text() == functions.text()


def test_a_function_that_cannot_be_passed_on_is_refused():
    lock = threading.Lock()

    def locked(*, completion):
        with lock:
            return 0.0

    functions = Functions()
    functions.spec(locked)
    with pytest.raises(UsageError, match=r"locked: uses an object that cannot be passed .*lock"):
        functions.text()


def test_the_package_and_its_names_import_quickly():
    code = """
        import sys, asyncrl
        heavy = {"torch", "numpy", "pydantic", "zmq", "msgspec"}
        assert not heavy & set(sys.modules)
        asyncrl.train, asyncrl.Run
        assert not {"torch", "vllm", "transformers", "pandas", "IPython"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=os.environ | {"PYTHONPATH": ""})
