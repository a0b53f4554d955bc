"""The quickstart's problems, tokenizer, warm-up and cache. No test trains for more than a few steps."""

import dataclasses
import json
import math
import random
import re
import signal
import subprocess
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import load_config
from asyncrl.reward.functions import BUILT_IN
from tools.asset_cache import Assets, launch_command
from tools.quickstart import settings as settings_module
from tools.quickstart.assets import EVALS, draw_splits, ensure_assets
from tools.quickstart.settings import LOGNORMAL, Settings, content_hash
from tools.quickstart.task import CHARACTERS, Problem, draw_dots, is_right, write_out

ROOT = Path(__file__).parent.parent
SMALL = Settings(heldout=20, train=50, probes=4, layers=1, width=32, heads=1, intermediate=32, batch=4, check_every=1)

numbers = st.integers(1, 99_999)


def steps_of(solution):
    """[(left digit, right digit, carry, total)] and the answer."""
    *columns, answer = solution.split(";")
    return [tuple(map(int, re.fullmatch(r"(\d)\+(\d)\+(\d)=(\d\d)", c).groups())) for c in columns], answer


@given(numbers, numbers)
def test_a_teacher_without_errors_is_right_and_one_with_all_errors_never_carries(left, right):
    problem = Problem(left, right)
    steps, answer = steps_of(write_out(problem, random.Random(0), forget=0.0))
    assert answer == problem.answer == str(left + right)
    assert all(a + b + carry == total for a, b, carry, total in steps)
    assert [carry for _, _, carry, _ in steps] == [0, *(total // 10 for *_, total in steps[:-1])]
    steps, answer = steps_of(write_out(problem, random.Random(0), forget=1.0))
    assert all(carry == 0 and a + b == total for a, b, carry, total in steps)
    assert answer == "".join(str(total % 10) for *_, total in reversed(steps))


def test_splits_share_no_sum_in_any_order_and_responses_are_long_enough_for_updates():
    splits = draw_splits(Settings())
    demonstrated = list(islice(splits.demonstrated, 10_000))
    sums = [frozenset((p.left, p.right)) for p in (*splits.heldout, *splits.train, *demonstrated)]
    assert len(sums) == len(set(sums)) == 512 + 8192 + 10_000
    lengths = [len(write_out(problem, random.Random(0), 0.0)) for problem in splits.heldout]
    assert min(lengths) >= 30 and median(lengths) >= 40 and max(lengths) < 64


def test_dots_are_lognormal_and_within_the_context_of_the_model():
    source = random.Random(0)
    dots = [draw_dots(source, LOGNORMAL.dots, LOGNORMAL.dots_sigma, LOGNORMAL.most_dots) for _ in range(20_000)]
    counts = sorted(map(len, dots))
    assert set("".join(dots)) == {"."}
    assert median(counts) == LOGNORMAL.dots == 24
    # One sigma to either side: a sixth of them lies below, and a sixth above.
    assert counts[len(counts) * 16 // 100] == pytest.approx(24 / math.e, abs=1)
    assert counts[len(counts) * 84 // 100] == pytest.approx(24 * math.e, rel=0.05)
    assert counts[-1] == LOGNORMAL.most_dots
    solutions = [
        len(problem.prompt) + len(write_out(problem, source, 0.0)) for problem in draw_splits(LOGNORMAL).heldout
    ]
    assert max(solutions) + LOGNORMAL.most_dots + 1 <= LOGNORMAL.positions


@cache
def configured_reward():
    paths = {f"{key}.path": "x" for key in ("model", "data", "eval.heldout.data", "eval.heldout_greedy.data")}
    config = load_config([ROOT / "configs" / "quickstart.toml"], paths).reward
    return BUILT_IN[config.function](**config.options)


@given(numbers, numbers, st.integers(0, 9))
def test_dots_change_neither_the_check_of_the_task_nor_the_configured_reward(left, right, dots):
    reward = configured_reward()
    problem = Problem(left, right)
    row, solution = {"prompt": problem.prompt, "answer": problem.answer}, write_out(problem, random.Random(0), 0.0)
    for response, right_ in ((solution, True), (solution[:-1], False), ("", False)):
        assert is_right(response + "." * dots, problem) == right_
        assert reward(completion=response, row=row) == right_
    assert not is_right(solution + "." * dots + "1", problem)
    assert reward(completion=solution + ";", row=row) == 0


def test_the_hash_changes_with_settings_and_code(monkeypatch, tmp_path):
    known = content_hash(Settings())
    assert known == content_hash(Settings())
    assert re.fullmatch(r"[0-9a-f]{16}", known)
    for field in dataclasses.fields(Settings):
        value = getattr(Settings(), field.name)
        changed = (value[0], value[1] + 1) if isinstance(value, tuple) else value + 1
        assert content_hash(dataclasses.replace(Settings(), **{field.name: changed})) != known, field.name
    (tmp_path / "settings.py").write_text("other code")
    monkeypatch.setattr(settings_module, "__file__", str(tmp_path / "settings.py"))
    assert content_hash(Settings()) != known


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    """Real assets, of a model that is too small to learn."""
    return ensure_assets(dataclasses.replace(SMALL, signal=0.0, max_steps=2), tmp_path_factory.mktemp("cache"))


def test_the_assets_suit_the_engines(assets):
    from safetensors import safe_open
    from transformers import AutoTokenizer

    from asyncrl.text.tokenizer import load_tokenizer
    from tools.quickstart.model import make_model

    text = "347+85=7+5+0=12;4+8+1=13;3+0+1=04;432"
    theirs, ours = AutoTokenizer.from_pretrained(str(assets.model)), load_tokenizer(str(assets.model))
    ids = ours.encode(text)
    assert len(ids) == len(text)
    assert theirs(text).input_ids == ids == ours.encode_prompt(text)
    assert ours.eos_ids == {theirs.eos_token_id} == {0} and 0 not in ours.encode(CHARACTERS)
    assert ours.decode([*ids, 0]) == theirs.decode([*ids, 0], skip_special_tokens=True) == text
    config = json.loads((assets.model / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (len(CHARACTERS) + 1, False)
    with safe_open(str(assets.model / "model.safetensors"), "pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118 - a safetensors file is no mapping
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.float32"}  # noqa: SIM118
    assert json.loads((assets.model / "generation_config.json").read_text())["eos_token_id"] == 0
    assert make_model(Settings()).num_parameters() == 865_216
    for path, count in ((assets.train, 50), (assets.heldout, 20)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == count
        for row in rows:
            assert sum(map(int, row["prompt"].removesuffix("=").split("+"))) == int(row["answer"])


def test_a_warm_up_without_a_signal_fails_and_leaves_nothing(tmp_path):
    settings = dataclasses.replace(SMALL, signal=1.0, max_steps=2)
    with pytest.raises(RuntimeError, match="after 2 steps"):
        ensure_assets(settings, tmp_path)
    assert not (tmp_path / content_hash(settings)).exists()


def test_warm_up_learns(capsys):
    from tools.quickstart.model import make_model, make_tokenizer, warm_up

    settings = dataclasses.replace(SMALL, batch=16, rise=1, check_every=30, check_below=9.0, max_steps=30, signal=0.0)
    splits = draw_splits(settings)
    warm_up(make_model(settings), make_tokenizer(), settings, splits.demonstrated, splits.train[:4])
    loss = float(re.search(r"loss ([\d.]+)", capsys.readouterr().out)[1])
    assert loss < 2.2  # ln 14 = 2.64 for a uniform guess


def test_assets_are_built_once(tmp_path):
    made = []
    make = lambda settings, folder: made.append(settings)  # noqa: E731
    assert ensure_assets(SMALL, tmp_path, make) == ensure_assets(SMALL, tmp_path, make)
    assert made == [SMALL]
    ensure_assets(dataclasses.replace(SMALL, seed=7), tmp_path, make)
    assert len(made) == 2


def test_a_killed_build_leaves_no_assets(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tools.quickstart.assets import ensure_assets\n"
        "from tools.quickstart.settings import Settings\n"
        "def make(settings, folder):\n"
        "    (folder / 'half').touch()\n"
        "    print('making', flush=True)\n"
        "    time.sleep(60)\n"
        "ensure_assets(Settings(), Path(sys.argv[1]), make)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as maker:
        assert maker.stdout.readline() == b"making\n"
        maker.send_signal(signal.SIGKILL)
    assert not (tmp_path / content_hash(Settings())).exists()
    assert len(list(tmp_path.glob("part-*"))) == 1

    assets = ensure_assets(Settings(), tmp_path, lambda settings, folder: (folder / "whole").touch())
    assert [file.name for file in assets.folder.iterdir()] == ["whole"]
    assert not list(tmp_path.glob("part-*"))


def test_the_launcher_gets_the_paths_and_the_extra_arguments():
    command = launch_command("quickstart", Assets(Path("/cache/abc")), EVALS, ["--learner.lr", "0"])
    assert command[1:4] == ["-m", "asyncrl.cli.launch", str(ROOT / "configs" / "quickstart.toml")]
    flags = dict(zip(command[4::2], command[5::2], strict=True))
    assert flags == {
        "--model.path": "/cache/abc/model",
        "--data.path": "/cache/abc/train.jsonl",
        "--eval.heldout.data.path": "/cache/abc/heldout.jsonl",
        "--eval.heldout_greedy.data.path": "/cache/abc/heldout.jsonl",
        "--learner.lr": "0",
    }
