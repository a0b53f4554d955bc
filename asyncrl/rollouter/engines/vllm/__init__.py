"""The vLLM engine: the only place that imports vllm."""
