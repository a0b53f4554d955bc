"""Text about a run for people: numbers, phases, and what a terminal may be given."""
