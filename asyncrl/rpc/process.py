"""Runs one actor in this process: memory settings, logging, keys, heartbeats, and the actor's event loop."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import platform
import sys
import time
from pathlib import Path

from asyncrl.config.hub import localized
from asyncrl.config.load import config_from_json
from asyncrl.core.errors import AsyncRLError
from asyncrl.observe.logging import configure_logging, listen, write_text
from asyncrl.rpc.actor import Actor, ActorContext
from asyncrl.rpc.heartbeat import HeartbeatThread
from asyncrl.rpc.linux import age_s, raise_descriptor_limit
from asyncrl.rpc.wire.keys import load_credentials
from asyncrl.rpc.wire.zeromq import ZmqTransport

COLLECT_AFTER = 100_000
"""Number of new objects, less the freed ones, after which the garbage collector looks for cycles. A hundred calls in
flight exceed Python's default of 700. They are in no cycle, and the collector would scan all of them each time."""
OWN_MAPPING_BYTES = 32 << 20
"""Malloc maps a block of at least this size on its own, and unmaps it when freed. The memory of smaller blocks stays
with the process for the next burst. By itself glibc raises this threshold only as it frees larger blocks, so that early
bursts have page faults."""
SWITCH_S = 0.0001
"""Time for which a computing thread keeps the interpreter lock from the event loop (s). Each message releases the lock
once, so with Python's default of 5 ms a learner that packs a batch would handle only 200 messages a second."""
LAST_BEAT_S = 0.5
"""Longest time that the end of an actor waits for its last heartbeat."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt, from malloc.h."""


def run_actor(
    actor_class: type[Actor],
    *,
    name: str,
    run_dir: Path,
    controller: str | None,
    incarnation: int,
    attempt: int,
    is_optional: bool = False,
    host: str = "",
    private: str = "private",
    address: str = "",
) -> int:
    """Run this actor to its end. Returns the exit code of the process; raises any error that is no AsyncRLError.

    ``controller`` is the controller's address, None for the controller itself. ``host`` is the address to bind; empty
    for network.host. ``private`` is the name of the folder with the keys. ``address`` is that of the predecessor's
    server, if the actor should bind it again.
    """
    tune_memory()
    sys.setswitchinterval(SWITCH_S)
    # Each weight bucket that is held takes one or two descriptors, and the usual soft limit is 1,024.
    raise_descriptor_limit()
    config = localized(config_from_json((run_dir / "config.json").read_text()))
    configure_logging(config.log.level)
    credentials = load_credentials(run_dir / private, name, attempt)

    async def main() -> None:
        context = ActorContext(
            config=config,
            name=name,
            incarnation=incarnation,
            run_dir=run_dir,
            transport=ZmqTransport(credentials, max_message_bytes=config.network.max_message_bytes),
            credentials=credentials,
            controller=controller,
            attempt=attempt,
            is_optional=is_optional,
            bind_host=host,
            address=address,
            born=time.monotonic() - age_s(),
        )
        await live(actor_class(context), controller, LAST_BEAT_S)

    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(main())
    except AsyncRLError as error:
        write_text(f"{name}: {error}\n")
        return error.exit_code
    return 0


async def live(actor: Actor, controller: str | None, last_beat_s: float = 0.0) -> None:
    """Run an actor to its end, with measurements of this process and heartbeats to the ``controller``, if it has one.

    The last heartbeat waits for the controller at most ``last_beat_s`` seconds. Raises as ``Actor.main``.
    """
    listen(actor.events.add)
    actor.measure()
    heartbeat = None
    if controller is not None:
        heartbeat = HeartbeatThread(actor, controller, asyncio.get_running_loop())
        heartbeat.start()
    try:
        await actor.main()
    finally:
        if heartbeat is not None:
            heartbeat.stop(last_beat_s)
        actor.stop_measuring()


def tune_memory() -> None:
    """Tune Python's garbage collector and glibc's malloc for bursts of messages."""
    gc.set_threshold(COLLECT_AFTER)
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        # Twice the mmap threshold, as when glibc adjusts the two itself.
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * OWN_MAPPING_BYTES)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
