"""The models that only score, the reference and the teacher: whole, not quantized, and with the policy's tokens.

The tokens of a sequence go to them as ids, so with another tokenizer each log-prob would be that of another word, and
no later check could tell. Compared is the token of each id; a scoring model may have more tokens than the policy and
rows for more than there are, as where its embedding is padded. A server is compared by the text of some ids, and is
asked to score these, with the policy's highest id as the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.checks.findings import Finding, fail, ok, warn
from asyncrl.checks.model import check_model
from asyncrl.config import Config
from asyncrl.config.training import LearnerConfig
from asyncrl.data.hub import fetch_advice
from asyncrl.errors import ConfigError
from asyncrl.teacher import TeacherClient, TeacherFailed
from asyncrl.tokenizer import Tokenizer, load_tokenizer

REFERENCE, TEACHER = "learner.kl.path", "learner.teacher"
SAMPLES = ("Let f(x) = 3x^2 + 17.\n\nÄpfel, naïve 日本語: 'quoted' <b>words</b>\t42 %", "a", "0")
"""Texts to be encoded; the first is for the vocabularies of all but toys."""
ASK_S = 20.0
"""Longest time for all that a server is asked here (s)."""
OTHERS = "take a model with the policy's own tokenizer, as a larger one of its family"


def check_frozen(config: Config, tokenizer: Tokenizer) -> list[Finding]:
    """A finding for each model that only scores."""
    learner, found = config.learner, []
    if learner.backend == "sim" or config.model.path is None:
        return []
    folders = {REFERENCE: reference_path(learner)}
    if learner.teacher_url is None:
        folders[TEACHER] = learner.teacher
    for key, path in folders.items():
        if path is not None:
            whole, _ = check_model(path, key=key)
            if whole.result == "fail":
                found.append(whole)
                continue
            problem = compare(Path(config.model.path), Path(path), tokenizer)
            told, fix = f"{path} has the policy's tokens", OTHERS
            if not Path(path).is_dir():
                fix = fetch_advice(path, key) or OTHERS
            found.append(fail("tokenizer", problem, fix, key=key) if problem else ok("tokenizer", told, key=key))
    if learner.teacher_url is not None:
        found.append(asyncio.run(check_server(learner.teacher_url, config, tokenizer)))
    return found


def reference_path(learner: LearnerConfig) -> str | None:
    """Folder of the reference, where one may be loaded from it: a loss of the user's may ask for it."""
    return learner.kl.path if learner.kl.coefficient or ":" in learner.loss else None


def compare(policy: Path, other: Path, tokenizer: Tokenizer) -> str:
    """Reason that ids of the policy are other tokens in the model of folder ``other``; empty if they are not."""
    if not (other / "config.json").is_file():
        return f"{other} holds no config.json, so it is not a Hugging Face model folder"
    ours, theirs = tokens_of(policy), tokens_of(other)
    rows = _vocabulary(other)
    if ours is not None and theirs is not None:
        for id, token in sorted(ours.items()):
            if theirs.get(id) != token:
                there = repr(theirs[id]) if id in theirs else "none"
                return f"{other} has another tokenizer than model.path: id {id} is {token!r} here and {there} there"
        highest = max(ours, default=0)
        if rows and rows <= highest:
            return f"{other} has {rows} tokens in its vocab_size, and ids of the policy go up to {highest}"
        return ""
    try:
        another = load_tokenizer(str(other))
    except ConfigError:
        # One that only scores needs no tokenizer; its size is all that can be told.
        if rows == tokenizer.vocabulary:
            return ""
        return f"{other} holds no tokenizer, and {rows} tokens in its vocab_size where the policy has another number"
    text, ids = _sample(tokenizer)
    try:
        same = another.encode(text) == ids
    except ValueError:
        same = False
    return "" if same else f"{other} has another tokenizer than model.path: a sample becomes other ids"


def tokens_of(folder: Path) -> dict[int, str] | None:
    """Token by id, as tokenizer.json tells; None where there is none that tells."""
    try:
        whole = json.loads((folder / "tokenizer.json").read_bytes())
        vocabulary = whole["model"]["vocab"]
        found = (
            {id: token for token, id in vocabulary.items()}
            if isinstance(vocabulary, Mapping)
            else {id: piece[0] for id, piece in enumerate(vocabulary)}
        )
        return found | {each["id"]: each["content"] for each in whole.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


async def check_server(url: str, config: Config, tokenizer: Tokenizer) -> Finding:
    """Ask the server of a teacher what a run will ask of it."""
    settings = config.learner.teacher_server
    client = TeacherClient(url, settings.model_copy(update={"timeout_s": min(settings.timeout_s, ASK_S)}))
    try:
        async with asyncio.timeout(ASK_S):
            name, longest = await client.model()
            _, ids = _sample(tokenizer)
            theirs = await client.text(ids)
            await client.logprobs([*ids, highest_id(config, tokenizer)], np.arange(1, len(ids) + 1))
    except TeacherFailed as error:
        fix = "start the server, or correct the URL, learner.teacher_server.model or the key"
        return fail("teacher", error.reason, fix, key=TEACHER)
    except TimeoutError:
        return fail("teacher", f"{url} has not answered within {ASK_S:g} s", "see what it does", key=TEACHER)
    finally:
        await client.close()
    # Tokenizers differ in what they make of blanks, and their tokens are the same.
    if theirs is not None and "".join(theirs.split()) != "".join((ours := tokenizer.decode(ids)).split()):
        told = f"{url} serves {name}, which has another tokenizer than model.path: ids of {ours!r} are {theirs!r} there"
        return fail("teacher", told, OTHERS, key=TEACHER)
    # One token is sampled and thrown away, since servers want that.
    need = config.longest_sequence + 1
    if longest is not None and longest < need:
        told = f"{url} takes sequences of up to {longest} tokens, and the longest of the run needs {need}"
        return fail("teacher", told, "serve it with a larger window (--max-model-len)", key=TEACHER)
    told = f"{url} serves {name} and scores"
    if theirs is None:
        return warn(
            "teacher", f"{told}, but does not tell its tokens", "make sure that they are the policy's", key=TEACHER
        )
    return ok("teacher", f"{told}; the policy's ids are the same words there", key=TEACHER)


def _sample(tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """A text and its ids, of which there is at least one."""
    for text in SAMPLES:
        with contextlib.suppress(ValueError):
            if ids := tokenizer.encode(text):
                return text, ids
    return "", [0]


def highest_id(config: Config, tokenizer: Tokenizer) -> int:
    """Highest id of the policy's tokens."""
    tokens = tokens_of(Path(config.model.path)) if config.model.path is not None else None
    return max(tokens) if tokens else tokenizer.vocabulary - 1


def _vocabulary(folder: Path) -> int:
    """vocab_size; 0 where it is not told."""
    try:
        model: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        return int((model.get("text_config") or model).get("vocab_size") or 0)
    except (OSError, ValueError, AttributeError):
        return 0
