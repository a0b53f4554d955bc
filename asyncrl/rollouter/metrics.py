"""The metrics of a rollouter: declared here, counted by name where they happen.

Suspects, and leases that run alone, are defined in core/death_counts.py.
"""

from asyncrl.observe.catalogue import SECONDS, TOKENS, TURNS, Declaring

rollouter = Declaring("rollouter")
rollouter.counter("rollout/sampled_tokens", "tokens", "sampled since the start, evaluations included")
rollouter.counter("rollout/chunks_relayed", "chunks", "chunks of weights relayed to other hosts")
rollouter.counter("rollout/bytes_relayed", "bytes", "bytes of weights relayed to other hosts")
rollouter.counter("rollout/calls", "calls", "calls of the policy by episodes that were answered")
rollouter.counter("rollout/trajectories", "trajectories", "finished trajectories")
rollouter.counter("rollout/engine_restarts", "restarts", "engine restarts within this process")
rollouter.counter("rollout/engine_sleeps", "sleeps", "times that the engine slept while the learner had its GPU")
rollouter.counter("rollout/drift_warnings", "updates", "weight updates after which the drift was drift.warn or more")
rollouter.counter("rollout/adoptions", "learners", "learners that this rollouter has followed, one after another")
rollouter.counter("rollout/delivered_again", "groups", "groups delivered again to a restarted learner")
rollouter.counter("rollout/deaths_alone", "deaths", "engine deaths while a suspect had the engine alone")
rollouter.counter(
    "rollout/failed_alone", "groups", "groups that failed because engines died too often while they ran alone"
)
rollouter.counter(
    "rollout/turns_alone", "leases", "leases of suspects that had the engine alone, as they do after two deaths"
)
rollouter.gauge("rollout/in_flight", "trajectories", "leased and not finished, including those without a slot")
rollouter.gauge("rollout/running", "trajectories", "in the engine")
rollouter.gauge("rollout/waiting", "trajectories", "waiting for a slot or for the engine")
rollouter.gauge("rollout/concurrency", "calls", "most calls in the engine at a time")
rollouter.gauge("rollout/held", "groups", "leases that are not acknowledged")
rollouter.gauge("rollout/scoring", "trajectories", "being scored or queued at the reward pool")
rollouter.gauge("rollout/oldest_s", "s", "age of the oldest unfinished trajectory")
rollouter.gauge("rollout/served_version", "version", "version that the engine serves; -1 before the first")
rollouter.gauge("rollout/kv_use", "share", "share of the KV cache in use; absent if the engine does not report it")
rollouter.gauge("rollout/suspects", "leases", "held leases that were in this rollouter's engine when it died")
rollouter.gauge("rollout/drift", "nats", "drift of the engine from the learner after the last update")
rollouter.gauge("rollout/drift_largest", "nats", "largest drift since the start")
rollouter.histogram("rollout/response_tokens", "tokens", "tokens sampled in a response", TOKENS)
rollouter.histogram(
    "rollout/generate_s", "s", "from the lease of a group to the last token of each trajectory", SECONDS
)
rollouter.histogram(
    "rollout/reward_s", "s", "from the call of the reward pool to its answer, including the queue", SECONDS
)
rollouter.histogram("rollout/deliver_s", "s", "from a finished group to the learner's acknowledgement", SECONDS)
rollouter.gauge("rollout/episodes", "episodes", "open episodes, including those being scored")
rollouter.gauge(
    "rollout/episodes_at/*",
    "episodes",
    "open episodes by stage: start, queue (waits for a slot or the engine), engine, paused (for an update), user "
    "(the user's code), tool NAME (at most 12 names), close, score or judge",
)
rollouter.gauge("rollout/episodes_oldest_s", "s", "age of the oldest open attempt")
rollouter.gauge(
    "rollout/cost_factor",
    "",
    "tokens computed, divided by those of the same episodes without forks; over episodes that became trajectories",
)
rollouter.counter(
    "rollout/episodes_ended/*", "episodes", "episodes that became trajectories, by outcome: stop, length, turns, time"
)
rollouter.counter(
    "rollout/episodes_failed/*",
    "attempts",
    "failed attempts by cause: start (not begun in time), turn (it took too long), user (its code raised), "
    "answer (no trainable answer), reward (no reward), policy (engine deaths), "
    "host (the episode host or a worker died; started again)",
)
rollouter.counter(
    "rollout/episode_s/*", "s", "time of ended attempts, also failed ones, by stage, as in rollout/episodes_at"
)
rollouter.counter("rollout/malformed_calls", "calls", "tool calls in answers that could not be parsed")
rollouter.counter(
    "rollout/reprefill_tokens",
    "tokens",
    "tokens that engines computed again because of updates and sleeps, without those that the prefix cache held, "
    "where that is known",
    lines="train",
)
rollouter.counter(
    "rollout/forks/*",
    "calls",
    "calls whose context did not continue an earlier answer, by cause: root, branch, edited, assistant, history, "
    "cut, no-extension",
    lines="train",
)
rollouter.histogram("rollout/turns", "turns", "answers of the policy in an episode", TURNS)
rollouter.histogram("rollout/prompt_tokens", "tokens", "context tokens of a call in an episode", TOKENS)
rollouter.gauge(
    "weights/stall_s",
    "s",
    "generation time lost to the engine's newest update; in a train line the sum",
    lines="train, update",
)
