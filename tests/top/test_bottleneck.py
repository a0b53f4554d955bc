"""The bottleneck of a pipeline."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.core.states import STATES
from asyncrl.top.bottleneck import KIND_OF, SATURATED, Flow, Stage, by_kind, find_bottleneck

IDLE_ENGINE, BUSY_ENGINE = {"generating": 0.3, "waiting": 0.7}, {"generating": 0.95, "waiting": 0.05}
IDLE_RANK, BUSY_RANK = {"training": 0.3, "waiting": 0.7}, {"training": 0.9, "publishing": 0.05, "waiting": 0.05}
IDLE_WORKER, BUSY_WORKER = {"scoring": 0.1, "idle": 0.9}, {"scoring": 0.99, "idle": 0.01}
IN_TOOLS = {"tool search": 48.0, "start": 3.0, "engine": 9.0, "judge": 4.0}


def flow(rollouters=IDLE_ENGINE, reward=IDLE_WORKER, learner=IDLE_RANK, **facts):
    return Flow(
        **{"window_s": 30.0, "gate_open": False, "rollouters": rollouters, "reward": reward, "learner": learner} | facts
    )


CASES = {
    "slow learner": (flow(learner=BUSY_RANK), "learner"),
    "slow engine": (flow(rollouters=BUSY_ENGINE), "rollouters"),
    "slow reward while the queues before it still fill": (flow(rollouters=BUSY_ENGINE, reward=BUSY_WORKER), "reward"),
    "the learner sets the pace though engines are busy": (flow(rollouters=BUSY_ENGINE, learner=BUSY_RANK), "learner"),
    "closed gate": (flow(), "gate"),
    "reward of much latency and many workers": (flow(generating=10.0, at_reward=90.0), "reward"),
    "tools that episodes wait for, while a few keep the engine at work": (
        flow(BUSY_ENGINE, episodes=IN_TOOLS),
        "episodes",
    ),
    "tools that episodes wait for": (flow(generating=60.0, at_reward=4.0, episodes=IN_TOOLS), "episodes"),
    "episodes that wait for the engine": (
        flow(BUSY_ENGINE, episodes={"queue": 20.0, "engine": 30.0, "user": 9.0}),
        "rollouters",
    ),
    "episodes that wait for their judge": (
        flow(generating=10.0, at_reward=90.0, episodes={"user": 10.0, "judge": 90.0}),
        "reward",
    ),
    "a slow learner while episodes are in tools": (flow(learner=BUSY_RANK, episodes=IN_TOOLS), "learner"),
    "no episode": (flow(episodes={"tool search": 0.2}), "gate"),
    "busy dataloader": (flow(dataloader_busy=0.95), "dataloader"),
    "prompts that do not come": (flow(gate_open=True), "dataloader"),
    "engines that are paused": (flow({"loading": 0.5, "pausing": 0.1, "generating": 0.3, "waiting": 0.1}), "weights"),
    "a learner that publishes": (flow(learner={"publishing": 0.6, "training": 0.3, "waiting": 0.1}), "weights"),
    "engines on old weights": (flow(lag=2.0), "weights"),
    "engines that come up again": (flow({"restarting": 0.9, "generating": 0.1}), "rollouters"),
    "checkpoints": (flow(learner={"checkpointing": 0.7, "training": 0.2, "waiting": 0.1}), "learner"),
    "an unknown gate": (flow(gate_open=None), None),
    "the end": (flow(exhausted=True), None),
    "too early": (flow(window_s=1.0), None),
    "not running": (flow(running=False), None),
    "nothing known": (flow(rollouters={}, learner={}), None),
}


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name):
    given, stage = CASES[name]
    assert find_bottleneck(given).stage == stage


BOTH_WAIT = "rollouters wait 70 % for {}, the learner waits 70 % for groups"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (flow(learner=BUSY_RANK), "busy 95 % of the time (training 90 %); rollouters wait 70 % for leases"),
        (flow(rollouters=BUSY_ENGINE), "generating 95 % of the time; the learner waits 70 % for groups"),
        (flow(), f"it is closed: {BOTH_WAIT.format('leases')}"),
        *(
            (
                flow(episodes={stage: 48.0, "close": 3.0, "engine": 13.0}),
                f"51 of 64 run their own code, 48 of them {said}; {BOTH_WAIT.format('calls')}",
            )
            for stage, said in (("tool search", "in tool search"), ("user", "between two calls of the policy"))
        ),
    ],
)
def test_the_verdict_names_the_actor_its_wait_and_its_share_of_time(given, said):
    assert find_bottleneck(given).why == said


def test_states_of_one_name_have_one_kind_for_the_flow():
    states = {(name, state.flow) for states in STATES.values() for name, state in states.items()}
    assert len(states) == len(KIND_OF)


@st.composite
def shares(draw, kind):
    states = sorted(STATES[kind])
    weights = draw(st.lists(st.floats(0.01, 1.0), min_size=len(states), max_size=len(states)))
    return {state: weight / sum(weights) for state, weight in zip(states, weights, strict=True)}


FLOWS = (shares("engine"), shares("worker"), shares("rank"))


@given(*FLOWS, st.floats(0.0, 1.0))
def test_the_bottleneck_is_the_last_busy_stage(rollouters, reward, learner, busy):
    found = find_bottleneck(flow(rollouters, reward, learner, dataloader_busy=busy)).stage
    occupied = {"dataloader": busy}
    for stage, each in (("rollouters", rollouters), ("reward", reward), ("learner", learner)):
        occupied[stage] = sum(share for kind, share in by_kind(each).items() if kind != "wait")
    last = next((stage for stage in reversed(get_args(Stage)) if occupied.get(stage, 0.0) >= SATURATED), None)
    assert found == (last or "gate") or (found == "weights" and last in ("learner", "rollouters"))


@given(*FLOWS, st.sampled_from(["rollouters", "reward", "learner"]))
def test_more_work_never_moves_the_mark_away_from_a_stage(rollouters, reward, learner, stage):
    stages = {"rollouters": rollouters, "reward": reward, "learner": learner}
    if find_bottleneck(flow(**stages)).stage != stage:
        return
    work = {"rollouters": "generating", "reward": "scoring", "learner": "training"}[stage]
    more = {state: share / 2 for state, share in stages[stage].items()}
    more[work] += 0.5
    assert find_bottleneck(flow(**stages | {stage: more})).stage == stage
