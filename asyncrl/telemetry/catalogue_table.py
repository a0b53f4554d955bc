"""Figures that asyncrl measures: their names, kinds, units and meanings, who has them, and the edges of their buckets.

A name is GROUP/WHAT with its unit at the end, where it has one. ``*`` stands for what a configuration or a reward
function names, or for what its text lists. Buckets are closed above: a value that equals an edge is in the bucket below
it; the last bucket is open. Found and shown by catalogue.py, with those that are declared beside the code that computes
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["counter", "gauge", "histogram", "line"]
"""Kinds of figures. In heartbeats a counter is cumulative since the start of the incarnation, a gauge is as it is now,
a histogram is by buckets; a line is a key of metrics.jsonl."""

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SHORT = (0.0001, 0.0003, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0)
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 32.0)
TOKENS = tuple(float(1 << power) for power in range(4, 19))
TURNS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0)

_EDGES = {"SECONDS": SECONDS, "SHORT": SHORT, "VERSIONS": VERSIONS, "TOKENS": TOKENS, "TURNS": TURNS}
_HEADING = re.compile(rf"\[((?: ?\b(?:{'|'.join(get_args(Kind))})\b)+)\] (.+)")
_ROW = re.compile(rf"([^ |]+) \| (?:([^ |]+) )?\| ([^ |][^|]*?)(?: \| ({'|'.join(_EDGES)}))?")


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    name: str
    kinds: tuple[Kind, ...]
    unit: str
    where: str
    """Actors that have it; for a figure that is only in metrics.jsonl, the kinds of lines."""
    text: str
    edges: tuple[float, ...] = ()


def read(table: str) -> Iterator[Metric]:
    """Read figures: below a heading ``[KINDS] WHERE`` rows ``NAME | UNIT | TEXT``, of histograms with ``| EDGES``.

    EDGES is one of the names above. A line that begins with four spaces goes on with the one before it. Raises
    ValueError with the text of what is neither a heading nor a row of its heading's kinds.
    """
    kinds: tuple[Kind, ...] = ()
    where = ""
    for row in table.replace("\n    ", " ").splitlines():
        if heading := _HEADING.fullmatch(row):
            kinds, where = tuple(heading[1].split()), heading[2]  # type: ignore[arg-type]
        elif row:
            found = _ROW.fullmatch(row)
            if found is None or not kinds or bool(found[4]) != ("histogram" in kinds):
                raise ValueError(f"in the table of figures this is no heading and no row below {list(kinds)}: {row}")
            yield Metric(found[1], kinds, found[2] or "", where, found[3], _EDGES[found[4]] if found[4] else ())


TABLE = """
[histogram] every actor
loop/lag_s | s | how much later than asked for the event loop came round | SHORT
calls/round_trip_s | s | from a call to its reply, without parked ones | SHORT

[gauge] every actor
calls/in_flight | calls | own calls without an answer so far, parked ones among them
calls/being_served | calls | calls of others that are being served, parked ones among them
heartbeats/largest_bytes | bytes | the largest heartbeat so far

[counter] every actor
errors/handler | errors | exceptions in handlers of messages that were not meant for the caller
events/dropped | events | log lines of level warning and above that did not fit into heartbeats
facts/cpu_s | s | processor time of the thread that gathers and sends all of this
facts/late | figures | figures that had to wait for a later heartbeat
heartbeats/sent | heartbeats | sent
logs/lost | lines | of the log that found no room on the disk nor in memory
heartbeats/sent_bytes | bytes | of all heartbeats: what monitoring puts on the wire
wire/strangers | messages | connections turned away, and messages of who has not said HELLO
wire/refused | messages | HELLOs refused, and messages that do not fit their connection or its rights
wire/malformed | messages | messages that do not follow the protocol
wire/early | messages | calls and casts before the actor was set up, which are repeated or dropped
wire/unsent | messages | answers to callers that take no more just now; a repeat asks for them again
wire/from_replaced | messages | answers of peers that have been replaced, not believed
wire/refused_by_peer | refusals | HELLOs of this actor that a peer refused

[counter] controller
heartbeats/ignored | heartbeats | of actors that are dead or condemned, or out of order
heartbeats/left_out | facts | in heartbeats that are no numbers, or more or longer than an actor needs
lines/refused | lines | of metrics that are too long, or not as a run writes them
snapshots/failed | snapshots | that could not be made, for a reason that is in the log
snapshots/taken | snapshots | made for those who watch and for the recording
snapshots/lost | snapshots | that could not be recorded, as on a full disk, or not in time
sinks/restarts | restarts | of the sinks, as far as they have asked for metrics before and after

