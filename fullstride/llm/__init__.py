"""A paged-attention engine in JAX for Qwen and Llama models, offline and behind an OpenAI API."""
