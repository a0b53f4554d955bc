"""The metrics of every actor."""

from asyncrl.observe.catalogue import SHORT, Declaring

actor = Declaring("every actor")
actor.histogram("loop/lag_s", "s", "delay of the event loop's timer", SHORT)
actor.histogram("calls/round_trip_s", "s", "from a call to its reply, without parked calls", SHORT)
actor.gauge("calls/in_flight", "calls", "calls made and not answered yet, including parked ones")
actor.gauge("calls/being_served", "calls", "calls being served, including parked ones")
actor.gauge("heartbeats/largest_bytes", "bytes", "the largest heartbeat so far")
actor.counter("errors/handler", "errors", "unexpected exceptions in message handlers")
actor.counter("events/dropped", "events", "warnings and errors of the log that did not fit into heartbeats")
actor.counter("facts/cpu_s", "s", "processor time of the thread that sends heartbeats")
actor.counter("facts/late", "metrics", "metrics, histograms and resources that waited for a later heartbeat")
actor.counter("heartbeats/sent", "heartbeats", "heartbeats sent")
actor.counter("logs/lost", "lines", "log lines that found no room on the disk or in memory")
actor.counter("heartbeats/sent_bytes", "bytes", "bytes of all heartbeats sent")
actor.counter("wire/strangers", "messages", "connections refused, and messages before a HELLO")
actor.counter("wire/refused", "messages", "HELLOs refused, and messages that the connection has no right to send")
actor.counter("wire/malformed", "messages", "messages that violate the protocol")
actor.counter(
    "wire/early", "messages", "calls and casts that came before the setup finished; they are repeated or dropped"
)
actor.counter("wire/unsent", "messages", "answers to callers whose queue is full; a repeated call asks again")
actor.counter("wire/from_replaced", "messages", "answers ignored because their sender had been replaced")
actor.counter("wire/refused_by_peer", "refusals", "HELLOs of this actor that a peer refused")
