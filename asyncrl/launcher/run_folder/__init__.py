"""The run folder: its name, its contents, and what a run is resumed from."""
