"""Runs a module in a process of its own, under a deadline, to read the user's files or call the user's code."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

from asyncrl.core.disk import in_bytes
from asyncrl.rpc.lifecycle.supervision import describe_exit
from asyncrl.workers import warden

END_S = 5.0
"""Seconds that the warden has to end the process and its descendants."""
READ_BYTES = 1 << 16
LONGEST_ANSWER_BYTES = 256 << 20
ERROR_BYTES = 1 << 16
"""Number of bytes at the end of standard error that are searched for its last line."""


async def ask_process(
    module: str, arguments: Sequence[str], order: bytes, limit_s: float, *, env: Mapping[str, str] | None = None
) -> tuple[bytes, str]:
    """Run ``python -m MODULE ARGUMENTS...`` with ``order`` as its standard input and ``env`` added to the environment.

    Returns its standard output, and how it ended with the last line of its standard error. Output over
    LONGEST_ANSWER_BYTES counts as empty. Raises TimeoutError after ``limit_s``. The process runs below a warden
    (workers/warden.py), which ends it and its descendants before this function returns or raises. A warden that does
    not end within END_S is killed.
    """
    with tempfile.TemporaryFile() as order_file, tempfile.TemporaryFile() as error_file:
        # The order is in a file, because a pipe would fill up if the process did not read it.
        order_file.write(order)
        order_file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *warden.command(module, *arguments)),
            stdin=order_file,
            stdout=asyncio.subprocess.PIPE,
            stderr=error_file,
            process_group=0,
            env={**os.environ, **(env or {})},
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(limit_s):
                answer = bytearray()
                while chunk := await process.stdout.read(READ_BYTES):
                    # One byte too many shows that the answer is too long; the rest is read and dropped.
                    answer += chunk[: LONGEST_ANSWER_BYTES + 1 - len(answer)]
                await process.wait()
        finally:
            if process.returncode is None:
                warden.end(process.pid)
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
        error_file.seek(max(0, error_file.seek(0, os.SEEK_END) - ERROR_BYTES))
        last = error_file.read().decode(errors="replace").strip().splitlines()[-1:]
    if len(answer) > LONGEST_ANSWER_BYTES:
        return b"", f"it wrote more than {in_bytes(LONGEST_ANSWER_BYTES)}"
    # None for a process that was just killed.
    code = process.returncode
    return bytes(answer), ": ".join([describe_exit(-9 if code is None else code), *last])
