"""What the tests of the monitor share."""

import time

import pytest


@pytest.fixture
def utc(monkeypatch):
    """Times of the day are those of UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
