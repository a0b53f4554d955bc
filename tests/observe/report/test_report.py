"""The report of a run: one page that holds everything, and nothing of the run as markup."""

import html
import html.parser
import json
import math

import msgspec
import pytest
from recordings import record
from top.pictures import WALL, Run

from asyncrl.core.errors import UsageError
from asyncrl.core.states import STATES
from asyncrl.messages.monitor import Event, Resource
from asyncrl.observe.metrics_line import read_metrics
from asyncrl.observe.report import charts, report
from asyncrl.observe.report.charts import evenly, spans
from asyncrl.observe.report.report import write_report
from asyncrl.top.panes import page
from asyncrl.top.replay import open_replay
from asyncrl.top.view import History, SnapshotView

EVIL = "</script><script>alert(1)</script><img src=http://evil.example/x.png onerror=alert(2)>"
CONTROL = "\x1b]0;mine\x07\u202eabc"


def step(number, start=1, **figures):
    return {
        **{"kind": "train", "step": number, "start": start, "weights/version": number},
        **{"reward/mean": number / 10, "reward/trained_mean": number / 5, "rollout/tokens_per_s": 100.0},
        **{"staleness/token_mean": 1.0, "staleness/token_max": 2.0, "staleness/limit": 3.0, "perf/overlap": 0.9},
        **{"time/step_s": 2.0, "time/wait_for_groups_s": 0.5, "time/train_s": 1.0, "time/publish_s": 0.25},
        **{"rollout/length_mean": 50.0, "rollout/length_p95": 90.0, "weights/stall_s": 0.3},
        **{"loss/policy": 0.1, "policy/grad_norm": 0.5, "policy/entropy": 2.0, "policy/behaviour_kl": 1e-4},
        **{"policy/ess": 0.9, "learner/lr": 1e-6, "weights/gather_s": 0.1},
        **{"ledger/trained": 4 * number, "ledger/filtered": number, "ledger/quarantined": 0},
        **figures,
    }


def evaluation(number, name="gsm", start=1):
    return {"kind": "eval", "step": number, "start": start, f"eval/{name}/mean": 0.5, f"eval/{name}/prompts": 8}


def update(version, stall_s=0.1, transport="shm"):
    return {
        **{"kind": "update", "replica": "rollouter/0", "start": 1, "weights/version": version},
        **{"weights/stall_s": stall_s, "weights/transport": transport},
    }


@pytest.fixture
def run_dir(tmp_path):
    made = tmp_path / "trial"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"learner": {"steps": 8, "lr": 1e-6}, "model": {"path": EVIL}}))
    return made


