"""The end of a log, now and at an earlier moment."""

import json
import math
from datetime import UTC, datetime

import pytest

from asyncrl.top import detail
from asyncrl.top.detail import last_lines

BEGAN = 1_790_000_000.0


def line(second):
    stamp = datetime.fromtimestamp(BEGAN + second, UTC).isoformat().replace("+00:00", "Z")
    return json.dumps({"event": f"at {second}", "level": "info", "timestamp": stamp})


@pytest.fixture
def written(tmp_path):
    def write(lines):
        path = tmp_path / "logs" / "attempt_1" / "learner-0.log"
        path.parent.mkdir(parents=True)
        path.write_text("".join(f"{each}\n" for each in lines))
        return lambda until=math.inf: last_lines(tmp_path, 1, "learner/0", until)

    return write


@pytest.mark.parametrize("seconds", [3, 500, 10_000])
def test_a_log_read_up_to_a_time_ends_at_that_time(written, seconds):
    lines = [line(second) for second in range(seconds)]
    read = written(lines)
    for until in {-1, 0, 1, seconds // 3, seconds // 2, seconds - 2, seconds - 1, seconds + 9}:
        assert read(BEGAN + until + 0.5) == lines[: until + 1][-detail.LOG_LINES :], until
    assert read() == lines[-detail.LOG_LINES :]


def test_output_without_a_timestamp_belongs_to_the_line_before(written):
    printed = ["Traceback (most recent call last):", *[f"  frame {n}" * 40 for n in range(2000)]]
    read = written([line(1), line(2), *printed, "{}", '{"timestamp": 3}', line(9), line(10)])
    assert read(BEGAN + 5) == [*printed, "{}", '{"timestamp": 3}'][-detail.LOG_LINES :]
    assert read(BEGAN + 1) == [line(1)]
    assert read(BEGAN + 9)[-1] == line(9)


def test_the_end_of_a_last_line_longer_than_the_read_limit_is_shown(written):
    long = line(2).replace("at 2", "at 2" + "x" * detail.LOG_BYTES)
    read = written([line(1), long, line(3)])
    assert read(BEGAN + 2.5) == [long[-detail.LOG_BYTES + 1 :]]
    assert read() == [line(3)]


@pytest.fixture
def looked_at(monkeypatch):
    """Sizes of the lines in which a timestamp was looked for."""
    sizes, loads = [], json.loads
    monkeypatch.setattr(detail.json, "loads", lambda text: sizes.append(len(text)) or loads(text))
    return sizes


def test_only_a_small_part_of_a_long_log_is_read(written, looked_at):
    lines = [line(second) for second in range(20_000)]
    assert written(lines)(BEGAN + 12_345)[-1] == lines[12_345]
    assert sum(looked_at) < 3 * detail.LOG_BYTES


def test_a_long_part_without_timestamps_is_read_once(written, looked_at):
    printed = ["of another user " * 10] * 25_000
    read = written([line(1), *printed, line(5), *printed, line(9)])
    assert read(BEGAN + 6) == printed[: detail.LOG_LINES]
    assert sum(looked_at) < 2 * sum(len(each) + 1 for each in printed) + 20 * detail.PROBE


def test_a_missing_log_and_an_empty_log_have_no_lines(written, tmp_path):
    assert last_lines(tmp_path, 1, "learner/1", 0.0) is None
    read = written([])
    assert read() == [] and read(BEGAN) == []
