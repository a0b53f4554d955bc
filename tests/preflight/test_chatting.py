"""The chat template of a run with episodes, before it begins."""

import asyncio

import pytest
from model_files import write_chat_template, write_model
from run_settings import simulated_run

from asyncrl.preflight.inputs import check_inputs, read_inputs

LINES = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDED = "{% for m in messages %}{{ m.role + ' ' + m.content + ' </s>' }}{% endfor %}"
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"


def config_of(model, template, *, episode=True, **chat):
    if template is not None:
        write_chat_template(model, template)
    playing = {"function": "m:f"} if episode else {}
    return simulated_run(model={"path": str(model)}, episode=playing, chat=chat)


def finding(config):
    return next((found for found in read_inputs(config, with_rows=False).findings if found.check == "chat"), None)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("template", "result", "said"),
    [
        (None, "fail", "has no chat template, and episodes are chats"),
        ("{% if %}", "fail", "cannot be compiled"),
        ("{{ raise_exception('never') }}", "fail", "refuses every conversation: the chat template refuses"),
        (LINES, "warn", "each answer begins a new sequence for turns of the kinds tool, "),
        (ENDED, "ok", "contexts are extended"),
    ],
)
def test_the_template_is_looked_at(model, template, result, said):
    found = finding(config_of(model, template))
    assert (found.result, said in found.detail) == (result, True), found
    assert bool(found.fix) == (result != "ok") and found.key == "model.path"
    assert finding(config_of(model, template, episode=False)) is None


def test_a_template_that_does_not_end_is_told_of_within_its_time(model):
    config = config_of(model, SLOW, check_timeout_s=0.2)
    found = {one.check: one for one in asyncio.run(check_inputs(config, with_rows=False)).findings}
    assert found["chat"].result == "fail" and "not checked within 0.2 s" in found["chat"].detail
    assert found["tokenizer"].result != "fail"


def test_bytes_are_a_model_too(tmp_path):
    found = finding(simulated_run(episode={"function": "m:f"}))
    assert (found.result, "'json'" in found.detail) == ("ok", True)