def write_lines(run_dir, *lines):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.tags, self.text = [], []
        self.page = path.read_text()
        self.panels = []
        """Data of each, in order, as (number of its section, data)."""
        self._section = -1
        self.feed(self.page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._section += tag == "section"
        if "data-chart" in (known := dict(attrs)):
            self.panels.append((self._section, json.loads(known["data-chart"])))

    def handle_data(self, data):
        self.text.append(data)

    @property
    def figures(self):
        """Curves of each chart, by the number of its section."""
        found = {}
        for section, chart in self.panels:
            found.setdefault(section, []).extend(chart["curves"])
        return found


def written(run_dir, tmp_path):
    out = tmp_path / "out.html"
    write_report(run_dir, out)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.html"]
    return Page(out)


def test_the_report_of_a_whole_run(run_dir, tmp_path):
    shares = {"rollout/turns_mean": 3.0, "rollout/episode_share/engine": 0.75, "rollout/episode_share/user": 0.25}
    lines = [line for number in range(1, 9) for line in (update(number), step(number, **shares))]
    write_lines(run_dir, *lines, evaluation(4), evaluation(8))
    with (run_dir / "metrics.jsonl").open("ab") as file:
        # A line of no run, and a torn one.
        file.write(json.dumps(step(9) | {"kind": ["train"]}).encode() + b'\n{"kind": "train", "step": 9, "rew\xff')
    run = Run(steps=8, phase="done")
    record(run_dir, *(run.at(t) for t in range(0, 60, 2)))
    page = written(run_dir, tmp_path)
    assert sorted(page.figures) == list(range(10))
    rewards = {trace["name"]: trace for trace in page.figures[0]}
    assert rewards["all scored"]["y"] == [number / 10 for number in range(1, 9)]
    assert rewards["eval/gsm"]["x"] == [4, 8]
    assert [curve["name"] for curve in page.figures[1]] == [
        *("loss", "gradient norm", "entropy", "of the policy that sampled", "effective share", "learning rate")
    ]
    assert page.figures[1][-1]["y"] == [1e-6] * 8
    turns, stages = (chart["curves"] for section, chart in page.panels if section == 7)
    assert [(curve["name"], curve["y"]) for curve in turns] == [("mean", [3.0] * 8)]
    assert {curve["name"]: curve["y"][0] for curve in stages} == {"engine": 0.75, "user": 0.25}
    shown = " ".join(page.text)
    assert "Its rollouts: asyncrl-view trial" in shown
    assert "done · step 8 of 8" in shown and "0.100 → 0.800" in shown and "90%" in shown
    assert "learner.lr" in shown


def test_workers_of_episodes_and_of_rewards_are_separate():
    run = Run(episodes={"user": 4.0}, worker={"idle": 1.0})
    (span,) = spans([run.at(60.0), run.at(100.0)])
    assert set(span.shares["worker"]) == {"idle"}
    assert span.shares["player"] == pytest.approx({"playing": 0.9, "idle": 0.1})


def test_means_exclude_the_first_step_of_each_learner(run_dir, tmp_path):
    def timed(number, seconds, rate, start=1):
        return step(number, start, **{"time/step_s": seconds, "rollout/tokens_per_s": rate})

    first = timed(1, 900.0, 1.0)
    write_lines(run_dir, first)
    shown = " ".join(written(run_dir, tmp_path).text)
    assert "mean step" not in shown and "mean throughput" not in shown
    write_lines(run_dir, first, timed(2, 1.0, 1000.0), timed(3, 3.0, 200.0), timed(4, 700.0, 1.0, start=2))
    shown = " ".join(written(run_dir, tmp_path).text)
    assert "mean step 2.00 s" in shown and "mean throughput 400 tokens/s" in shown


@pytest.mark.parametrize(
    ("exit_code", "reason", "said"),
    [
        (130, "stopped by the launcher", "stopped: by the launcher · "),
        (75, "preempted with a checkpoint of version 40", "preempted: with a checkpoint of version 40 · "),
        (0, "", "done · "),
    ],
)
def test_the_report_and_the_terminal_describe_the_end_alike(run_dir, tmp_path, exit_code, reason, said):
    last = Run(phase="done", exit_code=exit_code, reason=reason).at(10)
    record(run_dir, last)
    assert said in " ".join(written(run_dir, tmp_path).text)
    history = History()
    history.add(last)
    assert said.removesuffix(" · ") in page(SnapshotView(history), 80)


def test_text_from_a_run_is_escaped(tmp_path):
    hostile = EVIL + CONTROL
    run_dir = tmp_path / "a<b>&c\u202e"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"model": {"path": hostile}, "learner": {"steps": hostile}}))
    write_lines(run_dir, step(1), evaluation(1, name=hostile), update(1, transport=hostile))
    event = Event(number=1, wall=WALL, level=hostile, actor=hostile, text=hostile)
    run = Run(reason=hostile, phase=hostile, events=[event])
    first, last = run.at(10), run.at(20)
    record(run_dir, first, last)
    evil = Resource(name="engine", state=hostile, seconds={hostile: 20.0})
    actor = msgspec.structs.replace(last.actors[-1], resources=[evil])
    record(run_dir, msgspec.structs.replace(last, wall=last.wall + 10, actors=[actor]))
    page = written(run_dir, tmp_path)
    # There is nothing to load, and it is forbidden.
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy and "http" not in policy and "unsafe" not in policy
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    assert {tag for tag, _ in page.tags} <= {
        *("html", "head", "meta", "title", "style", "script", "body", "main", "header", "section", "div", "span"),
        *("h1", "h2", "h3", "p", "table", "tr", "td", "details", "summary", "pre", "figure", "noscript"),
    }
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    scripts = sum(tag == "script" for tag, _ in page.tags)
    assert scripts == 2
    # For the script, which makes text of it.
    assert html.escape(EVIL) in page.page and EVIL not in page.page
    names = [curve["name"] for curves in page.figures.values() for curve in curves]
    assert any(EVIL in name for name in names)
    texts = [*names, *page.text, *(value for _, attrs in page.tags for value in attrs.values() if value)]
    assert all(character.isprintable() or character == "\n" for text in texts for character in text)


