"""The spool: what was finished is delivered after a restart; a disk that fails costs only what is on it."""

import asyncio
import errno
import io

import pytest
from harness import Net
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouter_cases import Dataloader, Learner, living
from test_group_file import same
from test_messages import make_group

from asyncrl.rollouter import spool as spool_module
from asyncrl.rollouter.spool import SpoolFile
from asyncrl.runtime import peer as peer_module


def reopened(spool, path, attempt=0):
    spool.close(remove=False)
    return SpoolFile(path, attempt)


@settings(max_examples=60, deadline=None)
@given(script=st.lists(st.tuples(st.sampled_from(["add", "add", "done", "reopen"]), st.integers(0, 5)), max_size=30))
def test_the_file_holds_what_was_added_and_not_done(tmp_path_factory, script):
    path = tmp_path_factory.mktemp("spool") / "spool" / "rollouter-0.msgpack"
    spool, model = SpoolFile(path, 0), {}
    for tokens, (what, number) in enumerate(script, 2):
        uid = f"0-{number}"
        if what == "add":
            model.pop(uid, None)
            model[uid] = make_group(uid, tokens=tokens)
            spool.add(model[uid])
        elif what == "done":
            model.pop(uid, None)
            spool.done(uid)
        else:
            spool = reopened(spool, path)
        assert spool.uids == list(model)
        assert all(same(spool.read(uid), group) for uid, group in model.items())
        assert (spool.size == 0) == (not model)
    spool = reopened(spool, path)
    assert spool.uids == list(model) and not spool.problem
    spool.close(remove=True)
    assert list(path.parent.iterdir()) == []


def test_the_file_is_emptied_when_nothing_is_left_to_deliver(tmp_path):
    path = tmp_path / "spool.msgpack"
    spool = SpoolFile(path, 3)
    empty = path.stat().st_size
    for _ in range(3):
        for n in range(4):
            spool.add(make_group(f"0-{n}"))
        for n in range(4):
            spool.done(f"0-{n}")
        assert path.stat().st_size == empty
    spool.close(remove=False)


def test_a_file_cut_anywhere_gives_what_was_whole_and_can_be_gone_on_with(tmp_path):
    path = tmp_path / "spool.msgpack"
    spool = SpoolFile(path, 0)
    ends = [path.stat().st_size]
    for n in range(3):
        spool.add(make_group(f"0-{n}"))
        ends.append(path.stat().st_size)
    spool.close(remove=False)
    data = path.read_bytes()
    for cut in range(0, len(data) + 1, 7):
        path.write_bytes(data[:cut])
        spool = SpoolFile(path, 0)
        whole = [f"0-{n}" for n in range(3) if ends[n + 1] <= cut]
        assert spool.uids == whole and not spool.problem
        spool.add(make_group("0-9"))
        spool = reopened(spool, path)
        assert spool.uids == [*whole, "0-9"]
        spool.close(remove=False)


def test_damage_costs_what_follows_it_and_is_told(tmp_path):
    path = tmp_path / "spool.msgpack"
    spool = SpoolFile(path, 0)
    spool.add(make_group("0-1"))
    middle = path.stat().st_size + 100
    spool.add(make_group("0-2"))
    spool.add(make_group("0-3"))
    spool.close(remove=False)
    data = bytearray(path.read_bytes())
    data[middle] ^= 1
    path.write_bytes(data)
    spool = SpoolFile(path, 0)
    assert spool.uids == ["0-1"]
    assert "record 3 is damaged" in spool.problem
    spool.add(make_group("0-4"))
    spool = reopened(spool, path)
    assert (spool.uids, spool.problem) == (["0-1", "0-4"], "")
    spool.close(remove=True)


def test_what_another_attempt_of_the_run_left_is_dropped(tmp_path):
    path = tmp_path / "spool.msgpack"
    spool = SpoolFile(path, 1)
    spool.add(make_group("0-1"))
    spool.close(remove=False)
    spool = SpoolFile(path, 2)
    assert spool.uids == [] and "attempt 1" in spool.problem
    spool = reopened(spool, path, 2)
    assert not spool.problem
    spool.close(remove=True)


def test_the_file_stays_bounded_while_something_is_always_left(tmp_path, monkeypatch):
    monkeypatch.setattr(spool_module, "WORTH_REWRITING_BYTES", 5000)
    path = tmp_path / "spool.msgpack"
    spool = SpoolFile(path, 0)
    largest = 0
    for n in range(100):
        spool.add(make_group(f"0-{n}"))
        spool.done(f"0-{n - 1}")
        largest = max(largest, path.stat().st_size)
    assert largest < 5000 + 5 * spool.size
    spool = reopened(spool, path)
    assert spool.uids == ["0-99"]
    monkeypatch.setattr(spool_module, "MAX_BYTES", spool.size + 10)
    with pytest.raises(OSError, match="is full"):
        spool.add(make_group("0-100"))
    assert spool.uids == ["0-99"]
    spool.close(remove=True)


