"""asyncrl-doctor --chat, as a command."""

import json

import pytest
from model_files import write_chat_template, write_model

from asyncrl.cli import doctor

CHATML = """{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token + '\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"""


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def test_verdicts_parsers_and_an_example_are_shown(model, capsys):
    write_chat_template(model, CHATML)
    assert doctor.main(["--chat", "--model.path", str(model), "--chat.tool_parser", "json"]) == 0
    shown = capsys.readouterr().out
    assert "extend   user, with tools\n" in shown and "cut by length" in shown
    assert "an answer ends with '</s>', and '\\n' follows" in shown
    assert "calls of tools are read by 'json', reasoning by 'none'" in shown
    assert "a call of a tool and its result are " in shown and "</s>" in shown.partition("tokens:")[2]


def test_the_configuration_names_the_model_and_the_json_equals_that_of_a_run(model, tmp_path, capsys):
    write_chat_template(model, CHATML)
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\npath = "{model}"\n[data]\nsource = "synthetic"\n[chat]\nhistory = "template"\n')
    assert doctor.main([str(file), "--chat", "--json", "--chat.date", "2026-11-23"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = [report[key] for key in ("history", "date", "end", "seam")]
    assert found == ["template", "2026-11-23", "</s>", "\n"]
    assert {case["verdict"] for case in report["cases"]} == {"extend"}


def test_a_useless_template_fails_and_a_missing_one_is_a_wrong_configuration(model, capsys):
    assert doctor.main(["--chat", "--model.path", str(model)]) == 78
    text = capsys.readouterr().err
    assert "has no chat template, and episodes are chats; take a model that has one" in text
    assert "the configuration is wrong: correct the problems above" in text
    write_chat_template(model, "{{ raise_exception('not today') }}")
    assert doctor.main(["--chat", "--model.path", str(model)]) == 1
    assert "refused  user" in (shown := capsys.readouterr().out) and "not today" in shown
