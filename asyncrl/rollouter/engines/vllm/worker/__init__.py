"""The side of a weight update that runs inside vLLM's workers."""
