import pytest
from episodes.hosted import Rollouter, config_with, hosting, is_over

from asyncrl.episodes.playing.players import resolve
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.runtime.workers.user_code import NotCallable


async def test_an_environment_is_reset_stepped_rewarded_and_closed(tmp_path):
    rollouter = Rollouter("a", "b", "c")
    async with hosting(config_with(env="plays:Counting", workers=1), tmp_path, rollouter) as host:
        printed = host.watch_output()
        assert await host.play("3") == EpisodeDone()
        assert rollouter.chats[-1].messages == [
            {"role": "user", "content": "count down from 3"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "2 left"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "1 left"},
        ]
        # The last step has no reward: None is not 0.
        assert [(node, value) for _, node, value in rollouter.rewards] == [(0, 0.5), (1, 0.5)]
        rollouter.answers = ["a", "raise"]
        rollouter.chats.clear()
        done = await host.play("5", uid="0-2")
        assert done.error.startswith("raised RuntimeError: the world ends (")
        rollouter.answers = [is_over("time")]
        assert await host.play("5", uid="0-3") == EpisodeDone()
        assert [text for _, text, _ in printed] == ["closed 0\n"] * 3


async def test_an_environment_that_returns_something_else_is_told_what_is_expected(tmp_path):
    async with hosting(config_with(env="plays:Wrong"), tmp_path) as host:
        assert "reset() said 7; text, a message with a role, or a list of such is expected" in (await host.play()).error


async def test_tools_are_called_until_the_policy_calls_none(tmp_path):
    rollouter = Rollouter(
        [("add", '{"a": 1, "b": 2}'), ("look_up", '{"key": "gold"}')],
        [("add", '{"a": "x"}'), ("subtract", "{}"), ("look_up", '{"key": "silver"}')],
        [("put", '{"thing": "ball"}')],
        [("put", '{"thing": "bat"}')],
        "done",
    )
    tools = ["plays:add", "plays:look_up", "plays:Box"]
    async with hosting(config_with(tools=tools, options={"size": 1}, workers=1), tmp_path, rollouter) as host:
        printed = host.watch_output()
        assert await host.play("use them") == EpisodeDone()
        chat = rollouter.chats[-1]
        assert chat.messages[0] == {"role": "user", "content": "use them"}
        assert [tool["function"]["name"] for tool in chat.tools] == ["add", "look_up", "put"]
        assert chat.tools[0]["function"] == {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "a": {"title": "A", "type": "integer", "description": "the first"},
                    "b": {"title": "B", "type": "integer", "default": 1, "description": "the second"},
                },
                "required": ["a"],
            },
        }
        said = {each["tool_call_id"]: each["content"] for each in chat.messages if each["role"] == "tool"}
        assert said["call_0_0"] == "3"
        assert said["call_0_1"] == '{"found": 42}'
        assert said["call_1_0"].startswith("error: 1 validation error")
        assert said["call_1_1"] == "error: there is no tool 'subtract'; there are add, look_up, put"
        assert said["call_1_2"] == "error: KeyError: 'silver'"
        assert said["call_2_0"] == "ball"
        assert said["call_3_0"] == "error: OverflowError: the box is full"
        counts = {name: host.figure(name) for name in ("tool_calls", "tool_errors", "tool_mistakes")}
        assert counts == {"tool_calls": 7, "tool_errors": 2, "tool_mistakes": 2}
        told = [text for _, text in host.notices().values()]
        assert len(told) == 2
        assert "tool put raised OverflowError: the box is full (" in told[1]
        assert printed[-1] == ("0-1", "box closed with 1\n", 0)


async def test_what_fails_to_validate_inside_a_tool_is_the_tools_error(tmp_path):
    rollouter = Rollouter([("check", '{"key": "silver"}')], "done")
    async with hosting(config_with(tools=["plays:check"], workers=1), tmp_path, rollouter) as host:
        assert await host.play() == EpisodeDone()
        assert "error: ValidationError: 1 validation error" in rollouter.chats[-1].messages[-1]["content"]
        counts = {name: host.figure(name) for name in ("tool_calls", "tool_errors", "tool_mistakes")}
        assert counts == {"tool_calls": 1, "tool_errors": 1, "tool_mistakes": 0}


@pytest.mark.parametrize(
    ("kind", "code", "options", "problems"),
    [
        ("function", ["plays:play"], {}, []),
        ("function", ["plays:plain"], {"size": 1}, ["episode.options.size: plays:plain takes no such option"]),
        (
            "function",
            ["plays:add"],
            {},
            ["episode.options.a: is required by plays:add; with each call it is given task"],
        ),
        ("env", ["plays:Counting"], {"least": 1}, []),
        (
            "env",
            ["plays:Counting"],
            {"lest": 1},
            ["episode.options.lest: plays:Counting takes no such option; did you"],
        ),
        ("env", ["plays:Box"], {"task": 1}, ["episode.env: plays:Box has no reset() and no step()"]),
        ("env", ["plays:Nothing"], {}, ["episode.env: module plays"]),
        ("env", ["plays"], {}, ["episode.env: 'plays' is not of the form MODULE:CLASS"]),
        ("tools", ["plays:add", "plays:Box"], {"size": 3}, []),
        ("tools", ["plays:add", "plays:add"], {}, ["episode.tools: there are several tools 'add'"]),
        ("tools", ["plays:add"], {"size": 3}, ["episode.options: are for tools that are classes"]),
        ("tools", ["plays:ad", "plays:Counting"], {}, ["episode.tools: module plays"]),
        ("tools", ["odd:lock"], {}, ["episode.tools: odd:lock cannot be described to the policy: Pydantic"]),
    ],
)
def test_what_cannot_be_played_is_found_before_the_first_episode(tmp_path, monkeypatch, kind, code, options, problems):
    (tmp_path / "odd.py").write_text("import threading\n\ndef lock(it: threading.Lock): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("plays", "odd"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    if not problems:
        assert callable(resolve(kind, code, options, lambda tool, error, mistaken: None))
        return
    with pytest.raises(NotCallable) as caught:
        resolve(kind, code, options, lambda tool, error, mistaken: None)
    assert len(caught.value.problems) == len(problems), caught.value.problems
    for line, begins in zip(caught.value.problems, problems, strict=True):
        assert line.startswith(begins)
