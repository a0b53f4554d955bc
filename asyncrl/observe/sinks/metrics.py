"""The metrics of the sinks actor, and of the controller where it hands lines to it."""

from asyncrl.observe.catalogue import Declaring

both = Declaring("controller, sinks")
both.counter("sinks/dropped", "lines", "lines dropped because a queue was full or no sink took them")

sinks = Declaring("sinks")
sinks.counter("sinks/lost", "records", "records that a sink failed to take")
