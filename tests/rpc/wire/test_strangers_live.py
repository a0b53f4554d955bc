"""I6 on a whole run: its secrets stay in their folder, and no stranger is served at any port."""

import contextlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
import zmq.utils.z85
from rpc.wire.knocking import KNOWN, SIM_RUN, actors_of, guise_of, knock, listening, secrets_of, strangers

from tools.live_run import LiveRun, LogTail


class Shown:
    """All output of the processes of a run since their start."""

    def __init__(self, run):
        self._run, self.texts = run, {}
        """By place, the different contents that it had: a process that gives itself a title hides its environment."""

    def look(self):
        for pid in [process.pid for process in self._run.processes()] + [self._run.launcher.pid]:
            for what in ("environ", "cmdline"):
                with contextlib.suppress(OSError):
                    place = Path(f"/proc/{pid}/{what}")
                    self.texts.setdefault(str(place), set()).add(place.read_bytes())


def where_found(secrets, run, shown):
    """Every place outside the private folder that has one of the secrets, as text or as bytes."""
    needles = [secret.encode() for secret in secrets.values()]
    needles += [zmq.utils.z85.decode(secret) for secret in secrets.values() if len(secret) == 40]
    shown.look()
    texts = [(place, text) for place, seen in shown.texts.items() for text in seen]
    # Unlike Path.rglob it tolerates folders that are renamed meanwhile.
    files = [Path(folder, name) for folder, _, names in os.walk(run.folder) for name in names]
    for path in (path for path in files if "private" not in path.parts):
        # A temporary file may be gone.
        with contextlib.suppress(FileNotFoundError):
            texts.append((str(path), path.read_bytes()))
    return [place for place, text in texts if any(needle in text for needle in needles)]


@pytest.mark.parametrize("curve", ["required", pytest.param("off", marks=pytest.mark.slow)])
def test_i6_a_run_keeps_its_secrets_and_admits_no_stranger(tmp_path, curve):
    # It is stopped when all strangers have tried.
    tree = SIM_RUN | {"security": {"curve": curve}, "learner": SIM_RUN["learner"] | {"steps": 2000}}
    tree["rollout"] = SIM_RUN["rollout"] | {"replicas": 1}
    run = LiveRun(tree, tmp_path, env={"CANARY": "in the environment"})
    try:
        shown = Shown(run)
        run.until(lambda: shown.look() or run.step >= 2, "a few steps", 120)
        run.until(lambda: len(listening(list(actors_of(run).values()))) >= 7, "all to listen", 60)
        private = run.run_dir / "private"
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in private.iterdir()} == {0o600}
        actors, secrets = actors_of(run), secrets_of(private)
        assert len(actors) >= 7
        # One for each start of each actor. Commands that add and remove hosts, and viewers, have them too.
        assert len(set(secrets.values())) == len(secrets) == (4 * (len(actors) + 2) if curve == "required" else 1)
        assert where_found(secrets, run, shown) == []
        for pid in actors.values():
            # The search would have found them.
            assert f"/proc/{pid}/environ" in where_found({"": "CANARY=in the environment"}, run, shown)
            assert f"/proc/{pid}/cmdline" in where_found({"": str(run.run_dir)}, run, shown)

        open_ports = listening([process.pid for process in run.processes()] + [run.launcher.pid])
        assert set(open_ports) == set(actors.values()), "no other process listens"
        people, problems = {}, {}

        def visit(name):
            [(host, port)] = open_ports[actors[name]]
            assert host == "127.0.0.1"
            known = KNOWN.get(name.partition("/")[0])
            people[name] = strangers(guise_of(private, name, name), known and guise_of(private, known, name))
            with zmq.Context() as context:
                problems.update(knock(context, f"tcp://{host}:{port}", people[name], 30))

        with ThreadPoolExecutor(len(actors)) as pool:
            list(pool.map(visit, actors))
        assert problems == {}
        assert actors_of(run) == actors, "an actor was restarted"
        run.stop()
        assert where_found(secrets, run, shown) == []
    finally:
        run.close()
    for name, known in people.items():
        lines = LogTail(run, name).read()
        assert [line for line in lines if line["event"] == "handler failed"] == []
        [ended] = [line for line in lines if line["event"] == "ended" and "counters" in line]
        refused = [one for one in known if one.code not in (None, "hello_required")]
        assert ended["counters"]["wire/refused"] == len(refused), json.dumps(ended)
        assert ended["counters"]["wire/strangers"] >= len(known) - len(refused)
        assert ended["counters"]["wire/malformed"] == 0
    assert run.left() == []
