"""Checks of the models that only score, the reference and the teacher.

They must be whole, not quantized, and have the policy's tokens. A sequence goes to them as ids. With another tokenizer
each log-prob would belong to another word, and no later check would notice. So the check compares the token of
each id. A scoring model may have more tokens than the policy, and more embedding rows than tokens. If the teacher
is on a server, the check compares the text that the server gives for the ids of a sample. Then it asks for log-probs of
these ids and of the policy's highest id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.core.errors import ConfigError
from asyncrl.core.model_files import read_settings, text_config
from asyncrl.data.rows import fetch_advice
from asyncrl.launcher.checks.findings import Finding, fail, ok, warn
from asyncrl.launcher.checks.model import check_model
from asyncrl.learner.groups.teacher import TeacherClient, TeacherFailed
from asyncrl.text.tokenizer import Tokenizer, load_tokenizer

REFERENCE, TEACHER = "learner.kl.path", "learner.teacher"
SAMPLES = ("Let f(x) = 3x^2 + 17.\n\nÄpfel, naïve 日本語: 'quoted' <b>words</b>\t42 %", "a", "0")
"""Texts to encode, in order of preference; a toy vocabulary cannot encode the first."""
ASK_S = 20.0
"""Deadline for all requests to a server (s)."""
OTHERS = "take a model with the policy's own tokenizer, for example a larger one of its family"


def check_scoring_models(config: Config, tokenizer: Tokenizer) -> list[Finding]:
    """Return a finding for each configured model that only scores."""
    learner, findings = config.learner, []
    if learner.backend == "sim" or config.model.path is None:
        return []
    folders = {REFERENCE: reference_path(learner)}
    if learner.teacher_url is None:
        folders[TEACHER] = learner.teacher
    for key, path in folders.items():
        if path is None:
            continue
        finding, _ = check_model(path, key=key)
        if finding.result == "fail":
            findings.append(finding)
        elif problem := compare(Path(config.model.path), Path(path), tokenizer):
            fix = OTHERS if Path(path).is_dir() else fetch_advice(path, key) or OTHERS
            findings.append(fail("tokenizer", problem, fix, key=key))
        else:
            findings.append(ok("tokenizer", f"{path} has the policy's tokens", key=key))
    if learner.teacher_url is not None:
        findings.append(asyncio.run(check_server(learner.teacher_url, config, tokenizer)))
    return findings


def reference_path(learner: LearnerConfig) -> str | None:
    """Return the folder of the reference model if the learner may load it; else None."""
    # A user's loss, named as "module:function", may ask for the reference even if the coefficient is 0.
    return learner.kl.path if learner.kl.coefficient or ":" in learner.loss else None


def compare(policy: Path, other: Path, tokenizer: Tokenizer) -> str:
    """Return how the tokens of the model in folder ``other`` differ from the policy's; empty if they do not.

    If both folders have a tokenizer.json, every id of the policy is compared, and a known vocab_size of ``other`` must
    exceed the highest. Else a sample text must encode to the same ids in both. Without a tokenizer in ``other``, its
    vocab_size must be the policy's. A folder without config.json differs too.
    """
    if not (other / "config.json").is_file():
        return f"{other} holds no config.json, so it is not a Hugging Face model folder"
    policy_tokens, other_tokens = tokens_of(policy), tokens_of(other)
    rows = _vocabulary(other)
    if policy_tokens is not None and other_tokens is not None:
        for id, token in sorted(policy_tokens.items()):
            if other_tokens.get(id) != token:
                found = repr(other_tokens[id]) if id in other_tokens else "none"
                return f"{other} has another tokenizer than model.path: id {id} is {token!r} here and {found} there"
        highest = max(policy_tokens, default=0)
        if rows and rows <= highest:
            return f"{other} has {rows} tokens in its vocab_size, and ids of the policy go up to {highest}"
        return ""
    try:
        other_tokenizer = load_tokenizer(str(other))
    except ConfigError:
        # A scoring model needs no tokenizer, and without one only the sizes can be compared.
        if rows == tokenizer.vocabulary:
            return ""
        return f"{other} holds no tokenizer, and {rows} tokens in its vocab_size where the policy has another number"
    text, ids = _sample(tokenizer)
    with contextlib.suppress(ValueError):
        if other_tokenizer.encode(text) == ids:
            return ""
    return f"{other} has another tokenizer than model.path: a sample becomes other ids"


def tokens_of(folder: Path) -> dict[int, str] | None:
    """Read the token of each id from tokenizer.json; None if the file is missing or has an unknown form."""
    try:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = content["model"]["vocab"]
        tokens = (
            {id: token for token, id in vocabulary.items()}
            if isinstance(vocabulary, Mapping)
            else {id: piece[0] for id, piece in enumerate(vocabulary)}
        )
        return tokens | {added["id"]: added["content"] for added in content.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


async def check_server(url: str, config: Config, tokenizer: Tokenizer) -> Finding:
    """Send a teacher's server each kind of request of a run.

    Fails if it does not answer, has another tokenizer than the policy, or refuses the run's longest sequences.
    """
    settings = config.learner.teacher_server
    client = TeacherClient(url, settings.model_copy(update={"timeout_s": min(settings.timeout_s, ASK_S)}))
    try:
        async with asyncio.timeout(ASK_S):
            name, context_length = await client.model()
            _, ids = _sample(tokenizer)
            served = await client.text(ids)
            await client.logprobs([*ids, highest_id(config, tokenizer)], np.arange(1, len(ids) + 1))
    except TeacherFailed as error:
        fix = "start the server, or correct the URL, learner.teacher_server.model or the key"
        return fail("teacher", error.reason, fix, key=TEACHER)
    except TimeoutError:
        return fail("teacher", f"{url} did not answer within {ASK_S:g} s", "look at the server's log", key=TEACHER)
    finally:
        await client.close()
    # Tokenizers with the same tokens may treat blanks differently.
    if served is not None and "".join(served.split()) != "".join((sent := tokenizer.decode(ids)).split()):
        text = f"{url} serves {name}, which has another tokenizer than model.path: ids of {sent!r} are {served!r} there"
        return fail("teacher", text, OTHERS, key=TEACHER)
    # Servers always sample one token more, which is thrown away.
    needed = config.longest_sequence + 1
    if context_length is not None and context_length < needed:
        text = f"{url} takes sequences of up to {context_length} tokens, and the longest of the run needs {needed}"
        return fail("teacher", text, "serve it with a larger window (--max-model-len)", key=TEACHER)
    if served is None:
        text = f"{url} serves {name} and scores, but does not show its tokens"
        return warn("teacher", text, "make sure that they are the policy's", key=TEACHER)
    return ok("teacher", f"{url} serves {name} and scores; the policy's ids are the same words there", key=TEACHER)


def _sample(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the first of SAMPLES that the tokenizer encodes, and its ids; else an empty text and id 0."""
    for text in SAMPLES:
        with contextlib.suppress(ValueError):
            if ids := tokenizer.encode(text):
                return text, ids
    return "", [0]


def highest_id(config: Config, tokenizer: Tokenizer) -> int:
    """Return the highest id of the policy's tokens."""
    tokens = tokens_of(Path(config.model.path)) if config.model.path is not None else None
    return max(tokens) if tokens else tokenizer.vocabulary - 1


def _vocabulary(folder: Path) -> int:
    """Read vocab_size from config.json; 0 if unknown."""
    size = text_config(read_settings(folder)).get("vocab_size")
    return size if isinstance(size, int) else 0
