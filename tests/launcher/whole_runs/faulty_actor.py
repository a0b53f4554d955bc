"""Real actors of which some meet a fault: python faulty_actor.py FAULTS_JSON NAME ..., as the entry of each process.

FAULTS_JSON maps an actor's name to what is wrong with it, while the file ``broken-ROLE-INDEX`` is in the run folder:

    {"cut": [PEER, ...]}   no TCP connection that it opens to these holds
    {"dies": true}         its process ends at its start, with exit code 3
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from cuts import Way

LOOK_S = 0.05


def mark(run_dir: Path, name: str) -> Path:
    """The file that makes the fault of an actor come and go."""
    return run_dir / f"broken-{name.replace('/', '-')}"


def cut_off(peers: list[str], broken: Path) -> None:
    """Have this process open its connections to these actors by ways that are cut while the file is there."""
    from asyncrl.wire.zeromq import ZmqTransport

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    connect = ZmqTransport.connect

    async def keep(way: Way) -> None:
        is_open = True
        while True:
            await asyncio.sleep(LOOK_S)
            if os.path.exists(broken) == is_open:  # noqa: ASYNC240
                is_open = not is_open
                if is_open:
                    await way.open()
                else:
                    way.cut()

    async def begin(target: str) -> tuple[str, Any]:
        way = Way(target)
        await way.open()
        if os.path.exists(broken):  # noqa: ASYNC240
            way.cut()
        # Kept by the loop alone, for as long as this process lives.
        return way.address, asyncio.ensure_future(keep(way))

    kept: list[Any] = []

    def connect_by_way(self: Any, address: str, routing_id: bytes, receive: Any, lost: Any, peer: str) -> Any:
        if peer in peers:
            attempt = address.partition("#")[2]
            address, task = asyncio.run_coroutine_threadsafe(begin(address), loop).result(10.0)
            kept.append(task)
            address += f"#{attempt}" if attempt else ""
        return connect(self, address, routing_id, receive, lost, peer)

    ZmqTransport.connect = connect_by_way  # type: ignore[method-assign]


def main() -> None:
    fault = json.loads(sys.argv.pop(1)).get(sys.argv[1], {})
    broken = mark(Path(sys.argv[sys.argv.index("--run") + 1]), sys.argv[1])
    if fault.get("dies") and broken.exists():
        sys.stderr.write("these are my last words\n")
        sys.stderr.flush()
        os._exit(3)
    if peers := fault.get("cut"):
        cut_off(peers, broken)
    from asyncrl.cli import actor

    actor._end(actor.main())


if __name__ == "__main__":
    main()
