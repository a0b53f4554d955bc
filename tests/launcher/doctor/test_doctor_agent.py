"""asyncrl-doctor --agent: real programs, the real endpoint and conversation, a policy that speaks by a script."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from model_files import write_chat_template, write_model

from asyncrl.cli import doctor
from asyncrl.launcher.doctor.played import CAUSES, Played, PlayedTurn
from asyncrl.launcher.doctor.script import Script, example_of
from asyncrl.rollouter.episode.conversation import Cause

AGENT = '''
import json, sys, time
import openai

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}}


def ask(messages, **more):
    with openai.OpenAI(max_retries=0) as client:
        answer = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], **more)
        return list(answer) if more.get("stream") else answer


def turns(**more):
    """The loop of an agent: answers are sent back as they came."""
    messages = [{"role": "user", "content": "Weather?"}]
    while True:
        message = ask(messages, **more).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            assert json.loads(call.function.arguments) == {"city": "example"}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        if not message.tool_calls:
            return messages


def loop():
    turns(temperature=0.2, tool_choice="required", response_format={"type": "text"})
    print(0.5)


def rewrites():
    messages = turns()
    messages[1] = {"role": "user", "content": "In the beginning I asked for the weather."}
    messages[2:3] = []
    ask([*messages, {"role": "user", "content": "More."}])


def silent():
    print("I know it all")


def hangs():
    turns()
    time.sleep(1000)


def insists():
    """Streams, continues after a refusal, and crashes."""
    try:
        ask([{"role": "user", "content": "Weather?"}], logit_bias={"5": 1})
    except openai.BadRequestError:
        assert "weather" in str(ask([{"role": "user", "content": "Weather?"}], stream=True))
    sys.exit("no luck today")


globals()[sys.argv[1]]()
'''
PLAYS = """
async def play(task, client, fails=False):
    reply = await client.chat(task.messages)
    again = await client.chat([*task.messages, reply.message, {"role": "user", "content": "And?"}])
    if fails:
        raise ValueError("no luck")
    client.reward(0.25)
