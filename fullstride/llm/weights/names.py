"""Models that are known by a name."""

# The asset that each is.
MODELS = {"smollm2": "smollm2/gguf"}
