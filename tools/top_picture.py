"""``python -m tools.top_picture RUN`` draws docs/figures/top.svg: asyncrl-top over the recording of a run folder.

    asyncrl-launch configs/sim-64.toml --rollout.replicas 8 --learner.groups_per_step 16 --learner.steps 80
    python -m tools.top_picture runs/sim-64

Invariant: the same recording gives the same picture. It names no host of the run, shows times in UTC, and loads no font
from anywhere. Fails with UsageError where nothing is recorded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from asyncrl.core.errors import UsageError
from asyncrl.messages.monitor import Snapshot
from asyncrl.top.app import Top
from asyncrl.top.replay import SnapshotSource, open_replay
from asyncrl.top.view import History

PICTURE = Path(__file__).parent.parent / "docs" / "figures" / "top.svg"
SIZE = (150, 40)
"""Columns and rows: the least terminal on which all panes stand side by side."""
MOMENT = 0.7
"""Share of the recording at which the picture is taken."""
LOOKS = 40
LOOK_S = 0.05


def moment(run_dir: Path) -> History:
    """The snapshots that the picture is drawn from, without the names of hosts."""
    replay = open_replay(run_dir, lives=False)
    replay.jump(replay.begin + MOMENT * (replay.end - replay.begin))
    shown = History()
    for each in replay.history().window():
        shown.add(without_hosts(each.snapshot))
    return shown


def without_hosts(snapshot: Snapshot) -> Snapshot:
    """The snapshot with hosts named node0, node1 and so on, in fields and in the text of events."""
    hosts = [*dict.fromkeys(actor.host for actor in snapshot.actors if actor.host), *snapshot.run.lost_hosts]
    names = {host: f"node{at}" for at, host in enumerate(dict.fromkeys(hosts))}
    # Longest first: one host's name may begin with that of another.
    any_host = re.compile(
        "|".join(rf"\b{re.escape(host)}\b" for host in sorted(names, key=len, reverse=True)) or r"\Z\A"
    )
    return replace(
        snapshot,
        run=replace(snapshot.run, lost_hosts=[names[host] for host in snapshot.run.lost_hosts]),
        actors=[replace(actor, host=names.get(actor.host, "")) for actor in snapshot.actors],
        events=[
            replace(event, text=any_host.sub(lambda found: names[found[0]], event.text)) for event in snapshot.events
        ],
    )


async def picture(history: History) -> str:
    """The terminal over these snapshots, as SVG."""
    app = Top(SnapshotSource(history=history))
    async with app.run_test(size=SIZE) as pilot:
        before, drawn = "", app.export_screenshot(simplify=True)
        for _ in range(LOOKS):
            if drawn == before:
                break
            await pilot.pause(LOOK_S)
            before, drawn = drawn, app.export_screenshot(simplify=True)
        else:
            raise RuntimeError(f"asyncrl-top still drew something else after {LOOKS} looks, {LOOK_S} s apart")
    local = re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)
    return "\n".join(line.rstrip() for line in local.splitlines()).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.top_picture", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run that has ended")
    given = parser.parse_args(argv)
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        PICTURE.write_text(asyncio.run(picture(moment(given.run))))
    except UsageError as error:
        print(f"top_picture: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
