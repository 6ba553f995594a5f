"""Ways of Flax to call a training step of an `nnx.Module`, on a model of BERT's shape; Flax is imported when needed."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases.step_jax.ways import Running, trained
from benchmarks.cases.step_jax.workload import INNER, LAYERS, PLACES, TRIVIAL, WIDTH, WORDS, Workload
from fullstride.errors import ConfigError


def _nnx() -> Any:
    try:
        return importlib.import_module("flax.nnx")
    except ImportError:
        raise ConfigError("--section nnx: Flax is not installed; run: pip install flax") from None


def _bert(layers: int) -> Any:
    """Return a model with as many arrays as `workload.Bert` has."""
    nnx = _nnx()
    rngs = nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self, **parts: Any):
            for name, part in parts.items():
                setattr(self, name, part)

    linear = lambda a, b: nnx.Linear(a, b, rngs=rngs)  # noqa: E731
    norm = lambda: nnx.LayerNorm(WIDTH, rngs=rngs)  # noqa: E731
    table = lambda rows: nnx.Embed(rows, WIDTH, rngs=rngs)  # noqa: E731

    def layer() -> Any:
        names = ("query", "key", "value", "out")
        attention = Block(**{name: linear(WIDTH, WIDTH) for name in names}, norm=norm())
        return Block(
            attention=attention, feedforward=Block(up=linear(WIDTH, INNER), down=linear(INNER, WIDTH), norm=norm())
        )

    return Block(
        **{"words": table(WORDS), "places": table(PLACES), "types": table(2), "norm": norm()},
        layers=nnx.List([layer() for _ in range(layers)]),
        **{"pooler": linear(WIDTH, WIDTH), "head": linear(WIDTH, WIDTH), "head_norm": norm()},
        head_out=linear(WIDTH, WORDS),
    )


def one_bias(model: Any, batch: Any, key: Any) -> Any:
    """Return a loss that computes next to nothing."""
    return batch["scale"] * model.head_out.bias[...].sum() + 0 * jax.random.key_data(key)[0].astype("float32")


def nnx_tree(size: str) -> Workload:
    """Return a step that rewrites every array of such a model by one multiplication."""
    batch = {"ids": jnp.ones((1, 4), jnp.int32), "scale": jnp.asarray(0.5, "float32")}
    return Workload(f"{size}, nnx", lambda: _bert(LAYERS[size]), one_bias, TRIVIAL, batch, jax.random.key(1))


def _called(workload: Workload, compiled: Callable[..., Any], graph: bool | None = None) -> Running:
    """Call what `compiled` makes of a step and its (model, optimizer), with batch and key."""
    nnx = _nnx()
    model = workload.model()
    optimizer = nnx.Optimizer(model, workload.optimizer, wrt=nnx.Param, graph=graph)

    def step(model: Any, optimizer: Any, batch: Any, key: Any) -> Any:
        loss, grads = nnx.value_and_grad(workload.loss_fn, graph=graph)(model, batch, key)
        optimizer.update(model, grads)
        return loss

    call = compiled(step, model, optimizer)
    return Running(lambda: call(workload.batch, workload.key), lambda: trained(model))


def _jit(workload: Workload, **settings: Any) -> Running:
    def compiled(step: Any, model: Any, optimizer: Any) -> Any:
        jitted = _nnx().jit(step, **settings)
        return lambda batch, key: jitted(model, optimizer, batch, key)

    return _called(workload, compiled, **settings)


def _cached_partial(workload: Workload) -> Running:
    nnx = _nnx()
    return _called(workload, lambda step, *held: nnx.cached_partial(nnx.jit(step), *held))


NNX_WAYS: dict[str, Callable[[Workload], Running]] = {
    "nnx.jit": _jit,
    "nnx.jit(graph=False)": lambda workload: _jit(workload, graph=False),
    "nnx.cached_partial": _cached_partial,
}
