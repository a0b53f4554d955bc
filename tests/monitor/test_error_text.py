import subprocess
import sys
from pathlib import Path

CODE = """
from asyncrl.monitor.logging import write_text
write_text("stacks of reward/0:\\n  é\\n" * 3)
"""


def test_text_for_people_is_written_as_it_is(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as log:
        subprocess.run([sys.executable, "-c", CODE], stderr=log, check=True, timeout=60)
    assert (tmp_path / "log").read_text() == "stacks of reward/0:\n  é\n" * 3


def test_a_full_disk_takes_the_text_and_nothing_else() -> None:
    """Neither the writer nor the end of its process fails for it."""
    with open("/dev/full", "wb") as full:
        assert subprocess.run([sys.executable, "-c", CODE], stderr=full, check=False, timeout=60).returncode == 0