[gauge] controller
snapshots/bytes | bytes | size of the newest snapshot
snapshots/take_s | s | time that the newest snapshot took to make
snapshots/recorded_bytes | bytes | size of the recording

[counter] controller, sinks
sinks/dropped | lines | for which there was no room on the way to a sink, or nobody to take them

[counter] sinks
sinks/lost | records | that a sink was given and failed to take

[counter] dataloader
tickets/granted | groups | leases of prompt groups, evaluation included
tickets/granted_again | groups | grants that were repeated because their reply may have been lost
tickets/granted_alone | groups | grants of suspects of deaths, which have an engine alone
tickets/returned | groups | tickets given back without being generated
tickets/orphaned | groups | tickets whose holder died
tickets/recovered | groups | of these, those that the learner does not hold: they are granted again
tickets/rejected | prompts | never granted (again) after too many deaths
tickets/trained | groups | outcomes reported by the learner: trained
tickets/filtered | groups | outcomes reported: filtered, without a signal
tickets/quarantined | groups | outcomes reported: quarantined
tickets/left_out | prompts | outcomes reported: left out by a rule of the data, as data.max_prompt_tokens
tickets/evaluated | groups | outcomes reported: evaluated
tickets/requeued | groups | given back by the learner as too stale, under staleness.late = requeue

[gauge] dataloader
tickets/outstanding | groups | granted for training, and neither reported nor returned
tickets/gate | groups | that the gate lets be outstanding for an engine that serves the newest version
tickets/oldest_s | s | since the oldest ticket that is out was granted
tickets/parked | calls | leases that wait for the gate

[gauge line] dataloader; train
staleness/limit | versions | working limit of the gate, at most staleness.max

[histogram] dataloader
tickets/age_s | s | from the grant of a training ticket to the report of its outcome | SECONDS

[counter] rollouter
rollout/sampled_tokens | tokens | sampled since the start, evaluation included
rollout/chunks_relayed | chunks | of weights handed on to other hosts
rollout/bytes_relayed | bytes | of weights handed on to other hosts
rollout/calls | calls | of the policy that episodes have had answered
rollout/trajectories | trajectories | generated to their end
rollout/engine_restarts | restarts | of the engine within this process
rollout/drift_warnings | updates | after which the engine was drift.warn or more from the learner
rollout/adoptions | learners | that were taken for the living one after another
rollout/delivered_again | groups | delivered to a learner that has replaced another
rollout/deaths_alone | deaths | of the engine while one suspect had it alone
rollout/failed_alone | groups | given up after such deaths
rollout/turns_alone | turns | of suspects that had the engine alone

[gauge] rollouter
rollout/in_flight | trajectories | leased and not generated so far, those without a slot included
rollout/running | trajectories | in the engine
rollout/waiting | trajectories | that wait for a slot or for the engine to serve
rollout/concurrency | calls | that may be in the engine at a time
rollout/held | groups | tickets that are not acknowledged
rollout/scoring | trajectories | with the reward pool, those in its queue included
rollout/oldest_s | s | since the oldest trajectory that is not generated was leased
rollout/served_version | version | that the engine serves; -1 before the first
rollout/kv_use | share | of the engine's KV cache in use, 0 to 1; absent where an engine cannot say
rollout/suspects | tickets | that were in an engine when it died
rollout/drift | nats | of the engine from the learner after its last update; absent before it is measured
rollout/drift_largest | nats | of them the largest since the start

[histogram] rollouter
rollout/response_tokens | tokens | sampled in a response | TOKENS
rollout/generate_s | s | from the lease of a trajectory to its last token | SECONDS
rollout/reward_s | s | from the call of the reward pool to its answer, the queue included | SECONDS
rollout/deliver_s | s | from a finished group to the learner's acknowledgement | SECONDS

