"""A few responses before a run starts: ``asyncrl-launch CONFIG --dry-run --generate N``."""
