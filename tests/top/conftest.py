"""What the tests of the monitor share."""

import os
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


@pytest.fixture
def forbid(monkeypatch):
    """``forbid(folder)``: it cannot be listed, as one of somebody else; root, who may all, cannot either."""

    def forbid(folder):
        def refusing(real):
            def list_it(path=".", *words):
                if os.fspath(path) == os.fspath(folder):
                    raise PermissionError(13, "Permission denied", os.fspath(path))
                return real(path, *words)

            return list_it

        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))

    return forbid
