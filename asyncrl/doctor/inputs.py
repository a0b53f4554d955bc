"""The user's own part: the first row of each set of prompts, and the reward function.

The function's module may print, hang or end the process while it is imported, so that happens in a process of its own
(``rewarding``), under a deadline.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import msgspec

from asyncrl.config import Config
from asyncrl.config.training import DataConfig, RewardConfig
from asyncrl.dataloader.rows import BadRow, check_row
from asyncrl.dataloader.sources import open_source
from asyncrl.doctor.findings import Finding, fail, listed, ok, warn
from asyncrl.errors import ConfigError, DataError
from asyncrl.launcher.processes import kill_group
from asyncrl.runtime.supervision import describe_exit
from asyncrl.tokenizer import Tokenizer, load_tokenizer

REWARD_ARGV = (sys.executable, "-m", "asyncrl.doctor.rewarding")
IMPORT_S = 60.0


def check_data(config: Config) -> list[Finding]:
    """A finding for the training prompts and for each set of evaluation."""
    try:
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except ConfigError:
        # The check of the model tells it; rows can be read all the same.
        tokenizer = None
    sets = {"data": config.data} | {f"eval.{name}.data": each.data for name, each in config.eval.items()}
    return [_check_set(key, data, tokenizer) for key, data in sets.items()]


def _check_set(key: str, data: DataConfig, tokenizer: Tokenizer | None) -> Finding:
    try:
        name, rows, prompt_key = open_source(data)
        first = next(rows, None)
        if first is None:
            return fail("data", f"{key}: {name} holds no row", f"set {key}.path to the prompts")
        prompt, _ = check_row(first, prompt_key)
    except DataError as error:
        return fail("data", f"{key}: {error}", f"correct {key}, or put the data there on this host")
    except BadRow as error:
        told, fix = f"{key}: {first.path}:{first.line}: {error}" if first else str(error), f"mend it, or set {key}"
        if data.on_bad_row == "skip":
            return warn("data", f"{told}; it is left out", fix)
        return fail("data", told, f'{fix}.on_bad_row = "skip"')
    if tokenizer is None:
        return ok("data", f"{key}: the first row of {name} can be read")
    try:
        ids, _ = tokenizer.encode_prompt(prompt, data.template, data.system)
    except (ValueError, ConfigError) as error:
        return fail("data", f"{key}: {first.path}:{first.line}: {error}", f"set {key}.template to what the rows hold")
    told = f"{key}: the first row of {name} is a prompt of {len(ids)} tokens"
    if len(ids) > data.max_prompt_tokens:
        fix = f"raise {key}.max_prompt_tokens, or shorten the prompts"
        return warn("data", f"{told}, over {data.max_prompt_tokens}: it would be quarantined", fix)
    return ok("data", told)


def check_reward(reward: RewardConfig, argv: tuple[str, ...] = REWARD_ARGV, timeout_s: float = IMPORT_S) -> Finding:
    """Whether the function can be imported and takes what it is given."""
    fix = "correct reward.function and reward.options; the module has to be installed or lie where you launch"
    section = msgspec.json.encode(reward.model_dump(mode="json"))
    # Files, not pipes: those would stay open as long as anything that the module has started.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        given.write(section)
        given.seek(0)
        with subprocess.Popen(argv, stdin=given, stdout=out, stderr=errors, start_new_session=True) as importing:
            try:
                importing.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return fail("reward", f"importing {reward.function} takes more than {timeout_s:g} s", fix)
            finally:
                kill_group(importing.pid)
        out.seek(0)
        errors.seek(0)
        answer, said = out.read(), errors.read().decode(errors="replace").strip().splitlines()
    try:
        problems = msgspec.json.decode(answer, type=list[str])
    except msgspec.DecodeError:
        told = f"importing {reward.function}: {describe_exit(importing.returncode)}"
        return fail("reward", told + "".join(f": {line}" for line in said[-1:]), fix)
    if problems:
        return fail("reward", listed(problems), fix)
    return ok("reward", f"{reward.function} can be called")