def test_missing_records_are_named_in_the_report(run_dir, tmp_path):
    page = written(run_dir, tmp_path)
    assert page.figures == {}
    shown = " ".join(page.text)
    assert "No snapshots of this run were recorded." in shown
    assert shown.count("metrics.jsonl has no such lines.") == 8
    write_lines(run_dir, step(1))
    assert sorted(written(run_dir, tmp_path).figures) == [0, 1, 2, 4, 5, 6, 7, 8]


def test_a_report_without_a_run_or_a_target_folder_is_refused(tmp_path, run_dir):
    with pytest.raises(UsageError, match="no config.json"):
        write_report(tmp_path / "nothing", tmp_path / "out.html")
    with pytest.raises(UsageError, match="out.html: there is no folder"):
        write_report(run_dir, tmp_path / "nowhere" / "out.html")


def test_the_report_of_a_long_run_is_small(run_dir, tmp_path):
    lines = [line for n in range(1, 5001) for line in (update(n, n / 7e5), step(n, **{"loss/policy": math.sin(n)}))]
    write_lines(run_dir, *lines)
    record(run_dir, *(Run(steps=5000).at(t) for t in range(0, 600, 2)))
    page = written(run_dir, tmp_path)
    assert len(page.page) < 600_000
    assert "reward, first → last 0.100 → 500.000" in " ".join(page.text)
    x = page.figures[0][0]["x"]
    assert len(x) < 600 and x[-1] == 5000 and x == sorted(x)


def test_times_are_sampled_evenly_and_the_gap_between_attempts_is_empty():
    assert evenly([1.0, 2.0], 3) == [0, 1]
    assert evenly([0.0, 1.0, 2.0, 3.0, 4.0], 3) == [0, 2, 4]
    # A gap: what is there is taken once.
    assert evenly([0.0, 1.0, 2.0, 100.0], 3) == [0, 3]
    # The clock was set back.
    assert evenly([10.0, 11.0, 12.0, 13.0, 1.0, 2.0], 3) == [0, 2, 5]
    first, second = Run().at(10), Run().at(5000)
    resumed = msgspec.structs.replace(second, run=msgspec.structs.replace(second.run, attempt=2))
    assert spans([first, resumed]) == []


def of_versions(number, oldest, newest):
    return evaluation(number) | {"weights/version": newest, "eval/gsm/version_min": oldest}


def test_an_evaluation_has_curves_of_pass_at_k_components_and_lengths():
    more = {"eval/gsm/pass_at/1": 0.25, "eval/gsm/pass_at/8": 0.5, "eval/gsm/component/mean": 0.9}
    more |= {"eval/gsm/truncated_fraction": 0.1, "eval/gsm/length_mean": 30.0}
    panels = charts.evaluations([step(1), step(2)], [evaluation(number) | more for number in (2, 1)])
    found = {panel.title: [(curve.name, curve.x, curve.y) for curve in panel.curves] for panel in panels}
    assert found == {
        "gsm: pass@k and cut responses": [
            ("pass@1", [1.0, 2.0], [0.25, 0.25]),
            ("pass@8", [1.0, 2.0], [0.5, 0.5]),
            ("cut by a limit", [1.0, 2.0], [0.1, 0.1]),
        ],
        "gsm: components of the reward": [("mean", [1.0, 2.0], [0.9, 0.9])],
        "gsm: lengths": [("mean", [1.0, 2.0], [30.0, 30.0])],
    }


