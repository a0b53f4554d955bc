"""Rows of sft.data as tokens with a loss, and their order."""

import json

import pytest
from chat_models import config_of, id_of, write_chat_model

from asyncrl.config.load import validate_config
from asyncrl.core.errors import ConfigError, DataError
from asyncrl.text.sft.conversations import Conversations, TokenizedRow, load_conversations, make_encoder
from asyncrl.text.sft.encoding import BadConversation
from asyncrl.text.tokenizer import tokenizer_of

SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "lookup", "arguments": {}}}]}
TALK = [
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "The end."},
]


def configured(folder, *, prompts=None, **sft):
    config = config_of(folder)
    held = {"sft": config.sft.model_copy(update=sft), "data": config.data.model_copy(update=prompts or {})}
    return config.model_copy(update=held)


def shown(config, row):
    """Each sequence as text, what is trained in brackets."""
    tokenizer = tokenizer_of(config)
    found = []
    for sequence in make_encoder(config, tokenizer)(row):
        text, trained = "", set(sequence.trained.tolist())
        for place, id in enumerate(sequence.ids.tolist()):
            text += "[" * (place in trained and place - 1 not in trained)
            text += tokenizer.decode([id], keep_special=True)
            text += "]" * (place in trained and place + 1 not in trained)
        found.append(text)
    return found


def chatml(*messages):
    return "".join(f"<|im_start|>{role}\n{text}\n" for role, text in messages)


def test_only_answers_and_their_end_tokens_are_trained(family):
    expected = chatml(
        ("user", "Hello.<|im_end|>"),
        ("assistant", "[Hi there.<|im_end|>]"),
        ("user", "And then?<|im_end|>"),
        ("assistant", "[The end.<|im_end|>]"),
    )
    config = configured(family("chatml"))
    assert shown(config, {"messages": TALK}) == [expected.removesuffix("\n")]
    weightless = [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]
    (found,) = shown(config, {"messages": weightless})
    assert found.count("[") == 1 and found.endswith("[The end.<|im_end|>]")
    absent = [message | {"weight": None} for message in TALK]
    assert shown(config, {"messages": absent}) == [expected.removesuffix("\n")]
    # Messages after the last answer are not used.
    assert shown(config, {"messages": [*TALK, {"role": "user", "content": "Bye."}]}) == shown(
        config, {"messages": TALK}
    )


def test_a_context_that_is_not_extended_starts_a_sequence_and_trains_each_answer_once(family):
    first, second = shown(configured(family("lines")), {"messages": TALK})
    assert first == "user: Hello.\nassistant:[ Hi there.</s>]"
    assert second == "user: Hello.\nassistant: Hi there.\nuser: And then?\nassistant:[ The end.</s>]"


def test_prompts_and_completions_use_the_template_of_the_data(family):
    row = {"prompt": "Hello.", "completion": "Hi there.", "answer": 1}
    plain = configured(family("chatml"))
    assert shown(plain, row) == ["<s>Hello.[Hi there.<|im_end|>]"]
    assert shown(plain, row | {"completion": "Hi.<|im_end|>"}) == ["<s>Hello.[Hi.<|im_end|>]"]
    chat = configured(family("chatml"), prompts={"template": "chat", "system": "Be brief."})
    (found,) = shown(chat, row)
    assert found == chatml(
        ("system", "Be brief.<|im_end|>"), ("user", "Hello.<|im_end|>"), ("assistant", "[Hi there.<|im_end|>]")
    ).removesuffix("\n")
    asked = [{"role": "system", "content": "Or not."}, TALK[0]]
    (own,) = shown(chat, {"prompt": asked, "completion": [TALK[1]]})
    assert "Or not." in own and "Be brief." not in own


def test_a_system_message_shown_only_before_the_last_user_message_is_kept(tmp_path):
    # As in the templates of Mistral: it is in the context of an answer, and not in the whole conversation.
    template = (
        "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
        "{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ system + '|' if loop.last }}{{ m.content }}[/INST]"
        "{%- elif m.role == 'assistant' %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    config = configured(
        write_chat_model(tmp_path, template, eos="</s>"), prompts={"template": "chat", "system": "Brief."}
    )
    assert shown(config, {"messages": TALK[:2]}) == ["[INST]Brief.|Hello.[/INST][Hi there.</s>]"]
    assert shown(config, {"messages": TALK})[-1].endswith("[INST]Brief.|And then?[/INST][The end.</s>]")


