"""Updates of the engine's weights: versions fetched, handed on and loaded."""
