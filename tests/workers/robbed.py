"""``python robbed.py FOLDER MODE WAY``: has thief.py play in FOLDER, in a worker that is confined as a run's is.

MODE is security.isolate_user_code, WAY ``reward`` or ``keeper``. Prints the warning to the user and the loot (JSON).
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from asyncrl.config.operation import SecurityConfig
from asyncrl.config.training import RewardConfig
from asyncrl.messages.reward import Completion, Score
from asyncrl.reward.reward_pool import RewardPool
from asyncrl.rpc.wire.keys import make_keyring, write_credentials
from asyncrl.workers.confinement import Confinement, confine
from asyncrl.workers.process import WorkerProcess

sys.path.insert(0, str(Path(__file__).parents[1]))
from thief import MARK, prepare


async def by_reward(confined: Confinement) -> None:
    pool = RewardPool(RewardConfig(function="thief:reward", workers=1, timeout_s=60.0), max_tokens=1, confined=confined)
    try:
        await pool.start()
        completion = Completion(text="", finish_reason="stop", tokens=1)
        await pool.score(Score(uid="0-1", prompt="", row={}, completions=[completion]))
    finally:
        await pool.close()


async def by_program(confined: Confinement) -> None:
    reported: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()
    env = confined.env()
    keeper = WorkerProcess(
        "asyncrl.workers.keeper",
        json.dumps({"argv": [sys.executable, "thief.py"], "env": env, "files": {"TASK": "t"}}).encode(),
        confined=confined,
        max_frame_bytes=1 << 20,
        max_output_bytes=1 << 20,
        memory_key="",
        own_session=True,
        on_output=lambda _: None,
        on_frame=lambda frame: reported.set_result(json.loads(frame)),
        on_end=lambda *_: ended.set(),
    )
    try:
        assert (await reported)["code"] == 0
    finally:
        keeper.hang_up()
        await ended.wait()


async def main(folder: Path, mode: str, way: str) -> None:
    run, reported = folder / "run", []
    os.chdir(folder)
    os.environ["RUN_PASSWORD"] = os.environ["HF_TOKEN"] = os.environ["SANDBOX"] = MARK
    run.mkdir()
    keyring = make_keyring("id", ["rollouter/0"], attempts=1, curve=False)
    write_credentials(run / "private", keyring.files_of(["rollouter/0"]))
    # A process of ours with a secret.
    other = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", f"import time; print('{MARK}', flush=True); time.sleep(100)"], stdout=subprocess.PIPE
    )
    opened = os.open(run / "private" / "secret.json", os.O_RDONLY)
    os.set_inheritable(opened, True)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        prepare(folder, run / "private", another=other.pid, actor=os.getpid())
        security = SecurityConfig(isolate_user_code=mode, user_environment=["SANDBOX"])
        async with asyncio.timeout(60):
            confined = await confine(security, run, reported.append)
            await (by_reward if way == "reward" else by_program)(confined)
    finally:
        os.close(opened)
        other.kill()
        other.communicate()
    print(json.dumps({"reported": reported, "got": json.loads((folder / "loot").read_text())}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
