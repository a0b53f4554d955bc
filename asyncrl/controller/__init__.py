"""The controller: registry, run state, metrics fan-out. No bulk data passes through it."""
