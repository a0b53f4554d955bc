"""Calls a function in a process of its own, under a deadline, to read the user's files or to call the user's code.

The process runs this module (``python -m asyncrl.launcher.checks.process MODULE:FUNCTION``). It reads the arguments of
the function from standard input, and writes what it returns to standard output, both in MessagePack. So arguments and
answers are structs and plain values. An argument may also be a section of the configuration.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec
from pydantic import BaseModel

from asyncrl.core.disk import in_bytes
from asyncrl.core.files import write_all
from asyncrl.rpc.lifecycle.supervision import describe_exit
from asyncrl.workers import warden

MODULE = "asyncrl.launcher.checks.process"
END_S = 5.0
"""Seconds that the warden has to end the process and its descendants."""
READ_BYTES = 1 << 16
LONGEST_ANSWER_BYTES = 256 << 20
ERROR_BYTES = 1 << 16
"""Number of bytes at the end of standard error that are searched for its last line."""
A = TypeVar("A")


class NoAnswer(Exception):
    """The process ended without an answer; the text says how, with the last line of its standard error."""


async def call(
    function: str, answer: type[A], limit_s: float, *, env: Mapping[str, str] | None = None, **arguments: Any
) -> A:
    """Call ``function``, MODULE:FUNCTION, in a process, with ``env`` added to its environment.

    Returns what the function returns. Raises TimeoutError after ``limit_s``, and NoAnswer if the process ends before
    or writes more than LONGEST_ANSWER_BYTES. The process runs below a warden (workers/warden.py), which ends it and its
    descendants before this function returns or raises. A warden that does not end within END_S is killed.
    """
    with tempfile.TemporaryFile() as order_file, tempfile.TemporaryFile() as error_file:
        # The order is in a file, because a pipe would fill up if the process did not read it.
        order_file.write(msgspec.msgpack.encode(arguments, enc_hook=_encode_section))
        order_file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *warden.command(MODULE, function)),
            stdin=order_file,
            stdout=asyncio.subprocess.PIPE,
            stderr=error_file,
            process_group=0,
            env={**os.environ, **(env or {})},
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(limit_s):
                data = bytearray()
                while chunk := await process.stdout.read(READ_BYTES):
                    # One byte too many shows that the answer is too long; the rest is read and dropped.
                    data += chunk[: LONGEST_ANSWER_BYTES + 1 - len(data)]
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
    if len(data) > LONGEST_ANSWER_BYTES:
        raise NoAnswer(f"it wrote more than {in_bytes(LONGEST_ANSWER_BYTES)}")
    try:
        return msgspec.msgpack.decode(data, type=answer)
    except msgspec.DecodeError:
        # A process that was just killed has no exit code yet.
        code = process.returncode
        raise NoAnswer(": ".join([describe_exit(-9 if code is None else code), *last])) from None


def _encode_section(section: BaseModel) -> str:
    return json.dumps(section.model_dump(mode="json"))


def _decode_section(section: type[Any], text: str) -> Any:
    return section.model_validate(json.loads(text))


def main() -> None:
    """Call the function that the command line names, in the process."""
    answers = os.dup(1)
    # Imported code may print: standard output now leads to standard error, and only ``answers`` to the caller.
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    parameters = get_type_hints(function)
    parameters.pop("return", None)
    order = msgspec.msgpack.decode(
        sys.stdin.buffer.read(), type=msgspec.defstruct("Order", parameters.items()), dec_hook=_decode_section
    )
    write_all(answers, msgspec.msgpack.encode(function(**msgspec.structs.asdict(order))))
    sys.stderr.flush()
    # A library's threads must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