def test_tools_of_a_row_are_shown(family):
    (found,) = shown(configured(family("tools first")), {"messages": TALK, "tools": [TOOL]})
    assert '"name": "lookup"' in found and found.count("[") >= 2


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        (["messages"], "is no object"),
        ({"text": "x"}, "has the keys 'text'; a row is"),
        ({"messages": []}, "messages: holds no message"),
        ({"messages": [{"role": "poet", "content": "x"}]}, r"messages\[0\].role: is 'poet'"),
        ({"messages": TALK[:1]}, "has no answer to train"),
        ({"messages": TALK[1:]}, r"messages\[0\]: is an answer to nothing"),
        ({"messages": TALK, "tools": 5}, "tools: must be a list"),
        ({"messages": TALK, "tools": True}, "tools: must be a list"),
        ({"messages": [TALK[0], TALK[1] | {"weight": 2}]}, r"messages\[1\].weight: must be 0 or 1"),
        ({"prompt": TALK, "completion": "x"}, 'prompt: must be text under data.template = "plain"'),
        # Fields that the model would not see.
        ({"messages": TALK, "tools": [TOOL]}, r"tools\[0\].function.name: the chat template shows no tools"),
        ({"messages": [TALK[0], TALK[1] | {"reasoning": "r"}]}, r"messages\[1\].reasoning_content: the chat template"),
        ({"messages": [TALK[0], TALK[1] | {"mood": "r"}]}, r"messages\[1\].mood: cannot be shown"),
        ({"messages": [TALK[0], {"role": "assistant"}]}, r"messages\[1\].content: is null or missing"),
    ],
)
def test_a_row_that_cannot_be_trained_is_refused_with_the_reason(row, reported, family):
    with pytest.raises(BadConversation, match=reported):
        shown(configured(family("chatml")), row)


def test_calls_that_the_template_does_not_show_are_refused(family):
    with pytest.raises(BadConversation, match=r"messages\[1\].tool_calls: the chat template shows no"):
        shown(configured(family("plain chatml")), {"messages": [TALK[0], CALLING]})


