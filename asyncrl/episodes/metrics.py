"""The metrics of an episode host."""

from asyncrl.observe.catalogue import SECONDS, Declaring

episodes = Declaring("episodes")
episodes.counter("episodes/played", "episodes", "episodes that ended by themselves or with their worker")
episodes.counter("episodes/failed", "episodes", "played episodes without an outcome")
episodes.counter("episodes/stopped", "episodes", "episodes that the rollouter ended")
episodes.counter("episodes/played_alone", "episodes", "suspects of worker deaths, played in a worker of their own")
episodes.counter("episodes/tool_calls", "calls", "tool calls")
episodes.counter("episodes/tool_errors", "calls", "tool calls that raised; the policy sees the error")
episodes.counter("episodes/tool_mistakes", "calls", "calls of unknown tools or with invalid arguments")
episodes.counter("episodes/stalled", "processes", "workers ended because their event loop was blocked")
episodes.counter(
    "episodes/out_of_memory", "processes", "workers and programs ended because of episode.max_memory_bytes"
)
episodes.counter("episodes/workers_killed", "processes", "worker processes that the episode host ended")
episodes.counter("episodes/workers_died", "processes", "worker processes that died")
episodes.counter("episodes/output_dropped_bytes", "bytes", "bytes printed beyond episode.max_output_bytes")
episodes.counter("episodes/http_requests", "requests", "requests to the endpoint for an answer of the policy")
episodes.counter("episodes/http_refused", "requests", "requests to the endpoint that were refused or had no key")
episodes.counter("episodes/http_retries", "requests", "requests to the endpoint that repeat an earlier one")
episodes.counter("episodes/http_cut", "requests", "requests whose connection the endpoint closed")
episodes.gauge("episodes/open", "episodes", "episodes at a worker or a program")
episodes.gauge("episodes/waiting", "episodes", "waiting for a worker")
episodes.gauge("episodes/suspects", "episodes", "episodes that were in a worker when it died")
episodes.histogram("episodes/play_s", "s", "from the arrival of an episode to its end", SECONDS)
