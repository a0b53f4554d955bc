"""The metrics of the learner and the keys of metrics.jsonl; the modules of this package write those lines."""

from asyncrl.observe.catalogue import SECONDS, VERSIONS, Declaring

learner = Declaring("learner")
learner.counter(
    "learner/tokens",
    "tokens",
    "tokens computed in training, prompts included; a prefix shared within a row counts once",
)
learner.counter("learner/skipped_steps", "steps", "steps skipped because the loss or gradient was not finite")
learner.counter("learner/plans_ahead", "steps", "steps planned while the previous step was trained")
learner.counter(
    "learner/plans_discarded", "plans", "plans made in advance and discarded because the groups or the version changed"
)
learner.counter(
    "staleness/late_trained_groups", "groups", 'groups trained with late tokens, with staleness.late = "train"'
)
learner.counter(
    "staleness/late_masked_groups", "groups", 'groups trained without their late tokens, with staleness.late = "mask"'
)
learner.counter(
    "learner/empty_steps", "steps", "steps skipped because every trajectory was masked; their groups are filtered"
)
learner.counter("groups/buffered", "groups", "groups taken into the buffer")
learner.counter("groups/duplicate", "groups", "groups delivered a second time")
learner.counter("groups/filtered", "groups", "groups delivered without a signal")
learner.counter("groups/quarantined", "groups", "groups delivered and quarantined")
learner.counter(
    "groups/given_back", "groups", "groups of a checkpoint returned because the resume changed what they depend on"
)
learner.counter("weights/not_published", "attempts", "failed attempts to write a version, for example out of memory")
learner.counter("checkpoint/failed", "checkpoints", "checkpoints that could not be written")
learner.counter(
    "checkpoint/skipped", "checkpoints", "checkpoints skipped because the previous one was still being written"
)
learner.counter(
    "reward/components_left_out", "values", "values of reward components beyond the first 64 names of a run"
)
learner.counter(
    "records/lost",
    "lines",
    "lines of metrics.jsonl, quarantine.jsonl, evaluations.jsonl or samples that found no room on disk or in memory",
)
learner.gauge("learner/step", "step", "last trained step")
learner.gauge("checkpoint/version", "version", "version of the newest complete checkpoint")
learner.gauge("checkpoint/stage_s", "s", "time that training paused for the newest checkpoint")
learner.gauge("checkpoint/write_s", "s", "time until the newest checkpoint was complete")
learner.gauge("records/pending", "lines", "lines that wait for reports of the rollouters or for room on the disk")
learner.histogram(
    "staleness/tokens",
    "versions",
    "staleness of a trained token: the version being trained minus the version that sampled it",
    VERSIONS,
)
learner.histogram("staleness/groups", "versions", "staleness of a trained group: that of its oldest token", VERSIONS)
learner.histogram("groups/age_s", "s", "time of a group in the buffer, from its delivery to its step", SECONDS)
learner.gauge("ledger/trained", "groups", "groups trained so far, in the history of the current weights", lines="train")
learner.gauge("ledger/filtered", "groups", "groups filtered so far", lines="train")
learner.gauge("ledger/quarantined", "groups", "groups quarantined so far", lines="train")
learner.gauge(
    "ledger/left_out",
    "prompts",
    "prompts left out so far by a data rule such as data.max_prompt_tokens; not a failure",
    lines="train",
)
learner.gauge("ledger/rested", "prompts", "rests of prompts so far, by data.curriculum; not a failure", lines="train")
learner.gauge("source/*/trained", "groups", "groups of the source that were trained so far", lines="train")
learner.gauge("source/*/filtered", "groups", "groups of the source that were filtered so far", lines="train")
learner.gauge("source/*/rested", "prompts", "rests of prompts of the source so far", lines="train")
learner.gauge(
    "rollout/dropped_trajectories",
    "trajectories",
    "trajectories left out of their groups since the learner started",
    lines="train",
)
learner.gauge(
    "rollout/failed_attempts", "attempts", "failed attempts at trajectories since the learner started", lines="train"
)
learner.gauge(
    "buffer/groups", "groups", "groups in the learner's buffer; in a line, at the end of its step", lines="train"
)
learner.gauge(
    "perf/mfu", "share", "share of the GPUs' peak that a step used; absent if the peak is unknown", lines="train"
)
learner.gauge("sft/warm_steps", "steps", "supervised steps taken before the first version of the weights", lines="warm")
learner.counter("teacher/requests", "requests", "requests to the server of learner.teacher, one per sequence")
learner.counter("teacher/failed_requests", "requests", "requests without log-probs; sent again where that may help")

