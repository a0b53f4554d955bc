"""A file of prompts that grows while the run lives: what is read, and what a resumed run accepts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from harness import until
from serving_dataloader import A, Running, run, running, small_config

from asyncrl.config import Config
from asyncrl.config.training import DataConfig
from asyncrl.core.errors import DataError, RemoteError
from asyncrl.data.rows import GrowingFile
from asyncrl.dataloader import actor as actor_module
from asyncrl.dataloader.prompts import PromptSet, collect, load_dataset
from asyncrl.messages.ledger import Growth, Ledger, LedgerState
from asyncrl.text.tokenizer import ByteTokenizer

RUN = run


def line(number: int) -> str:
    return json.dumps({"prompt": f"prompt {number}"}) + "\n"


def write(path: Path, count: int) -> None:
    path.write_text("".join(map(line, range(count))))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# --- the file ---


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line(0).encode() + b"\n" + line(1).encode()[:5])
    file = GrowingFile(str(path))
    assert [(row.line, row.value) for row in file.read()] == [(1, {"prompt": "prompt 0"})]
    assert file.read() == []
    append(path, line(1)[5:] + "{broken\n" + line(3)[:-1])
    rows = file.read()
    assert [row.line for row in rows] == [3, 4]
    assert rows[0].value == {"prompt": "prompt 1"} and rows[1].problem.startswith("is not valid JSON")
    append(path, "\n")
    assert [row.line for row in file.read()] == [5]


def test_a_file_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, 3)
    file = GrowingFile(str(path))
    file.read()
    write(path, 2)
    with pytest.raises(DataError, match="has become shorter"):
        file.read()
    for content in (gzip.compress(b"{}"), b'[{"prompt": "a"}]'):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be followed"):
            GrowingFile(str(path)).read()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        GrowingFile(str(tmp_path / "gone.jsonl")).read()
    with pytest.raises(DataError, match="cannot be followed"):
        load_dataset(DataConfig(path=f"{tmp_path}/*", follow=True, source="parquet"))


def test_appended_rows_get_the_next_indices_and_leave_the_fingerprint_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def whole(**keys: Any) -> PromptSet:
        data = DataConfig(path=str(path), follow=True, max_prompt_tokens=8, **keys)
        prompts = PromptSet(load_dataset(data), data, ByteTokenizer())
        assert prompts.tokenize(99)
        return prompts

    write(path, 2)
    prompts, file = whole(on_bad_row="skip"), GrowingFile(str(path))
    before = prompts.fingerprint
    file.read()
    append(path, line(2) + "[]\n" + line(10) + line(3))
    prompts.extend(file.read())
    assert (len(prompts), prompts.skipped, prompts.oversize) == (5, 1, {3})
    assert (prompts.fingerprint_at(2), prompts.prompt(4)[1]) == (before, "prompt 3")
    assert whole(on_bad_row="skip").fingerprint == prompts.fingerprint_at(5)
    dataset = collect("", GrowingFile(str(path)).read(), DataConfig(on_bad_row="skip"))
    assert dataset.fingerprint == prompts.fingerprint_at(5)
    append(path, "{}\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:4: .* 1 more bad rows \(.*rows\.jsonl:7\).*on_bad_row"):
        whole()
    prompts.config = DataConfig(path=str(path))
    with pytest.raises(DataError, match=r"rows\.jsonl:7"):
        prompts.extend(file.read())


# --- the actor ---


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "FOLLOW_S", 0.01)


def following(path: Path, *, follow: bool = True, **data: Any) -> Config:
    return small_config(data={"source": "auto", "path": str(path), "follow": follow} | data, staleness={"max": 9})


async def read(it: Running, count: int) -> None:
    await until(lambda: it.actor.counters["prompts/read"] == count)


async def test_appended_rows_are_leased_from_the_next_epoch_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, 2)
    async with running(tmp_path, following(path)) as it:
        assert await it.leased(free=1) == ["0-0"]
        append(path, line(2))
        await read(it, 3)
        status = await it.status()
        assert [(each.epoch, each.prompts) for each in status.grown] == [(0, 2), (1, 3)]
        leases = (await it.lease(A, 5, seen=1, holding="0-0")).leases
        assert [lease.uid for lease in leases] == ["0-1", "1-0", "1-1", "1-2", "2-0"]
        assert leases[3].prompt == "prompt 2"


def grown(path: Path, *sizes: tuple[int, int]) -> list[Growth]:
    """Sizes of epochs, as a run over this file has recorded them."""
    data = DataConfig(path=str(path), follow=True)
    prompts = PromptSet(load_dataset(data), data, ByteTokenizer())
    prompts.tokenize(99)
    return [Growth(epoch, size, prompts.fingerprint_at(size)) for epoch, size in sizes]


async def test_a_resumed_run_accepts_appended_rows_and_refuses_changed_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, 5)
    known = grown(path, (0, 2), (1, 4))
    ledger = Ledger()
    ledger.record("trained", 0, 0)
    state = LedgerState(concluded=ledger.state.concluded, counts=ledger.state.counts, grown=known)
    where = {"ledger": state, "fingerprint": known[0].fingerprint, "seed": 0, "prompts": 2}
    async with running(tmp_path / "a", following(path), restore=False) as it:
        resumed = await it.restore(**where)
        assert (resumed.fingerprint, resumed.prompts) == (known[0].fingerprint, 2)
        assert [(each.epoch, each.prompts) for each in (await it.status()).grown] == [(0, 2), (1, 5)]
        assert (await it.leased(free=2)) == ["0-1", "1-0"]
    # A row that came later has changed, one of the first has, and rows are gone.
    for text in (line(0) + line(1) + line(2) + line(9), line(9) + line(1) + line(2) + line(3), line(0) + line(1)):
        path.write_text(text)
        async with running(tmp_path / "b", following(path), restore=False) as it:
            with pytest.raises(RemoteError, match="the prompts differ") as caught:
                await it.restore(**where)
            assert caught.value.code == "changed"
    path.write_text(line(9) + line(1))
    allowed = following(path).model_copy(update={"resume": small_config(resume={"allow": ["data"]}).resume})
    async with running(tmp_path / "c", allowed, restore=False) as it:
        assert (await it.restore(**where)).first_epoch == 1
        assert [(each.epoch, each.prompts) for each in (await it.status()).grown] == [(1, 2)]


async def test_a_run_may_begin_to_follow_its_file_when_it_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, 2)
    fingerprint = load_dataset(DataConfig(path=str(path))).fingerprint
    write(path, 3)
    where = {"fingerprint": fingerprint, "seed": 0, "prompts": 2}
    async with running(tmp_path / "a", following(path, follow=False), restore=False) as it:
        with pytest.raises(RemoteError, match="the prompts differ"):
            await it.restore(**where)
    ledger = Ledger()
    ledger.record("trained", 0, 0)
    async with running(tmp_path / "b", following(path), restore=False) as it:
        await it.restore(**where, ledger=ledger.state)
        assert [(each.epoch, each.prompts) for each in (await it.status()).grown] == [(0, 2), (1, 3)]