[gauge] rollouter
rollout/episodes | episodes | open, those that are scored included
rollout/episodes_at/* | episodes | open by stage: start, queue (waits for a slot or the engine), engine, paused (for an
    update), user (the user's code), tool NAME (12 of them told apart), close, score or judge
rollout/episodes_oldest_s | s | since the oldest attempt that is open began
rollout/cost_factor | | tokens prefilled and sampled, over those had each call gone on from the one before: 1 without
    forks; of all episodes that have ended

[counter] rollouter
rollout/episodes_ended/* | episodes | by outcome: stop, length, turns, time
rollout/episodes_failed/* | attempts | by cause: start, turn (deadlines), user (its code raised), answer (none could be
    trained), reward (it said none), policy (engines died of it), host (it or its worker died; begun anew)
rollout/episode_s/* | s | of attempts that have ended, by stage as in rollout/episodes_at: all of their time
rollout/malformed_calls | calls | of tools that could not be read in an answer

[counter line] rollouter; train
rollout/reprefill_tokens | tokens | computed again because of updates: prompts and partial responses of aborted and of
    kept requests, and what a call shares with earlier ones of its conversation; without what the prefix cache had,
    which of kept requests is not known; in a line as rollout/tokens
rollout/forks/* | calls | of the policy whose context did not go on from an earlier answer, by cause: root, branch,
    edited, assistant, history, cut, no-extension

[histogram] rollouter
rollout/turns | turns | answers of the policy in an episode | TURNS
rollout/prompt_tokens | tokens | of the context of a call, in episodes | TOKENS

[counter] reward
reward/scored | tasks | done; a task is one completion, or one group under a group reward
reward/failed | tasks | that ended without rewards
reward/timed_out | tasks | that ran over their time: failed, or scored where reward.on_timeout is a number
reward/out_of_memory | processes | ended because of reward.max_memory_bytes
reward/output_dropped_bytes | bytes | printed beyond reward.max_output_bytes
reward/workers_killed | processes | worker processes that the pool ended
reward/workers_died | processes | worker processes that ended by themselves

[gauge] reward
reward/queued | tasks | that wait for a worker
reward/running | tasks | with workers, those sent ahead included

[histogram] reward
reward/score_s | s | from the arrival of a task to its rewards, the queue included | SHORT
reward/run_s | s | within the reward function, also of a call that failed or ran into its deadline | SHORT

[counter] episodes
episodes/played | episodes | that ended by themselves or with their worker
episodes/failed | episodes | among them that gave no outcome
episodes/stopped | episodes | that the rollouter ended
episodes/played_alone | episodes | begun in a worker by themselves: they were in deaths of workers
episodes/tool_calls | calls | of tools
episodes/tool_errors | calls | of tools that raised; the policy was told
episodes/tool_mistakes | calls | of tools that there are not, or with wrong arguments
episodes/stalled | processes | workers ended because their event loop stood still
episodes/out_of_memory | processes | workers and programs ended because of episode.max_memory_bytes
episodes/workers_killed | processes | worker processes that the host ended
episodes/workers_died | processes | worker processes that ended by themselves
episodes/output_dropped_bytes | bytes | printed beyond episode.max_output_bytes
episodes/http_requests | requests | to the endpoint, for an answer of the policy
episodes/http_refused | requests | to the endpoint that the policy cannot be asked, or without a key
episodes/http_retries | requests | to the endpoint that repeat one before
episodes/http_cut | requests | to the endpoint whose connection it has cut

[gauge] episodes
episodes/open | episodes | with a worker or a program
episodes/waiting | episodes | that wait for a worker
episodes/suspects | episodes | that were in a worker when it died

[histogram] episodes
episodes/play_s | s | from the arrival of an episode to its end | SECONDS

[counter] reward
judge/requests | requests | sent to the server of a judge
judge/retries | requests | of these, sent again: refused for the moment, or never there
judge/repairs | answers | that could not be used, and were sent back once
judge/failed_votes | votes | without an answer that can be used
judge/unjudged | tasks | that were left without a reward; each is tried again
judge/prompt_tokens | tokens | that the judge read, as its server counts them
judge/completion_tokens | tokens | that the judge wrote, as its server counts them
judge/cost | | by reward.options.price_per_million
judge/cached | votes | that an answer kept in the run's folder gave
judge/uncached | answers | that could not be kept in the run's folder

[histogram] reward
judge/request_s | s | from a request to the judge's server to its end | SECONDS

[counter] parameter_server
weights/updates_committed | updates | of replicas that succeeded
weights/updates_failed | updates | of replicas that failed; each is tried again
weights/pauses_taken_back | pauses | of replicas that held one for too long
weights/broadcasts_begun | broadcasts | with all members paused
weights/broadcasts_called_off | broadcasts | before they began
weights/broadcasts_broken | broadcasts | that failed; those who survive are members of the next one
weights/chunks_served | chunks | of weights sent over the wire
weights/bytes_served | bytes | of weights sent over the wire
weights/engines_differ | versions | under which engines of one kind had different checksums

[gauge] parameter_server
weights/replicas | replicas | known
weights/replicas_behind | replicas | that do not serve the newest version and take none up so far
weights/replicas_paused | replicas | paused to load
weights/failed_attempts | attempts | in a row, of the replica with the most

[counter] learner
learner/tokens | tokens | computed in training, prompts included; what sequences of a row share once
learner/skipped_steps | steps | not taken because they were not finite
learner/plans_ahead | steps | planned, and sent to the ranks, while the step before was trained
learner/plans_discarded | plans | made so for other groups, or another version, than the step came to have
staleness/late_trained_groups | groups | trained with late tokens, under staleness.late = train
staleness/late_masked_groups | groups | trained without their late tokens, under all other staleness.late
learner/empty_steps | steps | not taken because every trajectory was masked; their groups are filtered
groups/buffered | groups | taken into the buffer
groups/duplicate | groups | delivered though they were there already
groups/filtered | groups | delivered without a signal
groups/quarantined | groups | delivered and not to be trained
groups/given_back | groups | of a checkpoint, not trained because a resume changed what they depend on
weights/not_published | attempts | to write a version that failed, as for want of memory
checkpoint/failed | checkpoints | that could not be written
checkpoint/skipped | checkpoints | not begun because the one before was still being written
reward/components_left_out | values | of reward components under names beyond the first 64 of a run
records/lost | lines | of metrics.jsonl, quarantine.jsonl or samples that found no room on the disk nor in memory

[gauge] learner
learner/step | step | the last one that was trained
checkpoint/version | version | of the newest complete checkpoint
checkpoint/stage_s | s | for which training stood still for it
checkpoint/write_s | s | until it was complete
records/pending | lines | that wait to be written, for reports of the rollouters or for room on the disk

[histogram] learner
staleness/tokens | versions | of a trained token: the version being trained minus the one that sampled it | VERSIONS
staleness/groups | versions | of a trained group: that of its oldest token | VERSIONS
groups/age_s | s | a group in the buffer, from its delivery to its step | SECONDS

[gauge line] learner; train
ledger/trained | groups | trained so far, in the history from which the weights come
ledger/filtered | groups | filtered so far
ledger/quarantined | groups | quarantined so far
ledger/left_out | prompts | left out so far by a rule of the data, as data.max_prompt_tokens; no failure
rollout/dropped_trajectories | trajectories | left out of their groups since the learner started
rollout/failed_attempts | attempts | at trajectories that failed, since the learner started
buffer/groups | groups | in the learner's buffer; in a line, when its step was done
perf/mfu | share | of the peak of its GPUs that a step used; absent where the peak is unknown

[counter line] learner; train
staleness/waited_groups | groups | waited for lest they be late, under staleness.late = wait; in a line, before its step
staleness/requeued_groups | groups | given back as too stale, under staleness.late = requeue; in a line, since the step
    before

[line] all
kind | | train, update, eval or warm
step | step | trained when the line was written; of a train line its own
start | | how often a learner had begun in this folder; of several lines of a step the last counts

[gauge line] learner; warm
sft/warm_steps | steps | supervised steps taken before the first version of the weights

[line] warm
sft/warm_steps_of | steps | that are to be taken: sft.warm_steps

[line] warm, train
loss/sft | nats | mean of -log pi over the tokens of the conversations, without sft.weight
sft/tokens | tokens | of conversations, with a loss
sft/epochs | epochs | how often the conversations have been trained, warm steps included
policy/grad_norm | | before the clip; in a train line of policy and conversations together
learner/lr | | learning rate
time/train_s | s | of a step, its batch and its optimizer step

[line] train
loss/policy | nats | objective of the step, by learner.aggregation, without conversations
loss/* | | mean over trained tokens of a sum that the loss names, as clipped_fraction
policy/entropy | nats | mean over trained tokens
policy/ess | share | effective share of the sample under the importance ratios, 1 on policy
policy/behaviour_kl | nats | of the policy that sampled from the one being trained, over all tokens (k3)
policy/tis_clipped_fraction | share | of tokens whose importance weight was cut
policy/ratio_max | | largest importance ratio
policy/engine_kl | nats | of the engine from the trainer on tokens of equal weights; absent without such
policy/engine_kl_tokens | tokens | over which policy/engine_kl was taken
reward/mean | | over everything scored since the last step, filtered and requeued groups included
reward/std | | likewise
reward/trained_mean | | over what was trained
reward/kl_penalty | | mean of what the reference takes from a reward, under learner.kl.place = reward
policy/reference_kl | nats | mean over sampled tokens of its estimator, from the policy that sampled them
reward/all_zero_fraction | share | of groups whose rewards all are 0
reward/all_max_fraction | share | of groups whose rewards all are the best there is
reward/component/* | | mean of a component that the reward function names
rollout/length_mean | tokens | sampled, of responses scored since the last step
rollout/length_p95 | tokens | likewise, 95th percentile
rollout/granted_length_mean | tokens | of all responses delivered since the last step
rollout/truncated_fraction | share | of responses that ran out of tokens, turns or time
rollout/mixed_version_fraction | share | of responses sampled under several versions
rollout/resumed_trajectories | trajectories | that were aborted and taken up again
rollout/turns_mean | turns | of episodes scored since the last step
rollout/turns_p95 | turns | likewise, 95th percentile
rollout/episode_share/* | share | of their time by stage: start, queue, engine, paused, user, tool, close, score; they
    add up to 1
rollout/tokens | tokens | sampled from the training of the step before to its own; absent if not all told
rollout/tokens_per_s | tokens/s | likewise, a second
staleness/token_mean | versions | of trained tokens
staleness/token_max | versions | of trained tokens; above staleness.max under staleness.late = train alone
staleness/late_groups | groups | of a step, with a token that was staler than staleness.max
staleness/late_fraction | share | of sampled tokens of a step, those staler than staleness.max
staleness/masked_tokens | tokens | left out of the loss as late; absent under staleness.late = train
staleness/requeued_length_mean | tokens | of responses requeued since the last step, under late = requeue
staleness/trained_length_mean | tokens | of the responses trained, under staleness.late = requeue
time/wait_for_late_s | s | of time/wait_for_groups_s, for stragglers, under staleness.late = wait
time/step_s | s | from one step to the next
time/wait_for_groups_s | s | of it, waiting for groups
time/plan_s | s | of time/train_s, until its plan was there; near 0 where it was made and sent ahead
time/publish_s | s | of it, copying a version, after the one before was assembled
perf/overlap | share | of the training time in which tokens were being sampled
weights/gather_s | s | to gather and write the last version that was, beside the training
weights/publish_bytes | bytes | size of the version
weights/updates | updates | of replicas that ended since the line before

[line] train, update, eval
weights/version | version | trained or published; served; or the newest that sampled any of it

[gauge line] rollouter; train, update
weights/stall_s | s | generation time lost to an update, the newest of an engine; in a train line the sum

[line] train, update
weights/stage_s | s | until the bytes of an update were there and verified; in a train line the mean
weights/pause_s | s | until the engine was idle; in a train line the mean
weights/load_s | s | to replace the weights; in a train line the mean
weights/resume_s | s | until the engine went on; in a train line the mean
weights/bytes | bytes | size of the weights; in a train line the sum
weights/encoded_bytes | bytes | read or received for them; in a train line the sum
policy/drift | nats | of an engine from the learner after an update; in a train line the largest
policy/drift_worst | nats | of one token of it; in a train line the largest
policy/probe_kl | nats | divergence of an engine from the learner; in a train line the largest

[line] update
replica | | the rollouter
weights/transport | | nccl, gloo, shm or stream
weights/checksum | | of the engine's own copy, under weights.verify = full

[line] eval
eval/*/mean | | mean reward over samples
eval/*/pass_at_k | share | of prompts with a sample that passes: its reward is eval.NAME.pass_at or more
eval/*/pass_at/* | share | pass@k for k of 1, 2, 4, ... and all samples of a prompt: the probability that one of k
    samples passes, by the unbiased estimator of arXiv 2107.03374
eval/*/component/* | | mean of a component that the reward function names
eval/*/k | samples | of a prompt
eval/*/prompts | prompts | in the round
eval/*/failed | prompts | without rewards; they count in no mean
eval/*/version_min | version | the oldest that sampled any of it
eval/*/truncated_fraction | share | of responses that ran out of tokens, turns or time
eval/*/length_mean | tokens | sampled, of responses
eval/*/length_p95 | tokens | likewise, 95th percentile
"""
METRICS = tuple(read(TABLE))
