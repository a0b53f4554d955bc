"""``python -m tools.gpu_check``: whether asyncrl works on this host's GPUs, and how fast, in a few minutes.

Prints a line for each check: pass, fail, or skip with its reason. The exit code is 1 if a check failed.

``--json`` prints one JSON object. ``--only WORD`` runs the checks whose names contain a word. ``--into PAGE FILE`` puts
the results in a file into a page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools import kept
from tools.gpu_check.checks import CHECK_S, checks, device, longest_s, look, run_check
from tools.gpu_check.results import as_json, exit_code, put


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check",
        description=(__doc__ or "").partition("\n")[0],
        epilog=f"A check that hangs fails after {CHECK_S / 60:.0f} minutes: all take at most {longest_s() / 60:.0f}.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", default="", metavar="WORD", help="only checks whose name contains this word")
    parser.add_argument("--into", nargs=2, metavar=("PAGE", "JSON"), help="put the results of a file into a page")
    chosen = parser.parse_args(arguments)
    if chosen.into:
        page, report = map(Path, chosen.into)
        page.write_text(put(page.read_text(), json.loads(report.read_text())))
        return 0
    results = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-check-") as name:
        host = look(Path(name))
        for each, (gpus, check) in checks().items():
            if chosen.only in each:
                results.append(run_check(host, each, gpus, check))
                print(results[-1], file=sys.stderr if chosen.json else sys.stdout, flush=True)
        if chosen.json:
            print(json.dumps(as_json(device(host), results)))
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(kept.run(main))
