"""Ends of responses: ids, special tokens by their text, and strings; on tokenizers as model folders have them."""

import asyncio
import json

import pytest
from inprocess import System, sim_config
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from asyncrl.config.rollout import RolloutConfig
from asyncrl.errors import ConfigError
from asyncrl.stops import Stops, resolve_stops
from asyncrl.tokenizer import load_tokenizer

PLAIN = 60
END, TURN, CALL = 60, 61, 62
"""<|endoftext|>, <|im_end|> and <call>: added tokens, the last not special."""
VOCABULARY = 130


@pytest.fixture
def folder(tmp_path):
    """A base model's, with a vocabulary that is padded beyond its tokenizer's."""
    backend = Tokenizer(WordLevel({"?": 0, **{f"w{n}": n for n in range(1, PLAIN)}}, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    added = [AddedToken(text, special=text != "<call>") for text in ("<|endoftext|>", "<|im_end|>", "<call>")]
    backend.add_tokens(added)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "eos_token_id": END, "vocab_size": VOCABULARY})
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("stop", "ids", "expected"),
    [
        ([], [], Stops()),
        (["<|im_end|>"], [], Stops((TURN,))),
        (["\n\n", "<|im_end|>"], [5], Stops((5, TURN), ("\n\n",))),
        (["<|im_end|>", "<|endoftext|>"], [TURN, VOCABULARY - 1], Stops((END, TURN, VOCABULARY - 1))),
        # In the text both are as they stand: not special, and more than a special token.
        (["<call>", "<|im_end|>\n"], [], Stops((), ("<call>", "<|im_end|>\n"))),
    ],
)
def test_special_tokens_are_ids_and_the_rest_is_text(folder, stop, ids, expected):
    tokenizer = load_tokenizer(str(folder))
    assert resolve_stops(RolloutConfig(stop=stop, stop_token_ids=ids), tokenizer) == expected
    assert tokenizer.decode([1, TURN, 2, CALL]).replace(" ", "") == "w1w2<call>"


@pytest.mark.parametrize("ids", [[VOCABULARY], [1, 10**9]])
def test_an_id_that_the_model_does_not_have_is_an_error_that_names_the_key(folder, ids):
    with pytest.raises(ConfigError, match=rf"rollout.stop_token_ids: {ids[-1]}: .* 0 to {VOCABULARY - 1}"):
        resolve_stops(RolloutConfig(stop_token_ids=ids), load_tokenizer(str(folder)))
    with pytest.raises(ConfigError, match="0 to 256"):
        resolve_stops(RolloutConfig(stop_token_ids=[257]), load_tokenizer(None))


def make_folder(folder):
    """The sim engine's tokens are 33 to 126: it samples <|im_end|>, which is one of them."""
    vocabulary = {"?": 0, **{f"w{n}": n for n in range(1, 127) if n != TURN}, "<|im_end|>": TURN}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_a_run_trains_the_stop_token_and_shows_the_reward_none(tmp_path):
    config = sim_config(
        model={"path": make_folder(tmp_path)},
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
    ends, trajectories = [], []
    for path in (system.run_dir / "samples").iterdir():
        for line in path.read_text().splitlines():
            trajectories += json.loads(line)["trajectories"]
    for it in trajectories:
        stopped = it["finish_reason"] == "stop"
        [sequence] = it["sequences"]
        tokens = sequence["tokens"]
        assert len(tokens) == 64 or stopped
        assert {TURN, 40, 50}.isdisjoint(tokens[: -1 if stopped else None])
        assert "<|im_end|>" not in it["text"]
        ends += tokens[-1:] if stopped else []
        # Its span covers it, so it has a log-prob and is trained as the end of a sequence is.
        assert sequence["spans"][-1][2:] == [len(tokens), "sampled"]
    assert set(ends) == {TURN, 40, 50}
    assert 0 < system.lines("eval")[0]["eval/held/truncated_fraction"] < 0.5