def test_calls_are_trained_as_the_template_writes_them(family):
    call = {"function": {"name": "lookup", "arguments": '{"word": "x"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "weight": None}
    row = {"messages": [TALK[0], asked, {"role": "tool", "name": "lookup", "content": "y"}, TALK[1]]}
    (found,) = shown(configured(family("chatml")), row)
    assert '[<tool_call>\n{"name": "lookup", "arguments": {"word": "x"}}\n</tool_call><|im_end|>]' in found
    assert "y<|im_end|>" in found and found.endswith("[Hi there.<|im_end|>]")


def test_reasoning_is_trained_if_the_template_shows_it(family):
    thoughtful = TALK[1] | {"reasoning_content": "A greeting."}
    (found,) = shown(configured(family("qwen3")), {"messages": [TALK[0], thoughtful]})
    assert "[<think>\nA greeting.\n</think>\n\nHi there.<|im_end|>]" in found
    (opened,) = shown(configured(family("qwen3 thinking")), {"messages": [TALK[0], thoughtful]})
    assert "[A greeting.\n</think>\n\nHi there.<|im_end|>]" in opened


def test_messages_are_named_by_their_position_in_the_row(family):
    row = {"messages": [TALK[0], TALK[1] | {"content": "a<|im_end|>b"}]}
    with pytest.raises(BadConversation, match=r"messages\[1\]: holds <\|im_end\|>"):
        shown(configured(family("chatml"), prompts={"template": "chat", "system": "Be brief."}), row)


def test_a_model_without_a_chat_template_takes_only_prompts_and_completions(tmp_path):
    config = configured(write_chat_model(tmp_path / "m", None))
    with pytest.raises(BadConversation, match="needs a chat template, and the model has none"):
        shown(config, {"messages": TALK})
    assert shown(config, {"prompt": "Hello.", "completion": "Hi."}) == ["<s>Hello.[Hi.<|im_end|>]"]


def test_a_sequence_that_is_too_long_is_refused_or_cut(family):
    folder = family("chatml")
    (whole,) = make_encoder(configured(folder), tokenizer_of(config_of(folder)))({"messages": TALK})
    length = len(whole.ids)
    assert whole.ids[-1] == id_of("<|im_end|>")
    with pytest.raises(BadConversation, match=f"takes {length} tokens, and the longest sequence is {length - 1}"):
        shown(configured(folder, max_tokens=length - 1), {"messages": TALK})
    (cut,) = shown(configured(folder, max_tokens=length - 1, on_long="cut"), {"messages": TALK})
    assert cut.endswith("[The end.]")
    with pytest.raises(BadConversation, match="has no answer within 3 tokens"):
        shown(configured(folder, max_tokens=3, on_long="cut"), {"messages": TALK})
    assert shown(configured(folder, max_tokens=length), {"messages": TALK})


def loaded(tmp_path, folder, rows, **sft):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (tmp_path / "talk.jsonl").write_text("\n".join(lines))
    return load_conversations(configured(folder, data=str(tmp_path / "talk.jsonl"), **sft))


def test_a_bad_row_is_an_error_with_its_position_or_is_left_out(tmp_path, family):
    rows = [{"messages": TALK}, "", "{", {"messages": TALK[:1]}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(DataError, match=r"talk.jsonl:3: is not valid JSON.*sft.on_bad_row"):
        loaded(tmp_path, family("chatml"), rows)
    found = loaded(tmp_path, family("chatml"), rows, on_bad_row="skip")
    assert [row.place.rpartition(":")[2] for row in found.rows] == ["1", "5"]
    assert found.skipped == 2 and "talk.jsonl:3: is not valid JSON" in found.first_skipped
    with pytest.raises(DataError, match=r"talk.jsonl:1: takes .* tokens.*sft.max_tokens"):
        loaded(tmp_path, family("chatml"), rows, max_tokens=3)
    with pytest.raises(DataError, match=r"none of its 1 rows can be used, the first: .*talk.jsonl:1"):
        loaded(tmp_path, family("chatml"), ["{"], on_bad_row="skip")
    with pytest.raises(DataError, match="no such file"):
        load_conversations(configured(family("chatml"), data=str(tmp_path / "none.jsonl")))


def test_the_fingerprint_covers_tokens_and_training_masks(tmp_path, family):
    folder = family("chatml")
    rows = [{"messages": TALK}, {"prompt": "a", "completion": "b"}]
    first = loaded(tmp_path, folder, rows)
    assert loaded(tmp_path, folder, ["", *rows]).fingerprint == first.fingerprint
    masked = {"messages": [TALK[0], TALK[1] | {"weight": 0}, *TALK[2:]]}
    others = [rows[::-1], rows[:1], [masked, rows[1]]]
    assert len({first.fingerprint, *(loaded(tmp_path, folder, each).fingerprint for each in others)}) == 4


def make_conversations(count, *, seed=0, batch=3):
    rows = [TokenizedRow(f"f:{number}", []) for number in range(count)]
    return Conversations(rows=rows, fingerprint="f", seed=seed, batch=batch)


def places(conversations, *numbers):
    return [row.place for number in numbers for row in conversations.of_step(number)]


def test_each_epoch_has_every_conversation_once_in_its_own_order():
    found = make_conversations(7)
    stream = places(found, *range(1, 15))
    assert len(stream) == 42 == 6 * 7
    for start in range(0, 42, 7):
        assert sorted(stream[start : start + 7]) == [f"f:{number}" for number in range(7)]
    assert stream[:7] != stream[7:14] and found.epochs(7) == 3.0
    # No earlier step is asked for, and the seed counts.
    assert places(make_conversations(7), 9) == stream[24:27]
    assert len({tuple(places(make_conversations(50, seed=seed), 1, 2)) for seed in range(4)}) == 4
    assert set(places(make_conversations(2, batch=5), 1)) == {"f:0", "f:1"}


@pytest.mark.parametrize(
    ("tree", "reported"),
    [
        ({"sft": {"warm_steps": 3}}, "sft.warm_steps: has no effect without sft.data"),
        ({"sft": {"weight": 0.1}}, "sft.weight: has no effect without sft.data"),
        ({"sft": {"data": "x"}}, "sft.data: is not trained: set sft.warm_steps"),
        ({"sft": {"data": "x", "warm_steps": 1}, "learner": {"backend": "sim"}}, 'backend = "sim" trains nothing'),
        ({"sft": {"data": "x", "warm_steps": 1, "rise_steps": 2}}, "sft.rise_steps: is more than sft.warm_steps = 1"),
        (
            {"sft": {"data": "x", "weight": 1.0, "batch": 1}, "learner": {"updates_per_batch": 2}},
            "sft.batch: is 1, fewer than the updates of a step",
        ),
        (
            {"sft": {"data": "x", "warm_steps": 1}, "learner": {"kl": {"coefficient": 0.1}}},
            "learner.kl.path: is model.path by default, and the policy moves away from it in sft.warm_steps",
        ),
    ],
)
def test_conflicting_keys_are_refused(tree, reported):
    base = {"model": {"path": "m"}, "data": {"source": "synthetic"}, "rollout": {"gpus_per_replica": 0}}
    with pytest.raises(ConfigError, match=reported):
        validate_config(base | tree)
