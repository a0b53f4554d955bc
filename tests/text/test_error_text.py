import subprocess
import sys
from pathlib import Path

CODE = """
from asyncrl.telemetry.logging import write_text
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


LINES = """
from asyncrl.telemetry.logging import configure_logging, get_logger, lost_lines
configure_logging("info")
get_logger("reward/0").info("one")
get_logger("learner/0").info("two")
print(lost_lines())
"""


def test_lines_that_find_no_room_are_counted(tmp_path: Path) -> None:
    for place, lost in (("/dev/full", "2"), (tmp_path / "log", "0")):
        with open(place, "wb") as errors:
            made = subprocess.run(
                [sys.executable, "-c", LINES], stdout=subprocess.PIPE, stderr=errors, text=True, check=True, timeout=60
            )
        assert made.stdout.split() == [lost]