class FullDisk(io.FileIO):
    """Takes ``room`` bytes, and then no more."""

    room = 0

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = bytes(data)[: self.room]
        FullDisk.room -= len(part)
        return super().write(part)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path, monkeypatch, room):
    path = tmp_path / "spool.msgpack"
    spool = SpoolFile(path, 0)
    spool.add(make_group("0-1"))
    spool._file.close()
    spool._file = FullDisk(path, "r+b")
    monkeypatch.setattr(FullDisk, "room", room)
    with pytest.raises(OSError, match="No space left"):
        spool.add(make_group("0-2"))
    assert spool.uids == ["0-1"]
    FullDisk.room = 1 << 20
    spool.add(make_group("0-3"))
    spool = reopened(spool, path)
    assert (spool.uids, spool.problem) == (["0-1", "0-3"], "")
    spool.close(remove=True)


# --- in a rollouter ---


def run(main):
    asyncio.run(asyncio.wait_for(main, 60))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(peer_module, "REPEAT_S", 0.2)


def test_what_was_finished_before_a_restart_reaches_the_learner_before_the_dataloader_hears_of_it(tmp_path):
    """I1: else its prompts would be granted again."""

    async def main():
        async with Net(memory=True) as net:
            learner, dataloader = Learner(open=False), Dataloader()
            net.serve(learner, "learner/0", 1)
            net.serve(dataloader, "dataloader/0", 1)
            async with living(net, tmp_path, spool=True) as first:
                first.gates["0-3"] = asyncio.Event()
                dataloader.grant("0-1", "0-2", "0-3")
                await first.until(lambda: sorted(learner.uids) == ["0-1", "0-2"])
                assert first.rollouter.counters["rollout/spool_groups"] == 2
            learner.uids.clear()
            learner.came.clear()
            net.replaced.clear()
            second = asyncio.create_task(_started(net, tmp_path))
            await learner.came.wait()
            await asyncio.sleep(0.1)
            assert not second.done()
            assert ("rollouter/0", 1) not in net.replaced[1:], "the dataloader would ask for orphans now"
            assert all(caller.incarnation == 1 for caller in dataloader.callers)
            learner.open.set()
            life = await second
            assert sorted(learner.uids) == ["0-1", "0-2"]
            await life.until(lambda: any(caller.incarnation == 2 for caller in dataloader.callers))
            assert life.rollouter.counters["rollout/spool_recovered"] == 2
            dataloader.grant("0-4")
            await life.until(lambda: "0-4" in learner.uids and not life.held)
            await life.until(lambda: life.rollouter.counters["rollout/spool_groups"] == 0)
            await life.drain()
            assert list((tmp_path / "spool").iterdir()) == []
            await life.die()

    run(main())


async def _started(net, path, **options):
    from rollouter_cases import Life

    return await Life(net, path, incarnation=2, spool=True, **options).ready()


def test_a_disk_that_is_full_costs_only_the_spool(tmp_path):
    async def main():
        async with Net(memory=True) as net:
            learner, dataloader = Learner(), Dataloader()
            net.serve(learner, "learner/0", 1)
            net.serve(dataloader, "dataloader/0", 1)
            async with living(net, tmp_path, spool=True) as life:
                file = life.rollouter._spool._file
                file._file.close()
                file._file = FullDisk(file._path, "r+b")
                FullDisk.room = 0
                dataloader.grant("0-1")
                await life.until(lambda: learner.uids == ["0-1"] and not life.held)
                assert life.rollouter.counters["rollout/spool_failed"] == 1

    run(main())


def test_a_spool_that_cannot_be_opened_costs_only_the_spool(tmp_path):
    async def main():
        (tmp_path / "spool").write_text("in the way")
        async with Net(memory=True) as net:
            learner, dataloader = Learner(), Dataloader()
            net.serve(learner, "learner/0", 1)
            net.serve(dataloader, "dataloader/0", 1)
            async with living(net, tmp_path, spool=True) as life:
                assert life.rollouter.counters["rollout/spool_failed"] == 1
                dataloader.grant("0-1")
                await life.until(lambda: learner.uids == ["0-1"] and not life.held)

    run(main())


def test_without_a_spool_nothing_is_written(tmp_path):
    async def main():
        async with Net(memory=True) as net:
            learner, dataloader = Learner(), Dataloader()
            net.serve(learner, "learner/0", 1)
            net.serve(dataloader, "dataloader/0", 1)
            async with living(net, tmp_path) as life:
                dataloader.grant("0-1")
                await life.until(lambda: learner.uids and not life.held)
        assert list(tmp_path.iterdir()) == []

    run(main())
