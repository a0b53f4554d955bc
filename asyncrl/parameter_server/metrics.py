"""The metrics of the parameter server."""

from asyncrl.observe.catalogue import Declaring

server = Declaring("parameter_server")
server.counter("weights/updates_committed", "updates", "successful updates of replicas")
server.counter("weights/updates_failed", "updates", "failed updates of replicas; each is tried again")
server.counter("weights/pauses_taken_back", "pauses", "pauses revoked from replicas that held one for too long")
server.counter("weights/broadcasts_begun", "broadcasts", "broadcasts begun, with all members paused")
server.counter("weights/broadcasts_called_off", "broadcasts", "broadcasts cancelled before they began")
server.counter("weights/broadcasts_broken", "broadcasts", "broadcasts that failed")
server.counter("weights/chunks_served", "chunks", "chunks of weights sent over the network")
server.counter("weights/bytes_served", "bytes", "bytes of weights sent over the network")
server.counter(
    "weights/engines_differ", "updates", "updates after which an engine's checksum was not that of the first"
)
server.gauge("weights/replicas", "replicas", "known replicas")
server.gauge("weights/replicas_behind", "replicas", "replicas whose last update failed")
server.gauge("weights/replicas_paused", "replicas", "replicas paused for a load")
server.gauge("weights/failed_attempts", "attempts", "failed attempts in a row, of the replica with the most")
