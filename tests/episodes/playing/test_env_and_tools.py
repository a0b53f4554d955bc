import datetime
import enum
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from episodes.hosted import Rollouter, config_with, hosting

from asyncrl.core.errors import EpisodeOver
from asyncrl.episodes.playing.players import resolve, result_text
from asyncrl.messages.episodes import EpisodeDone
from asyncrl.workers.user_code import NotCallable


async def test_an_environment_is_reset_stepped_rewarded_and_closed(tmp_path):
    rollouter = Rollouter("a", "b", "c")
    async with hosting(config_with(env="plays:Counting", workers=1), tmp_path, rollouter) as host:
        printed = host.watch_output()
        assert await host.play("3") == EpisodeDone()
        said = [message["content"] for message in rollouter.chats[-1].messages]
        assert said == ["count down from 3", "a", "2 left", "b", "1 left"]
        assert [message["role"] for message in rollouter.chats[-1].messages] == ["user", *["assistant", "user"] * 2]
        assert rollouter.chats[-1].tools == []
        # The last step has no reward: None is not 0.
        assert [(node, value) for _, node, value in rollouter.rewards] == [(0, 0.5), (1, 0.5)]
        rollouter.answers = ["a", "b", "c"]
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        assert await host.play("3", uid="0-7", tools=[tool]) == EpisodeDone()
        assert rollouter.chats[-1].tools == [tool]
        rollouter.answers = ["a", "raise"]
        rollouter.chats.clear()
        done = await host.play("5", uid="0-2")
        assert done.error.startswith("raised RuntimeError: the world ends (")
        rollouter.answers = [EpisodeOver("time")]
        assert await host.play("5", uid="0-3") == EpisodeDone()
        expected = "reset() said 7; text, a message with a role, or a list of such is expected"
        assert expected in (await host.play("wrong", uid="0-4")).error
        assert [text for _, text, _ in printed] == ["closed 0\n"] * 5


async def test_tools_are_called_until_the_policy_calls_none(tmp_path):
    rollouter = Rollouter(
        [("add", '{"a": 1, "b": 2}'), ("look_up", '{"key": "gold"}')],
        [("add", '{"a": "x"}'), ("subtract", "{}"), ("look_up", '{"key": "silver"}')],
        [("put", '{"thing": "ball"}'), ("check", '{"key": "silver"}')],
        [("put", '{"thing": "bat"}')],
        "done",
    )
    tools = ["plays:add", "plays:look_up", "plays:check", "plays:Box"]
    async with hosting(config_with(tools=tools, options={"size": 1}, workers=1), tmp_path, rollouter) as host:
        printed = host.watch_output()
        assert await host.play("use them") == EpisodeDone()
        chat = rollouter.chats[-1]
        assert chat.messages[0] == {"role": "user", "content": "use them"}
        assert [tool["function"]["name"] for tool in chat.tools] == ["add", "look_up", "check", "put"]
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
        assert said.pop("call_1_0").startswith("error: 1 validation error")
        # A validation error inside a tool is the tool's error.
        assert said.pop("call_2_1").startswith("error: ValidationError: 1 validation error")
        assert said == {
            "call_0_0": "3",
            "call_0_1": '{"found": 42}',
            "call_1_1": "error: there is no tool 'subtract'; there are add, look_up, check, put",
            "call_1_2": "error: KeyError: 'silver'",
            "call_2_0": "ball",
            "call_3_0": "error: OverflowError: the box is full",
        }
        counts = {name: host.figure(name) for name in ("tool_calls", "tool_errors", "tool_mistakes")}
        assert counts == {"tool_calls": 8, "tool_errors": 3, "tool_mistakes": 2}
        reported = [text for _, text in host.notices().values()]
        assert len(reported) == 3
        assert "tool put raised OverflowError: the box is full (" in reported[-1]
        assert printed[-1] == ("0-1", "box closed with 1\n", 0)


async def test_half_of_a_surrogate_pair_in_the_result_of_a_tool_is_escaped(tmp_path):
    rollouter = Rollouter([("character", '{"code": 55357}')], "done")
    async with hosting(config_with(tools=["plays:character"], workers=1), tmp_path, rollouter) as host:
        assert await host.play("use it") == EpisodeDone()
        assert rollouter.chats[-1].messages[-1]["content"] == r"\ud83d"


