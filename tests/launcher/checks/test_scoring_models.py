"""The models that only score, and the conversations, before the start."""

import asyncio
import json

import pytest
from model_files import write_model
from teacher_server import scored, served

from asyncrl.config.load import validate_config
from asyncrl.launcher.checks.check_list import learner_reads_more
from asyncrl.launcher.checks.inputs import read_inputs
from asyncrl.launcher.checks.scoring_models import check_server, compare
from asyncrl.text.tokenizer import load_tokenizer


@pytest.fixture
def policy(tmp_path):
    return write_model(tmp_path / "policy")


@pytest.fixture
def other(tmp_path):
    return write_model(tmp_path / "other")


def spoil_tokenizer(folder, change):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer["model"]["vocab"], tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def spoilt(**changes):
    """The vocabulary with these ids, None for a missing token."""

    def change(vocab, _):
        ids = vocab | changes
        vocab.clear()
        vocab.update({token: id for token, id in ids.items() if id is not None})

    return lambda folder: spoil_tokenizer(folder, change)


def added(_, tokenizer):
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    tokenizer["added_tokens"] = [{"id": 0, "content": "b", **flags}]


def sized(size, *, tokenizer=True):
    def spoil(folder):
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
        if not tokenizer:
            (folder / "tokenizer.json").unlink()

    return spoil


SPOILT = [
    (spoilt(b=3), ""),
    (sized(8), ""),
    (sized(2), "has 2 tokens in its vocab_size, and ids of the policy go up to 2"),
    (spoilt(**{"a": 1, "</s>": 0}), "has another tokenizer than model.path: id 0 is 'a' here and '</s>' there"),
    (spoilt(**{"</s>": None}), "id 1 is '</s>' here and none there"),
    (lambda folder: spoil_tokenizer(folder, added), "id 0 is 'a' here and 'b' there"),
    (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    (sized(3, tokenizer=False), ""),
    (sized(4, tokenizer=False), "holds no tokenizer, and 4 tokens in its vocab_size"),
]


@pytest.mark.parametrize(("spoil", "reported"), SPOILT)
def test_ids_must_be_the_same_tokens(policy, other, spoil, reported):
    spoil(other)
    problem = compare(policy, other, load_tokenizer(str(policy)))
    assert reported in problem and bool(problem) == bool(reported)


def config_of(policy, **sections):
    tree = {
        "model": {"path": str(policy)},
        "data": {"source": "synthetic", "size": 4},
        "rollout": {"gpus_per_replica": 0, "max_tokens": 100},
        **sections,
    }
    return validate_config(tree)


@pytest.mark.parametrize(
    ("key", "learner"),
    [
        ("learner.kl.path", lambda path: {"kl": {"coefficient": 0.1, "path": path}}),
        ("learner.kl.path", lambda path: {"loss": "mine:loss", "kl": {"path": path}}),
        ("learner.teacher", lambda path: {"loss": "distill", "teacher": path}),
    ],
)
def test_a_model_with_another_tokenizer_is_refused_before_the_start(policy, other, key, learner):
    config = config_of(policy, learner=learner(str(other)))
    assert learner_reads_more(config) and not learner_reads_more(config_of(policy))
    for result in ("ok", "fail"):
        *_, found = read_inputs(config, with_rows=True, for_learner=True).findings
        assert (found.check, found.result, found.key, bool(found.fix)) == ("tokenizer", result, key, result == "fail")
        assert result == "ok" or str(other) in found.detail
        spoil_tokenizer(other, lambda v, _: v.pop("</s>", None))
    assert all(each.key != key for each in read_inputs(config, with_rows=True).findings)


def served_finding(policy, *script, **settings):
    learner = {"loss": "distill", "teacher_server": settings.pop("teacher_server", {})}

    async def play():
        async with served(*script, **settings) as there:
            config = config_of(policy, learner=learner | {"teacher": there.url})
            return await check_server(there.url, config, load_tokenizer(str(policy))), there

    return asyncio.run(asyncio.wait_for(play(), 30))


@pytest.mark.parametrize(
    ("script", "settings", "result", "reported"),
    [
        (scored, {"decode": lambda ids: "other words"}, "fail", "has another tokenizer than model.path"),
        (scored, {}, "warn", "but does not show its tokens"),
        (scored, {"longest": 1124}, "fail", "takes sequences of up to 1124 tokens, and the longest of the run needs"),
        (500, {}, "fail", "/completions answers with status 500"),
        (scored, {"models": ("x", "y")}, "fail", "serves several models (x, y)"),
        (scored, {"teacher_server": {"model": "z"}}, "fail", "serves no model 'z'; it serves teacher"),
    ],
)
def test_a_server_gets_the_requests_of_a_run(policy, script, settings, result, reported):
    found, server = served_finding(policy, script, **settings)
    assert (found.check, found.result, found.key) == ("teacher", result, "learner.teacher")
    assert reported in found.detail and server.url in found.detail and found.fix


def test_a_server_with_the_policys_tokens_passes(policy):
    tokenizer = load_tokenizer(str(policy))
    found, server = served_finding(policy, scored, decode=lambda ids: f" {tokenizer.decode(ids)}")
    assert found.result == "ok" and "serves teacher and scores" in found.detail
    # The highest id of the policy is in its range.
    assert server.bodies[0]["prompt"][-1] == 2


def test_conversations_are_read_before_the_start(policy, tmp_path):
    rows = [{"prompt": "a a", "completion": "a"}, {"prompt": "a", "completion": 3}]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))

    def found(**sft):
        config = config_of(policy, sft={"data": str(path), "warm_steps": 1} | sft)
        *_, last = read_inputs(config, with_rows=True, for_learner=True).findings
        assert last.key == ("sft.max_tokens" if "max_tokens" in sft else "sft.data")
        return last.result, f"{last.detail} {last.fix}"

    result, said = found()
    assert result == "fail" and f"{path}:2: completion: must be text" in said and "sft.on_bad_row" in said
    result, said = found(on_bad_row="skip")
    assert result == "warn" and "1 row can be trained; the longest sequence has 4 tokens" in said
    assert f"1 row left out, the first: {path}:2" in said
    path.write_text(json.dumps(rows[0]))
    assert found()[0] == "ok"
    (policy / "config.json").write_text('{"eos_token_id": 1, "max_position_embeddings": 8}')
    result, said = found(max_tokens=9)
    assert result == "fail" and "max_position_embeddings = 8" in said
    path.unlink()
    result, said = found()
    assert result == "fail" and "no such file" in said and "correct sft.data" in said
