"""The metrics of the dataloader. In their names, ``tickets/`` stands for leases."""

from asyncrl.observe.catalogue import SECONDS, Declaring

dataloader = Declaring("dataloader")
dataloader.counter("tickets/granted", "groups", "leases of prompt groups, including those of evaluations")
dataloader.counter("tickets/granted_again", "groups", "leases repeated because their reply may have been lost")
dataloader.counter("tickets/granted_alone", "groups", "leases of suspects of deaths, which get an engine of their own")
dataloader.counter("tickets/returned", "groups", "leases returned without generation")
dataloader.counter("tickets/orphaned", "groups", "leases whose holder died")
dataloader.counter(
    "tickets/recovered", "groups", "orphaned leases that the learner does not hold; they are leased again"
)
dataloader.counter("tickets/rejected", "prompts", "prompts not leased again after too many deaths")
dataloader.counter("tickets/trained", "groups", "outcomes that the learner reported as trained")
dataloader.counter("tickets/filtered", "groups", "outcomes reported as filtered: without a signal")
dataloader.counter("tickets/quarantined", "groups", "outcomes reported as quarantined")
dataloader.counter(
    "tickets/left_out", "prompts", "outcomes reported as left out by a data rule such as data.max_prompt_tokens"
)
dataloader.counter("tickets/rested", "prompts", "outcomes reported as rested by data.curriculum")
dataloader.counter("tickets/evaluated", "groups", "outcomes reported as evaluated")
dataloader.gauge("prompts/read", "prompts", "training prompts read so far, of all sources")
dataloader.gauge("tickets/outstanding", "groups", "leased for training, neither reported nor returned yet")
dataloader.gauge(
    "tickets/gate", "groups", "groups that the gate allows to be outstanding for an engine on the newest version"
)
dataloader.gauge("tickets/oldest_s", "s", "age of the oldest open lease")
dataloader.gauge("tickets/parked", "calls", "lease requests that wait for the gate")
dataloader.gauge("staleness/limit", "versions", "working limit of the gate, at most staleness.max", lines="train")
dataloader.histogram("tickets/age_s", "s", "from the lease of a training group to the report of its outcome", SECONDS)
