"""Host time of a `jax.jit` call with a NumPy array, without and with a copy of it, and with the array's sum."""

import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (16, 2**18, 2**22, 2**26)
COUNTS = (300, 100, 20, 10)


@jax.jit
def total(x: Any) -> Any:
    """Sum the batch, the least that a step can do with it."""
    return jnp.sum(x)


def least(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the shortest times, in ms, until a call returned and until it was done."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        out = call()
        back = time.perf_counter()
        jax.block_until_ready(out)
        times.append((back - began, time.perf_counter() - began))
    return 1e3 * min(t for t, _ in times), 1e3 * min(t for _, t in times)


def row(size: int, count: int) -> dict[str, float]:
    """Return the row of one size."""
    x = np.ones(size // 4, np.float32)
    total(x).block_until_ready()
    plain, done = least(lambda: total(x), count)
    copied, _ = least(lambda: total(x.copy()), count)
    return {"bytes": size, "plain_ms": plain, "copied_ms": copied, "waited_ms": done}


if __name__ == "__main__":
    conditions = {"jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()}
    rows = [row(size, count) for size, count in zip(SIZES, COUNTS, strict=True)]
    json.dump({"conditions": conditions | {"device": jax.devices()[0].device_kind}, "rows": rows}, sys.stdout, indent=1)
