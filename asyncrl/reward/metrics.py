"""The metrics of the reward pool and its judges."""

from asyncrl.observe.catalogue import SECONDS, SHORT, Declaring

reward = Declaring("reward")
reward.counter(
    "reward/scored", "tasks", 'scored tasks; a task is one completion, or one group under reward.per = "group"'
)
reward.counter("reward/failed", "tasks", "tasks that ended without rewards")
reward.counter(
    "reward/timed_out", "tasks", "tasks over their deadline: failed, or scored if reward.on_timeout is a number"
)
reward.counter("reward/out_of_memory", "processes", "worker processes ended because of reward.max_memory_bytes")
reward.counter("reward/output_dropped_bytes", "bytes", "bytes printed beyond reward.max_output_bytes")
reward.counter("reward/workers_killed", "processes", "worker processes that the pool ended")
reward.counter("reward/workers_died", "processes", "worker processes that died")
reward.gauge("reward/queued", "tasks", "waiting for a worker")
reward.gauge("reward/running", "tasks", "at workers, including those sent in advance")
reward.histogram("reward/score_s", "s", "from the arrival of a task to its rewards, including the queue", SHORT)
reward.histogram("reward/run_s", "s", "time in the reward function, including calls that failed or timed out", SHORT)
reward.counter("judge/requests", "requests", "requests to the judge's server")
reward.counter("judge/retries", "requests", "requests sent again after a refusal or a lost connection")
reward.counter("judge/repairs", "answers", "unusable answers that were sent back once")
reward.counter("judge/failed_votes", "votes", "votes without a usable answer")
reward.counter("judge/unjudged", "tasks", "tasks left without a reward; each is tried again")
reward.counter("judge/prompt_tokens", "tokens", "tokens that the judge read, as its server counts them")
reward.counter("judge/completion_tokens", "tokens", "tokens that the judge wrote, as its server counts them")
reward.counter("judge/cost", "", "cost at reward.options.price_per_million")
reward.counter("judge/cached", "votes", "votes taken from answers stored in the run folder")
reward.counter("judge/uncached", "answers", "answers that could not be stored in the run folder")
reward.histogram("judge/request_s", "s", "from a request to the judge's server to its end", SECONDS)