"""
SIM = 'data.source = "synthetic"\nrollout.engine = "sim"\nlearner.backend = "sim"\nepisode.function = "plays:play"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "plays.py").write_text(PLAYS)
    (tmp_path / "sim.toml").write_text(SIM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return tmp_path


def examine(capsys, *argv):
    """Exit code and object of a rehearsal, after which nothing of the agent is left."""
    before = set(psutil.Process().children(recursive=True))
    code = doctor.main([*argv, "--json"])
    left = {each for each in psutil.Process().children(recursive=True) if "resource_tracker" not in str(each.cmdline())}
    assert left <= before
    shown = capsys.readouterr()
    return code, json.loads(shown.out or "{}"), shown.err


def lines_of(seen):
    """The text that people read."""
    fields = {key: value for key, value in seen.items() if key not in ("works", "forks")}
    return "\n".join(Played(**fields | {"turns": [PlayedTurn(**turn) for turn in seen["turns"]]}).lines(scored=False))


def agent(name):
    return ["--agent", f"{sys.executable} agent.py {name}"]


def test_an_agent_that_sends_answers_back_extends_the_conversation(folder, capsys):
    code, seen, _ = examine(capsys, *agent("loop"))
    assert (code, seen["works"], seen["forks"], seen["reward"], seen["outcome"]) == (0, True, {}, 0.5, "stop")
    assert [(turn["cause"], turn["calls"]) for turn in seen["turns"]] == [("root", ["weather"]), ("extend", [])]
    last = seen["turns"][-1]
    assert seen["sequences"] == [last["context_tokens"] + last["sampled_tokens"]] and seen["cost_factor"] == 1.0
    assert 0 < last["new_tokens"] < seen["turns"][0]["new_tokens"] == seen["turns"][0]["context_tokens"]
    assert (seen["ignored"], seen["relaxed"], seen["refused"]) == (["temperature"], ["tool_choice"], {})
    assert (seen["dialects"], seen["streamed"], seen["retries"]) == ({"/v1/chat/completions": 2}, 0, 0)
    assert set(seen["seconds"]) == {"first call", "last answer", "end"}
    shown = lines_of(seen)
    assert "begins the conversation; calls weather" in shown and CAUSES["extend"] in shown
    assert "2 calls, 0 forked: the engine computes 1.00 times the tokens" in shown
    assert "warn  ignored: temperature" in shown and "warn  relaxed: tool_choice" in shown
    assert shown.endswith("a run can train on this agent")


def test_an_agent_that_rewrites_an_answer_forks(folder, capsys):
    code, seen, _ = examine(capsys, *agent("rewrites"))
    assert code == 0 and sum(seen["forks"].values()) == 1 and len(seen["sequences"]) == 2 and seen["cost_factor"] > 1
    (cause,) = seen["forks"]
    assert f"  fork: {CAUSES[cause]}" in lines_of(seen) and f"warn  1 forked: {CAUSES[cause]}" in lines_of(seen)


def test_an_agent_that_never_asks_hangs_or_crashes_cannot_be_trained(folder, capsys):
    """The report has its last output and the refused field; a deadline ends an agent that hangs."""
    code, seen, _ = examine(capsys, *agent("silent"))
    assert code == 1 and "without an answer of the policy" in seen["failure"] and seen["turns"] == []
    shown = lines_of(seen)
    assert "no call of the policy was answered" in shown and "  | I know it all" in shown
    assert shown.endswith("a run cannot train on this agent as it is")
    limits = ["--timeout", "30", "--episode.turn_timeout_s", "1", "--episode.close_timeout_s", "0.5"]
    code, seen, _ = examine(capsys, *agent("hangs"), *limits)
    assert code == 1 and seen["failure"].startswith("turn: it ") and "episode.turn_timeout_s" in seen["failure"]
    code, seen, _ = examine(capsys, *agent("insists"))
    assert code == 1 and "no luck today" in seen["failure"]
    assert list(seen["refused"]) == ["logit_bias"] and "logit_bias" in seen["refused"]["logit_bias"]
    assert (seen["streamed"], len(seen["turns"]), seen["reward"]) == (1, 1, None)


def test_tools_that_the_chat_template_does_not_show_are_named(folder, capsys, family):
    limit = ["--timeout", "60"]
    code, seen, _ = examine(capsys, *agent("loop"), *limit, "--model.path", str(family("chatml")))
    assert (code, seen["works"], seen["hidden_tools"]) == (0, True, ["weather"])
    warning = "warn  the chat template does not show the model these tools: weather; describe them in a system message"
    assert warning in lines_of(seen)
    _, seen, _ = examine(capsys, *agent("loop"), *limit, "--model.path", str(family("tools first")))
    assert seen["hidden_tools"] == [] and "does not show the model" not in lines_of(seen)


def test_a_configuration_names_function_and_task(folder, capsys):
    code, seen, _ = examine(capsys, "sim.toml", "--agent")
    assert (code, seen["reward"], seen["turn_rewards"], seen["dialects"]) == (0, 0.25, 1, {})
    assert [turn["cause"] for turn in seen["turns"]] == ["root", "extend"]
    code, seen, _ = examine(capsys, "sim.toml", "--agent", "--episode.options", "{fails = true}")
    assert code == 1 and "no luck" in seen["failure"] and "plays.py" in seen["failure"]
    assert doctor.main(["sim.toml", "--agent", "--episode.function", "plays:pla"]) == 78
    assert "episode.function" in capsys.readouterr().err


def test_neither_torch_nor_vllm_is_imported(folder):
    """By --agent, nor by --chat."""
    write_chat_template(model := write_model(folder / "model"), "{% for m in messages %}{{ m.content }}{% endfor %}")
    code = (
        "import sys\nfrom asyncrl.cli.doctor import main\n"
        "assert main(['sim.toml', '--agent', '--json']) == 0\n"
        "assert main(['--chat', '--model.path', sys.argv[1]]) == 0\n"
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)\n"
    )
    argv, environment = [sys.executable, "-c", code, str(model)], {"PYTHONPATH": str(Path(doctor.__file__).parents[2])}
    subprocess.run(argv, check=True, timeout=60, stdout=subprocess.DEVNULL, env=environment)


# --- the script and the words ---


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_script_calls_each_tool_once_and_ends_as_the_agent_wants():
    script = Script(thinks=False)
    said = [script.answer([tool("look"), tool("final_answer")]) for _ in range(3)]
    assert '"look"' in said[0] and '"final_answer"' in said[1] and '"final_answer"' in said[2]
    assert Script(thinks=False).answer([]) == "This is answer 1."
    coder = Script(thinks=False)
    assert [("final_answer" in coder.answer([], stop=["</code>"])) for _ in range(2)] == [False, True]
    assert Script(thinks=True).answer([]).startswith("<think>\n")
    assert Script(thinks=True).answer([], thinking=True).startswith("\nThis is thought 1.\n</think>")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, {}),
        ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}, {"a": 1}),
        ({"type": ["string", "null"]}, "example"),
        ({"enum": ["x", "y"], "type": "string"}, "x"),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"const": 3}}}, 3),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}, None),
        ({"type": "array", "items": {}}, []),
    ],
)
def test_arguments_follow_the_schema(schema, value):
    assert example_of(schema) == value


def test_a_context_that_extends_an_answer_by_chance_does_not_fork():
    assert set(CAUSES) == set(Cause.__args__)
    tokens = {"context_tokens": 5, "new_tokens": 1, "sampled_tokens": 1}
    turn = PlayedTurn(cause="fork:assistant", goes_on=True, calls=[], trained=True, **tokens)
    assert not turn.forked and turn.relation.startswith(CAUSES["extend"])
    nothing = dict.fromkeys(("turn_rewards", "streamed", "retries"), 0) | {"dialects": {}, "refused": {}, "seconds": {}}
    nothing |= {"failure": "", "printed": "", "reward": None, "ignored": [], "relaxed": []}
    played = Played(outcome="turns", turns=[turn], sequences=[6], cost_factor=1.0, **nothing)
    assert played.forks == {} and played.works
    text = "\n".join(played.lines(scored=False))
    assert "warn  a limit ended it (turns)" in text and "warn  it gave no reward" in text
    assert "no reward" not in "\n".join(played.lines(scored=True))
