"""The recipes of tools/learn: their tasks, demonstrations and labels. No test trains."""

import asyncio
import json
import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.asset_cache import Assets, launch_command
from tools.learn import guess_number, smollm2, tool_lookup
from tools.learn.__main__ import RECIPES
from tools.learn.guess_number import GUESSES, GuessNumber
from tools.learn.recipe import draw_rows, ensure_assets
from tools.learn.tool_lookup import NOT_THERE, Table

WARMED_UP = [recipe for recipe in RECIPES.values() if recipe.demonstrate]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
def test_held_out_data_is_in_no_training_row(recipe):
    heldout, train = draw_rows(recipe)
    assert (len(heldout), len(train)) == (recipe.settings.heldout, recipe.settings.train)
    rows = [repr(sorted(row.items())) for row in [*heldout, *train]]
    assert len(set(rows)) == len(rows)


def played(number, guesses):
    game = GuessNumber()
    assert game.reset(SimpleNamespace(row={"prompt": "10-41", "number": number})) == "10-41"
    return [asyncio.run(game.step({"role": "assistant", "content": guess})) for guess in guesses]


def test_the_game_answers_each_guess_and_rewards_the_number():
    assert played(20, ["30", "15", "20"]) == [("10-29", 0.0, False), ("16-29", 0.0, False), ("=", 1.0, True)]
    assert played(20, ["15", "12", "99"]) == [("16-41", 0.0, False)] * 3
    assert played(20, ["30"] * GUESSES)[-1] == ("10-29", 0.0, True)
    assert played(20, ["x"]) == [("?", 0.0, True)]


@given(st.integers(0, 1000))
def test_a_game_of_the_teacher_follows_the_rules(seed):
    source = random.Random(seed)
    (row,) = islice(guess_number.rows(source), 1)
    messages = guess_number.demonstrate(row, source)
    game = GuessNumber()
    assert messages[0]["content"] == game.reset(SimpleNamespace(row=row))
    guesses = [message for message in messages if message["role"] == "assistant"]
    answers = [message["content"] for message in messages[2:] if message["role"] == "user"]
    assert 1 <= len(guesses) <= GUESSES
    assert [asyncio.run(game.step(guess))[0] for guess in guesses][: len(answers)] == answers


def test_a_table_leads_from_key_to_key_to_value():
    source = random.Random(0)
    for row in islice(tool_lookup.rows(source), 50):
        table = Table(SimpleNamespace(row=row))
        second = asyncio.run(table.look_up(row["prompt"]))
        assert asyncio.run(table.look_up(second)) == row["answer"]
        assert asyncio.run(table.look_up("??")) == NOT_THERE


def test_only_the_assistants_text_is_learned():
    pytest.importorskip("torch")
    from tools.learn.chat_model import IGNORED, labelled, make_tokenizer

    tokenizer, source = make_tokenizer(), random.Random(3)
    for recipe in WARMED_UP:
        (row,) = islice(recipe.rows(source), 1)
        messages = recipe.demonstrate(row, source)
        ids, labels = labelled(tokenizer, messages, recipe)
        learned = tokenizer.decode([id for id, label in zip(ids, labels, strict=True) if label != IGNORED])
        said = [message for message in messages if message["role"] == "assistant"]
        assert learned.count("<|end|>") == len(said)
        assert learned.count("<tool_call>") == sum(len(message.get("tool_calls", ())) for message in said)
        assert all(message["content"] in learned for message in said)
        assert row["prompt"] not in learned.partition("<tool_call>")[0]


def test_the_launcher_gets_the_paths_and_the_extra_arguments(tmp_path):
    command = launch_command("guess-number", Assets(tmp_path), ["heldout"], ["--run.seed", "1"])
    assert command[-2:] == ["--run.seed", "1"]
    assert str(tmp_path / "model") in command


def test_a_pretrained_model_is_used_unchanged(tmp_path):
    (tmp_path / "model").mkdir()
    recipe = replace(smollm2.RECIPE, pretrained=lambda: tmp_path / "model")
    assets = ensure_assets(recipe, tmp_path / "cache")
    assert assets.model.samefile(tmp_path / "model")
    rows = [json.loads(line) for file in (assets.train, assets.heldout) for line in file.read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 81
    assert all(eval(row["prompt"].removeprefix("What is ").rstrip("?")) == int(row["answer"]) for row in rows)