every = Declaring(lines="all")
every.line("kind", "", "train, update, eval or warm")
every.line("step", "step", "step of a train line; else the last step trained before the line was written")
every.line("start", "", "number of learner starts in this folder; of several lines for a step the last counts")

warm = Declaring(lines="warm")
warm.line("sft/warm_steps_of", "steps", "supervised steps to take: sft.warm_steps")

warm_and_train = Declaring(lines="warm, train")
warm_and_train.line("loss/sft", "nats", "mean of -log pi over conversation tokens, before sft.weight")
warm_and_train.line("sft/tokens", "tokens", "conversation tokens with a loss")
warm_and_train.line("sft/epochs", "epochs", "epochs of the conversations, warm steps included")
warm_and_train.line("policy/grad_norm", "", "gradient norm before the clip, over policy and conversations together")
warm_and_train.line("learner/lr", "", "learning rate")
warm_and_train.line("time/train_s", "s", "time of a step: its batch and its optimizer step")

train = Declaring(lines="train")
train.line("loss/policy", "nats", "objective of the step, by learner.aggregation, without conversations")
train.line("loss/*", "", "mean over trained tokens of a statistic that the loss names, such as clipped_fraction")
train.line("policy/entropy", "nats", "entropy of the policy, mean over trained tokens")
train.line("policy/ess", "share", "effective sample size as a share, under the importance ratios; 1 on policy")
train.line("policy/behaviour_kl", "nats", "KL of the sampling policy from the trained policy, over all tokens (k3)")
train.line("policy/tis_clipped_fraction", "share", "share of tokens whose importance weight was clipped")
train.line("policy/ratio_max", "", "largest importance ratio")
train.line(
    "policy/engine_kl",
    "nats",
    "KL of the engine from the learner on tokens of equal weights; absent without such tokens",
)
train.line("policy/engine_kl_tokens", "tokens", "tokens over which policy/engine_kl was computed")
train.line(
    "policy/routes_differ",
    "share",
    "share of the engine's experts that the learner's routers would not choose; only with routes",
)
train.line("reward/mean", "", "mean reward of the groups of the step and of those filtered since the step before")
train.line("reward/std", "", "standard deviation of the rewards that reward/mean counts")
train.line("reward/trained_mean", "", "mean reward of the trained trajectories")
train.line(
    "reward/kl_penalty", "", 'mean penalty that the reference subtracts from a reward, with learner.kl.place = "reward"'
)
train.line("policy/reference_kl", "nats", "KL from the reference, mean over sampled tokens")
train.line("reward/all_zero_fraction", "share", "share of groups in which every reward is 0")
train.line("reward/all_max_fraction", "share", "share of groups in which every reward is the best possible")
train.line(
    "reward/signal_fraction",
    "share",
    "share of groups with a signal: learner.signal differs within them by more than learner.signal_tolerance",
)
train.line("source/*/reward_mean", "", "mean reward of the groups of the source that reward/mean counts")
train.line("source/*/signal_fraction", "share", "share with a signal of the groups that source/*/reward_mean counts")
train.line("reward/component/*", "", "mean of a component that the reward function names")
train.line("rollout/length_mean", "tokens", "mean length of the responses of the groups that reward/mean counts")
train.line("rollout/length_p95", "tokens", "95th percentile of the lengths that rollout/length_mean averages")
train.line(
    "rollout/granted_length_mean",
    "tokens",
    "mean length of all responses delivered since the last step, trained or not",
)
train.line("rollout/truncated_fraction", "share", "share of responses cut by a limit on tokens, turns or time")
train.line("rollout/mixed_version_fraction", "share", "share of responses sampled under several versions")
train.line("rollout/resumed_trajectories", "trajectories", "trajectories aborted and resumed")
train.line("rollout/turns_mean", "turns", "mean turns of the episodes of the groups that reward/mean counts")
train.line("rollout/turns_p95", "turns", "95th percentile of the turns that rollout/turns_mean averages")
train.line(
    "rollout/episode_share/*",
    "share",
    "share of episode time by stage, as in rollout/episodes_at",
)
train.line(
    "rollout/tokens",
    "tokens",
    "tokens sampled between the training of the previous step and this one; absent if a report is missing",
)
train.line("rollout/tokens_per_s", "tokens/s", "rollout/tokens per second")
train.line("staleness/token_mean", "versions", "mean staleness of trained tokens")
train.line(
    "staleness/token_max",
    "versions",
    'largest staleness of trained tokens; above staleness.max only with staleness.late = "train"',
)
train.line("staleness/late_groups", "groups", "groups of the step with a token staler than staleness.max")
train.line("staleness/late_fraction", "share", "share of the step's sampled tokens staler than staleness.max")
train.line(
    "staleness/masked_tokens", "tokens", 'tokens left out of the loss as late; absent with staleness.late = "train"'
)
train.line("time/step_s", "s", "from one step to the next")
train.line("time/wait_for_groups_s", "s", "part of time/step_s: waiting for groups")
train.line("time/plan_s", "s", "part of time/train_s: until the plan was ready; near 0 if it was made in advance")
train.line("time/publish_s", "s", "part of time/step_s: copying a version")
train.line("time/take_gpu_s", "s", "in time slices: until all ranks have their GPUs, weights and states back")
train.line("perf/overlap", "share", "share of the training time in which engines sampled tokens")
train.line("weights/gather_s", "s", "time to gather and write the newest version, in parallel with training")
train.line("weights/publish_bytes", "bytes", "size of the version")
train.line("weights/updates", "updates", "updates of replicas that ended since the previous line")

