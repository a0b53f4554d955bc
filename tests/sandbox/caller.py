"""``python caller.py isolated|plain HOST_PID PORT PRIVATE``: attacks from a sandbox, as a worker of a run starts it."""

import asyncio
import json
import os
import sys
from pathlib import Path

from asyncrl import sandbox
from asyncrl.workers import isolation


async def main() -> None:
    mode, *arguments = sys.argv[1:]
    if mode == "isolated":
        isolation.isolate([os.path.dirname(arguments[2])])
    program = {"attacker.py": Path(__file__).with_name("attacker.py").read_text()}
    result = await sandbox.run_async(["python3", "attacker.py", *arguments], program, timeout=60.0)
    print(json.dumps({"done": json.loads(result.stdout or "null"), "code": result.exit_code, "errors": result.stderr}))


if __name__ == "__main__":
    asyncio.run(main())
