"""The metrics of the controller."""

from asyncrl.observe.catalogue import Declaring

controller = Declaring("controller")
controller.counter(
    "heartbeats/ignored", "heartbeats", "heartbeats ignored: of dead or condemned actors, or out of order"
)
controller.counter(
    "heartbeats/left_out", "values", "values in heartbeats that were refused: not numbers, too many or too long"
)
controller.counter("lines/refused", "lines", "metrics lines refused as malformed or too long")
controller.counter("snapshots/failed", "snapshots", "snapshots that failed; the log has the reason")
controller.counter("snapshots/taken", "snapshots", "snapshots taken for viewers and for the recording")
controller.counter("snapshots/lost", "snapshots", "snapshots that were not recorded, for example on a full disk")
controller.counter("sinks/restarts", "restarts", "restarts of the sinks actor that the controller noticed")
controller.gauge("snapshots/bytes", "bytes", "size of the newest snapshot")
controller.gauge("snapshots/take_s", "s", "time to make the newest snapshot")
controller.gauge("snapshots/recorded_bytes", "bytes", "size of the recording")
