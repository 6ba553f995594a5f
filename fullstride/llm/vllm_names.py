"""Aliases of settings: vLLM's names that mean the same here, and earlier names."""

ENGINE = {
    "max_model_len": "max_length",
    "max_num_seqs": "max_sequences",
    "max_num_batched_tokens": "max_tokens_per_step",
    "enable_prefix_caching": "prefix_cache",
    "num_gpu_blocks_override": "kv_blocks",
}
# Settings of vLLM that mean something else here, and their replacements.
DIFFERENT = {
    "gpu_memory_utilization": "it is a share of the whole GPU, including weights and activations; kv_share is the KV "
    "cache's share of the memory that is free once the weights are loaded (default 0.8)",
    "swap_space": "nothing is swapped to the host; when blocks run out, the newest sequences are recomputed",
    "enable_lora": "adapters that are given enable it; max_loras makes room for more",
    "quantization": "AWQ, GPTQ and GGUF are recognized by their files; quantize=stored keeps them packed, and fp8, int8"
    " and int4 pack other weights",
    "revision": "it is a part of the model's name: OWNER/NAME@REVISION",
    "enforce_eager": "every step is compiled; compile_cache=true caches the programs for the next start",
}
# `SamplingParams` had these names once.
SAMPLING_BEFORE = {"structured": "structured_outputs", "include_stop": "include_stop_str_in_output"}
