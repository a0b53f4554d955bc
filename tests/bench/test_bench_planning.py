"""A tiny run of the bench, with the real channel of the ranks."""

import asyncio
import json

from tools.bench import planning
from tools.bench.report import Report


def test_a_tiny_run_sends_what_it_plans(monkeypatch):
    for name, value in {"GROUPS": 4, "SAMPLES": 2, "TOKENS": 2000, "PROMPT": 8, "RANKS": 3, "TRAIN_S": 0.2}.items():
        monkeypatch.setattr(planning, name, value)
    sent, began = [], []
    train, send = planning.TimedTrainer.train, planning.TimedTrainer.send

    def noted_train(trainer, plan, ahead=0):
        began.append(ahead)
        return train(trainer, plan, ahead)

    def noted_send(trainer, plan, sending):
        sent.append(sending.number)
        send(trainer, plan, sending)

    monkeypatch.setattr(planning.TimedTrainer, "train", noted_train)
    monkeypatch.setattr(planning.TimedTrainer, "send", noted_send)
    report = Report("planning")
    asyncio.run(planning.measure(report, pairs=1, steps=2))
    figures = json.loads(report.to_json())["figures"]
    # Of each run the first step is planned beside nothing, and every other has a number of its own or none.
    runs = [began[i : i + 4] for i in range(0, len(began), 4)]
    assert any(map(any, runs))
    for run in runs:
        named = [number for number in run if number]
        assert (len(run), run[0], len(set(named))) == (4, 0, len(named))
        assert set(named) <= set(sent)
    for name in ("plan_s", "send_s"):
        assert figures[name]["beside"] >= 0.0 and figures[name]["at_begin"] > 0.0
    assert figures["planning_gap"]["first"]["median"] > 0.0
