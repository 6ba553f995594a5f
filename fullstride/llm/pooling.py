"""Embeddings from a model's last hidden states."""

import numpy as np
from jaxtyping import Float

from fullstride.llm.sampling_params import SamplingParams

# An embedding is that of the prompt: the one token after it is left out.
EMBEDDING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def embedding_of(vector: Float[np.ndarray, " hidden"], normalize: bool) -> list[float]:
    """Return a pooled hidden state in fp32's numbers, perhaps divided by its Euclidean norm."""
    size = float(np.linalg.norm(vector)) if normalize else 1.0
    return (vector / (size or 1.0)).astype(np.float32).tolist()