versioned = Declaring(lines="train, update, eval")
versioned.line(
    "weights/version", "version", "version trained or published; served; or the newest that sampled an evaluation"
)

train_and_update = Declaring(lines="train, update")
train_and_update.line(
    "weights/stage_s", "s", "until the bytes of an update were received and verified; in a train line the mean"
)
train_and_update.line("weights/pause_s", "s", "time until the engine was idle; in a train line the mean")
train_and_update.line("weights/load_s", "s", "time to replace the weights; in a train line the mean")
train_and_update.line("weights/resume_s", "s", "time until the engine resumed; in a train line the mean")
train_and_update.line("weights/bytes", "bytes", "size of the weights; in a train line the sum")
train_and_update.line(
    "weights/encoded_bytes", "bytes", "bytes read or received for the update; in a train line the sum"
)
train_and_update.line(
    "policy/drift", "nats", "drift of an engine from the learner after an update; in a train line the largest"
)
train_and_update.line("policy/drift_worst", "nats", "largest drift of one token; in a train line the largest")
train_and_update.line(
    "policy/probe_kl", "nats", "KL of an engine from the learner on the probe; in a train line the largest"
)

update = Declaring(lines="update")
update.line("replica", "", "rollouter that loaded the update")
update.line("weights/transport", "", "nccl, gloo, shm, stream, or ipc: from a copy on the same GPU")
update.line("weights/checksum", "", 'checksum of the engine\'s own copy, with weights.verify = "full"')

evals = Declaring(lines="eval")
evals.line("eval/*/mean", "", "mean reward over samples")
evals.line(
    "eval/*/pass_at_k", "share", "share of prompts with a passing sample: its reward is eval.NAME.pass_at or more"
)
evals.line(
    "eval/*/pass_at/*",
    "share",
    "pass@k for k of 1, 2, 4, ... and all samples: the probability that one of k samples passes, by the unbiased "
    "estimator of arXiv 2107.03374",
)
evals.line("eval/*/component/*", "", "mean of a component that the reward function names")
evals.line("eval/*/k", "samples", "samples per prompt")
evals.line("eval/*/prompts", "prompts", "prompts in the round")
evals.line("eval/*/failed", "prompts", "prompts without rewards; no mean counts them")
evals.line("eval/*/version_min", "version", "oldest version that sampled the round")
evals.line("eval/*/truncated_fraction", "share", "share of responses cut by a limit on tokens, turns or time")
evals.line("eval/*/length_mean", "tokens", "mean length of responses")
evals.line("eval/*/length_p95", "tokens", "95th percentile of the lengths of responses")
