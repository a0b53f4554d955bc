"""A process that answers once, under a deadline: the user's files and code are looked at there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Sequence

from asyncrl.runtime.lifecycle.supervision import describe_exit

END_S = 5.0


async def ask_process(argv: Sequence[str], order: bytes, limit_s: float) -> tuple[bytes, str]:
    """Its answer to ``order``, and how it ended, with its last words. It ends here, with what it has started.

    Raises TimeoutError.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        # A file cannot fill up as a pipe does where the process does not read its order.
        given.write(order)
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=given, stdout=asyncio.subprocess.PIPE, stderr=errors, process_group=0
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(limit_s):
                answer = await process.stdout.read()
                await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
    code = process.returncode
    return answer, ": ".join([describe_exit(-9 if code is None else code), *last])
