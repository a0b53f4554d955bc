"""Findings: what is printed and what programs get."""

import json

import pytest

from asyncrl.disk import in_bytes
from asyncrl.preflight.findings import CHECKS, as_json, as_lines, exit_code, fail, in_order, ok, on_host, warn

FINE, ODD, BAD = (
    ok("shm", "enough", "a"),
    warn("clock", "late", "set it", "b"),
    fail("placement", "no room", "ask less", key="rollout"),
)


def test_the_json_is_a_list_of_objects_with_six_texts():
    found = json.loads(as_json([FINE, ODD, BAD]))
    assert found == [
        {"host": "a", "check": "shm", "result": "ok", "detail": "enough", "fix": "", "key": ""},
        {"host": "b", "check": "clock", "result": "warn", "detail": "late", "fix": "set it", "key": ""},
        {"host": "", "check": "placement", "result": "fail", "detail": "no room", "fix": "ask less", "key": "rollout"},
    ]
    assert json.loads(as_json([])) == []
    assert [exit_code(found) for found in ([], [FINE, ODD], [BAD, ODD])] == [0, 0, 1]


def test_a_line_each_says_what_to_do_and_a_last_one_counts():
    rows = as_lines([FINE, ODD, fail("model", "two\nlines", "mend\nit", key="model.path")])
    assert len(rows) == 4
    assert rows[0].split() == ["ok", "a", "shm", "enough"]
    assert rows[1].endswith("late; fix: set it")
    assert rows[2].startswith("fail  all hosts  model") and rows[2].endswith("model.path: two lines; fix: mend it")
    assert rows[3] == "1 ok, 1 warn, 1 fail"


def test_order_is_by_host_and_then_by_check():
    found = [*on_host("b", [ok(check, "") for check in reversed(CHECKS)]), FINE, BAD]
    placed = in_order(found, ["b", "a"])
    assert [one.check for one in placed] == ["placement", *CHECKS, "shm"]
    assert [one.host for one in placed] == ["", *["b"] * len(CHECKS), "a"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes(count, text):
    assert in_bytes(count) == text
