"""Snapshots whatever their figures are: what is shown of them can be reckoned with."""

import contextlib
import copy
import json

import jsonschema
import msgpack
import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from top.pictures import STATES, WALL, Run

from asyncrl.report.utilisation import spans
from asyncrl.telemetry.snapshots import recording
from asyncrl.telemetry.snapshots.recording import Recorder, decode, read_bodies
from asyncrl.telemetry.snapshots.snapshot_codec import decode_snapshot
from asyncrl.top.detail import detail
from asyncrl.top.drawing.text import UNICODE
from asyncrl.top.figures.document import json_schema, to_json
from asyncrl.top.model import build
from asyncrl.top.panes import page
from asyncrl.top.source.history import History

NAN, INF = float("nan"), float("inf")
ODD = (
    NAN,
    INF,
    -INF,
    1e308,
    -1e308,
    5e-324,
    -1.0,
    0.0,
    1e18,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    "text",
    None,
    [],
    {},
    True,
)


def leaves(value, path=()):
    """The places of everything that is no container, and of the containers."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in children:
        yield from leaves(each, (*path, key))


def put(value, path, new):
    *way, last = path
    for key in way:
        value = value[key]
    value[last] = new


@pytest.mark.parametrize("state", STATES)
def test_what_is_sound_is_as_it_was(state):
    for snapshot in STATES[state]():
        assert decode_snapshot(msgspec.msgpack.encode(snapshot)) == snapshot


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_stands_in_a_snapshot_it_can_be_shown(data):
    before, after = (msgspec.to_builtins(Run(rollouters=2, gpus=True).at(t)) for t in (40.0, 50.0))
    for plain in (before, after):
        places = sorted((path for path in leaves(plain) if path), key=str)
        for path in data.draw(st.lists(st.sampled_from(places), max_size=4, unique=True)):
            with contextlib.suppress(KeyError, IndexError, TypeError):
                put(plain, path, copy.copy(data.draw(st.sampled_from(ODD))))
    history, seen = History(), []
    for plain in (before, after):
        with contextlib.suppress(msgspec.DecodeError):
            seen.append(decode_snapshot(msgpack.packb(plain)))
            history.add(seen[-1])
    spans(seen)
    if history.newest is None:
        return
    document = build(history)
    assert page(document, 120, UNICODE)
    for actor in document.actors:
        assert detail(document, actor.name, [], 100, UNICODE)
    jsonschema.Draft202012Validator(json_schema()).validate(json.loads(to_json(document)))


def test_a_figure_that_is_none_is_not_told_and_the_others_are():
    snapshot = Run().at(40.0)
    actor = msgspec.structs.replace(snapshot.actors[1], figures={"a": NAN, "b": INF, "c": 3.0, "d": 1e300}, cpu=NAN)
    lines = [{"kind": "train", "step": 1, "reward/mean": NAN, "time/step_s": 2.0}, {"kind": "train", "step": "2"}]
    found = decode_snapshot(msgspec.msgpack.encode(msgspec.structs.replace(snapshot, actors=[actor], train=lines)))
    assert found.actors[0].figures == {"c": 3.0} and found.actors[0].cpu == 0.0
    assert found.train == [{"kind": "train", "step": 1, "time/step_s": 2.0}]


@pytest.mark.parametrize("name", ["rollouter/x", "rollouter/", "rollouter", "rollouter/1/2", "rollouter/\u0663", ""])
def test_who_is_not_named_as_an_actor_is_none(name):
    snapshot = Run().at(40.0)
    strange = msgspec.structs.replace(snapshot.actors[-1], name=name)
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(snapshot, actors=[*snapshot.actors, strange]))
    assert decode_snapshot(encoded) == snapshot


def test_a_snapshot_that_is_nested_too_deeply_is_refused():
    plain = msgspec.to_builtins(Run().at(40.0))
    plain["evals"][0]["here"] = "it is"
    nested = msgpack.packb(plain).replace(msgpack.packb("it is"), b"\x91" * 100_000 + b"\x01")
    with pytest.raises(msgspec.DecodeError):
        decode_snapshot(nested)
    assert decode(zstandard.compress(nested)) is None


def test_a_frame_that_says_to_be_large_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(recording, "LARGEST_SNAPSHOT_BYTES", 1 << 20)
    bomb = zstandard.compress(b"\0" * (1 << 21))
    unpacked = []
    real = zstandard.ZstdDecompressor

    class Watched:
        def decompress(self, *words, **more):
            unpacked.append(len(real().decompress(*words, **more)))

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Watched)
    assert decode(bomb) is None and not unpacked
    monkeypatch.setattr(zstandard, "ZstdDecompressor", real)
    untold = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0" * (1 << 21))
    assert decode(untold) is None
    # A header that promises 8 GB, and nothing behind it.
    assert decode(b"\x28\xb5\x2f\xfd\xe0" + (1 << 33).to_bytes(8, "little") + b"\x01\x00\x00") is None


def test_an_entry_without_a_time_takes_only_itself(tmp_path):
    recorder = Recorder(tmp_path, 1, 1 << 20)
    body = msgspec.msgpack.encode(Run().at(40.0))
    for wall in (NAN, WALL, INF, 1e300, -1.0, WALL + 1):
        recorder.record(wall, body)
    assert [wall for wall, _ in read_bodies(tmp_path)] == [WALL, WALL + 1]
