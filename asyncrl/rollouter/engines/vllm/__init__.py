"""The vLLM engine: the only place that imports vllm.

vLLM 0.32 has two model runners. The second one (vllm/v1/worker/gpu) is its default where Triton exists, so on GPUs; on
CPUs vLLM uses the first. No setting of asyncrl changes the choice. The engine relies on the following in both:

================================  ===========================  =========================================================
what                              first runner                 second runner
================================  ===========================  =========================================================
``model_runner.get_model()``      unwraps CUDA graphs          is the model
``model.lora_manager``            serves the adapter of id 1   the same manager; the runner keeps only ids of adapters
log-probs of sampled tokens       float32, after the           the same; one row for each request of the step
                                  temperature
log-probs of a prompt             a chunk at once              1,024 tokens at a time
noise of a seeded request         a generator, from the start  a function of seed and position
a pause with a step in flight     is complete once all its     the same
                                  tokens are sent
``reset_running_requests``        requests are resumed         requests are added again, with their sampled tokens
a reload of weights               copies into the same memory  the same, so CUDA graphs stay valid
sleep of level 2                  loses the weights            also loses positions of M-RoPE (``clear_positions``)
================================  ===========================  =========================================================

The second runner was read, and never run here.
"""
