"""A run folder with steps and groups, as the learner writes it, some of them hostile."""

import json

from asyncrl.observe.report.report import report_page
from asyncrl.view.answers import Answers
from asyncrl.view.server import ViewServer

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
CONTROL = "\x1b]0;mine\x07\x00\u202eabc"
CHAT = [
    {"role": "user", "content": "Weather in Bern?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I need a tool.",
        "tool_calls": [{"id": "1", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}],
    },
    {"role": "tool", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def train_line(step, start=1, **more):
    return {
        **{"kind": "train", "step": step, "start": start, "weights/version": step + 1, "time/publish_s": 0.1},
        **{"reward/mean": step / 10, "staleness/token_mean": 0.5, "rollout/length_mean": 20.0},
        **{"rollout/failed_attempts": 2 * step},
        **more,
    }


def trajectory(sample=0, text="4", *, tokens=3, logprob=-0.5, version=3, reward=1.0, scored=False, **more):
    # A byte is a token where the run has no model.
    ids = list(text.encode("utf-8", "replace"))[:tokens]
    sequence = {"tokens": ids, "logprobs": [logprob] * len(ids), "spans": [[version, 0, len(ids), "sampled"]]}
    if scored:
        sequence |= {"trainer_logprobs": [logprob + 0.5] * len(ids), "entropies": [2.5] * len(ids)}
    return {
        **{"sample": sample, "text": text, "messages": [], "sequences": [sequence], "finish_reason": "stop"},
        **{"reward": reward, "components": {"right": reward}, "length": len(ids), "resumes": 0},
        **more,
    }


def group(uid, step, *trajectories, prompt="2+2=", kind="trained", **more):
    found = list(trajectories) or [trajectory()]
    return {
        **{"kind": kind, "step": step, "weights/version": step + 1, "uid": uid, "prompt": prompt, "start": 1},
        **{"trajectories": found},
        **more,
    }


def write_steps(run_dir, *lines):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_groups(run_dir, name, *groups):
    (run_dir / "samples").mkdir(exist_ok=True)
    with (run_dir / "samples" / name).open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in groups)


def make_run(folder, name="trial"):
    """Five steps. Groups are recorded of steps 4 and 5, and of an evaluation after step 5."""
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text('{"model": {"path": null}}')
    write_steps(run_dir, *(train_line(step) for step in range(1, 6)))
    write_groups(run_dir, "step_000004.jsonl", group("0-1", 4))
    answers = [
        trajectory(0, "alpha", tokens=2, reward=0.0, logprob=-2.0, version=5),
        trajectory(1, "beta beta", tokens=9, reward=1.0, logprob=-0.1, version=3, scored=True, judgement="Well done."),
        trajectory(2, "It rains.", messages=CHAT, reward=0.5, turns=2, version=4),
    ]
    evil = trajectory(
        0, EVIL + CONTROL, tokens=40, components={EVIL: 1.0}, finish_reason=EVIL, judgement=EVIL + CONTROL
    )
    chat = trajectory(1, EVIL, messages=[{"role": EVIL, "name": EVIL, "content": EVIL + CONTROL}, 7, {"content": EVIL}])
    write_groups(
        run_dir,
        "step_000005.jsonl",
        group("0-2", 5, *answers),
        group(EVIL, 5, evil, chat, prompt=EVIL + CONTROL),
    )
    write_groups(run_dir, "filtered_000005.jsonl", group("0-3", 5, kind="filtered", reason="all rewards are equal"))
    write_groups(run_dir, "eval_held_000005.jsonl", group("held@5-0", 5, kind="evaluation", name="held"))
    return run_dir


def server_of(*runs):
    """A server of these runs, as the command makes it. A byte is a token."""
    return ViewServer(Answers(runs, [chr] * len(runs)), lambda run: report_page(runs[run], viewer=f"./#run={run}"))
