"""Ends of responses: ids, special tokens by their text, and strings, on tokenizers like those of model folders."""

import asyncio
import json

import pytest
from inprocess import System
from run_files import groups
from run_settings import sim_config
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from asyncrl.config.rollout import RolloutConfig
from asyncrl.text.stops import Stops, resolve_stops
from asyncrl.text.tokenizer import load_tokenizer

END, TURN, CALL, VOCABULARY = 60, 61, 62, 130
"""<|endoftext|>, <|im_end|> and <call>: added tokens, the last not special; the vocabulary is padded beyond them."""


def write_tokenizer(folder, words, added):
    backend = Tokenizer(WordLevel({"?": 0, **{f"w{n}": n for n in words}} | dict(added), unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.add_tokens([AddedToken(text, special=text != "<call>") for text, _ in added])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture
def folder(tmp_path):
    """The tokenizer of a base model."""
    model = {"model_type": "qwen2", "eos_token_id": END, "vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return write_tokenizer(tmp_path, range(1, 60), [("<|endoftext|>", END), ("<|im_end|>", TURN), ("<call>", CALL)])


@pytest.mark.parametrize(
    ("stop", "ids", "expected"),
    [
        ([], [], Stops()),
        (["\n\n", "<|im_end|>"], [5], Stops((5, TURN), ("\n\n",))),
        (["<|im_end|>", "<|endoftext|>"], [TURN, VOCABULARY - 1], Stops((END, TURN, VOCABULARY - 1))),
        # In the text both are as they stand: not special, and more than a special token.
        (["<call>", "<|im_end|>\n"], [], Stops((), ("<call>", "<|im_end|>\n"))),
    ],
)
def test_special_tokens_are_ids_and_the_rest_is_text(folder, stop, ids, expected):
    tokenizer = load_tokenizer(folder)
    assert resolve_stops(RolloutConfig(stop=stop, stop_token_ids=ids), tokenizer) == expected
    assert tokenizer.decode([1, TURN, 2, CALL]).replace(" ", "") == "w1w2<call>"


def test_a_run_trains_the_stop_token_and_the_reward_function_does_not_see_it(tmp_path):
    """The sim engine's tokens are 33 to 126: it samples <|im_end|>, which is one of them."""
    words = [n for n in range(1, 127) if n != TURN]
    config = sim_config(
        model={"path": write_tokenizer(tmp_path, words, [("<|im_end|>", TURN)])},
        run={"samples_per_step": 100},
        rollout={
            "stop": ["<|im_end|>"],
            "stop_token_ids": [40, 50],
            "sim": {"length": "constant", "length_median": 1000.0, "decode_step_s": 0.0002},
        },
        learner={"steps": 3},
        eval={"held": {"at_start": True, "n": 4, "data": {"source": "synthetic", "size": 8}}},
    )
    system = System(config, tmp_path / "run")
    assert asyncio.run(system.run()).phase == "done"
    ends = set()
    for it in (each for group in groups(system.run_dir) for each in group["trajectories"]):
        stopped = it["finish_reason"] == "stop"
        [sequence] = it["sequences"]
        tokens = sequence["tokens"]
        assert len(tokens) == 64 or stopped
        assert {TURN, 40, 50}.isdisjoint(tokens[: -1 if stopped else None])
        assert "<|im_end|>" not in it["text"]
        ends |= set(tokens[-1:] if stopped else [])
        # Its span covers it, so it has a log-prob and is trained as the end of a sequence is.
        assert sequence["spans"][-1][2:] == [len(tokens), "sampled"]
    assert ends == {TURN, 40, 50}
    assert 0 < system.lines("eval")[0]["eval/held/truncated_fraction"] < 0.5
