"""Metrics of the code, over modules with known values."""

from pathlib import Path

from tools import code_figures
from tools.code_figures import Module

LONG = "\n".join(["def long():", *["    pass"] * 100])
FIRST = Module(
    Path("asyncrl/room/worker.py"),
    f'''"""What it is."""
# A comment.
import asyncrl.room.part

class Host:
    def __init__(self, call: "Callable[[], int]", name: str) -> None:
        """Of the host."""
        self._name = name

{LONG}
''',
)
SECOND = Module(Path("asyncrl/room/workers.py"), "class Host: pass  # twice\nsleep(host._name)\n")
PART = Module(Path("asyncrl/room/part.py"), "x = 1\n")
ALL = [FIRST, SECOND, PART]


def test_each_code_metric_matches_its_name():
    """Counts of three small modules."""
    assert FIRST.comments == SECOND.comments == 1
    assert code_figures.shared_class_names(ALL) == ["Host"]
    assert code_figures.fragments(ALL) == 1
    assert code_figures.private_accesses(ALL) == 1
    assert code_figures.sleeps(ALL) == 1
    assert code_figures.full_folders([Module(Path(f"asyncrl/full/m{i}.py"), "") for i in range(16)]) == [
        "asyncrl/full (16)"
    ]
    rows = dict(code_figures.package_rows(ALL))
    assert rows["functions over 100 lines"] == "1"