def test_an_evaluation_is_drawn_at_the_step_of_its_version():
    # The learner went back to step 2 and published its weights as 10; from step 4 on two steps make a version.
    train = [step(n, **{"weights/version": version}) for n, version in ((1, 1), (2, 2), (3, 11), (4, 11), (5, 12))]
    del train[3]["weights/gather_s"]
    for oldest, newest, at in ((0, 0, 0), (1, 1, 1), (1, 2, 2), (10, 10, 2), (10, 11, 3), (11, 12, 5), (12, 99, 5)):
        (panel,) = charts.reward(train, [of_versions(7, oldest, newest)])
        curve = panel.curves[-1]
        said = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
        assert (list(curve.x), list(curve.notes)) == ([at], [said])
    (panel,) = charts.reward(train, [evaluation(3)])
    assert list(panel.curves[-1].x) == [3] and list(panel.curves[-1].notes) == [""]


def test_a_missing_share_of_episode_time_is_drawn_as_absent():
    reported = [{"engine": None, "user": 0.5}, {"engine": 0.75, "user": 0.25}]
    train = [
        step(n, **{f"rollout/episode_share/{k}": v for k, v in each.items()}) for n, each in enumerate(reported, 1)
    ]
    (panel,) = charts.episodes(train)
    assert {curve.name: curve.y for curve in panel.curves} == {"engine": [0.0, 0.75], "user": [0.5, 0.25]}


def test_prompts_left_out_by_data_rules_have_their_own_curve():
    train = [{"kind": "train", "step": n, "ledger/trained": n, "ledger/left_out": 2 * n} for n in (1, 2)]
    (panel,) = charts.ledger(train)
    assert [(curve.name, curve.y) for curve in panel.curves] == [("trained", [1, 2]), ("left out", [2, 4])]


def test_every_state_has_a_colour():
    resources = {state for kind, states in STATES.items() if kind != "actor" for state in states}
    assert set(charts.STATE_COLOURS) == resources


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00"])
def test_the_report_of_a_run_without_configuration_names_the_reason(run_dir, tmp_path, content):
    (run_dir / "config.json").write_bytes(content)
    write_lines(run_dir, step(1), step(2))
    page = written(run_dir, tmp_path)
    shown = " ".join(page.text)
    assert 0 in page.figures and "step 2 of ?" in shown and f"{run_dir / 'config.json'}" in shown


def test_only_drawn_fields_of_updates_are_kept(run_dir, tmp_path, monkeypatch):
    """A thousand replicas write a million of them in a thousand steps."""
    held = []
    monkeypatch.setattr(report, "read_metrics", lambda *what: held.extend(read_metrics(*what)) or held)
    of_2 = {"step": 2, "weights/load_s": 0.1}
    write_lines(run_dir, step(1), update(2) | of_2, step(2), update(2) | of_2 | {"start": 2}, step(2, start=2))
    written(run_dir, tmp_path)
    about = {"kind": "update", "step": 2, "start": 2, "weights/version": 2, "weights/transport": "shm"}
    assert held == [step(1), about | {"weights/stall_s": 0.1}, step(2, start=2)]


def test_a_killed_run_has_failed_in_the_report_and_in_a_replay(run_dir, tmp_path):
    write_lines(run_dir, step(1))
    record(run_dir, Run().at(40.0), Run().at(41.0))
    shown = " ".join(written(run_dir, tmp_path).text)
    replay = open_replay(run_dir, lives=False)
    replay.jump(replay.end)
    last = replay.history().newest.run
    assert f"{last.phase}: {last.reason} · " in shown and last.phase == "failed" and "running ·" not in shown
    out = tmp_path / "out.html"
    write_report(run_dir, out, lives=True)
    assert "running · " in " ".join(Page(out).text)


def test_optional_curves_are_shown_only_if_they_have_data():
    plain, more = [step(n) for n in (1, 2)], [step(n, **{"loss/sft": 1.0, "policy/reference_kl": 0.1}) for n in (1, 2)]
    titles = [panel.title for panel in charts.learning(more)]
    assert "Loss of conversations" in titles and len(titles) == len(charts.learning(plain)) + 1
    (kl,) = (panel for panel in charts.learning(more) if panel.title == "KL")
    assert "from the reference, in the reward" in [curve.name for curve in kl.curves]
