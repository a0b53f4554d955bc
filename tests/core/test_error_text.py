"""Text for people and lines of the log on standard error, also where nothing more can be written there."""

import json
import subprocess
import sys
from pathlib import Path

from disks import small_disk

CODE = """
from asyncrl.observe.logging import configure_logging, get_logger, lost_lines, write_text
write_text("stacks of reward/0:\\n  é\\n" * 3)
configure_logging("info")
get_logger("reward/0").info("one")
get_logger("learner/0").info("two" * 250_000)
get_logger("learner/0").info("three" * 100_000)
print(lost_lines())
"""
FILLING = """
import os, sys
from asyncrl.observe.logging import configure_logging, get_logger, lost_lines
configure_logging("info")
log = get_logger("reward/0")
for number in range(400):
    log.info("line", number=number)
os.unlink(sys.argv[1])
log.info("line", number=400)
print(lost_lines())
"""


def test_text_is_written_unchanged_and_a_full_disk_loses_it_without_an_error(tmp_path: Path) -> None:
    """Neither the writer nor the end of its process fails for it, and lines beyond those that are kept are counted."""
    for place, lost in (("/dev/full", "2"), (tmp_path / "log", "0")):
        with open(place, "wb") as errors:
            argv = [sys.executable, "-c", CODE]
            made = subprocess.run(argv, stdout=subprocess.PIPE, stderr=errors, text=True, check=True, timeout=60)
        assert made.stdout.split() == [lost]
    assert (tmp_path / "log").read_text().startswith("stacks of reward/0:\n  é\n" * 3)


def test_lines_without_disk_space_are_written_later_in_order_and_whole(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 16) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1 << 15))
        with open(disk / "log", "ab") as errors:
            argv = [sys.executable, "-c", FILLING, str(ballast)]
            made = subprocess.run(argv, stdout=subprocess.PIPE, stderr=errors, text=True, check=True, timeout=60)
        assert made.stdout.split() == ["0"]
        found = []
        for line in (disk / "log").read_text().splitlines():
            try:
                found.append(json.loads(line)["number"])
            except ValueError:
                assert line.startswith('{"'[: len(line)]), "at most the beginning of a line is torn"
        assert found == list(range(401))