@dataclass
class Place:
    name: str
    seen: Any = None


class Weather(pydantic.BaseModel):
    city: Place
    celsius: float


class Colour(enum.Enum):
    RED = "rød"


class Plain:
    def __str__(self):
        return 'a "plain" object'


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ('鲁迅 "🙂"\n', '鲁迅 "🙂"\n'),
        ({"titre": "Œuvres", "作者": ["鲁迅"]}, '{"titre": "Œuvres", "作者": ["鲁迅"]}'),
        (["東京", {"a": None}], '["東京", {"a": null}]'),
        (Place("Zürich"), '{"name": "Zürich", "seen": null}'),
        (Weather(city=Place("Zürich"), celsius=3.5), '{"city": {"name": "Zürich", "seen": null}, "celsius": 3.5}'),
        ([Place("a", Weather(city=Place("b"), celsius=1))], None),
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (2.5, "2.5"),
        ((1, {2}), "[1, [2]]"),
        ({1: Colour.RED}, '{"1": "rød"}'),
        (Colour.RED, "rød"),
        (datetime.date(2026, 11, 28), "2026-11-28"),
        (Path("a/b"), "a/b"),
        ("é".encode(), "é"),
        ("é".encode() + b"\xff\n", "é\\xff\n"),
        ({"out": [b"a\xff"], "code": 1}, '{"out": ["a\\\\xff"], "code": 1}'),
        ({"name": Place(b"\xff")}, '{"name": {"name": "_w==", "seen": null}}'),
        ({"grid": np.arange(4).reshape(2, 2), "at": np.int64(3)}, '{"grid": [[0, 1], [2, 3]], "at": 3}'),
        (Plain(), 'a "plain" object'),
        ([Plain()], '["a \\"plain\\" object"]'),
    ],
)
def test_the_policy_reads_text_as_text_and_structures_as_json(result, text):
    nested = '[{"name": "a", "seen": {"city": {"name": "b", "seen": null}, "celsius": 1.0}}]'
    assert result_text(result) == (text or nested)


async def test_all_tools_are_closed_even_if_one_fails_to_close(tmp_path):
    config = config_with(tools=["plays:Jammed", "plays:Box"], workers=1)
    async with hosting(config, tmp_path, Rollouter("done")) as host:
        printed = host.watch_output()
        assert "OSError: it is jammed" in (await host.play("use them")).error
        assert "box closed with 0\n" in [text for _, text, _ in printed]


PROBLEMS = [
    ("function", ["play"], {}, None),
    ("function", ["plain"], {"size": 1}, "episode.options.size: plays:plain takes no such option"),
    ("function", ["add"], {}, "episode.options.a: is required by plays:add; with each call it is given task"),
    ("env", ["Counting"], {"least": 1}, None),
    ("env", ["Counting"], {"lest": 1}, "episode.options.lest: plays:Counting takes no such option; did you"),
    ("env", ["Box"], {"task": 1}, "episode.env: plays:Box has no reset() and no step()"),
    ("env", ["Nothing"], {}, "episode.env: module plays"),
    ("env", [""], {}, "episode.env: 'plays:' is not of the form MODULE:CLASS"),
    ("tools", ["add", "Box"], {"size": 3}, None),
    ("tools", ["add", "add"], {}, "episode.tools: there are several tools 'add'"),
    ("tools", ["add"], {"size": 3}, "episode.options: are arguments of classes"),
    ("tools", ["ad", "Counting"], {}, "episode.tools: module plays"),
    ("tools", ["lock"], {}, "episode.tools: plays:lock cannot be described to the policy: Pydantic"),
]


@pytest.mark.parametrize(("kind", "code", "options", "problem"), PROBLEMS)
def test_episode_code_that_cannot_run_is_found_before_the_first_episode(
    tmp_path, monkeypatch, kind, code, options, problem
):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "plays", raising=False)
    code = [f"plays:{name}" for name in code]
    if problem is None:
        assert callable(resolve(kind, code, options, lambda tool, error, mistaken: None))
        return
    with pytest.raises(NotCallable) as caught:
        resolve(kind, code, options, lambda tool, error, mistaken: None)
    (reported,) = caught.value.problems
    assert reported.startswith(problem)
