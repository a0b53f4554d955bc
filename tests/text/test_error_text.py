"""Text for people and lines of the log on standard error, also where nothing more can be written there."""

import subprocess
import sys
from pathlib import Path

CODE = """
from asyncrl.telemetry.logging import configure_logging, get_logger, lost_lines, write_text
write_text("stacks of reward/0:\\n  é\\n" * 3)
configure_logging("info")
get_logger("reward/0").info("one")
get_logger("learner/0").info("two")
print(lost_lines())
"""


def test_text_is_written_as_it_is_and_a_full_disk_takes_it_and_nothing_else(tmp_path: Path) -> None:
    """Neither the writer nor the end of its process fails for it, and lines that find no room are counted."""
    for place, lost in (("/dev/full", "2"), (tmp_path / "log", "0")):
        with open(place, "wb") as errors:
            argv = [sys.executable, "-c", CODE]
            made = subprocess.run(argv, stdout=subprocess.PIPE, stderr=errors, text=True, check=True, timeout=60)
        assert made.stdout.split() == [lost]
    assert (tmp_path / "log").read_text().startswith("stacks of reward/0:\n  é\n" * 3)
