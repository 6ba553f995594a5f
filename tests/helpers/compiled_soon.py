"""Fast compilation for tests: their programs run so briefly that XLA's optimisation takes longer."""

import os
from collections.abc import Iterator

import pytest

OPTION = "jax_disable_most_optimizations"
# The other way of making fusions, and one module for LLVM: half of the time that compiling takes.
FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def flag_xla() -> None:
    """Have XLA read its flags, as it does once a process; the environment, which results name, is left as it was."""
    try:
        from jaxlib import xla_client
    except ModuleNotFoundError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}")
        _ = xla_client.CompileOptions().executable_build_options.debug_options


@pytest.fixture(scope="module")
def compiled_soon() -> Iterator[None]:
    """Let XLA optimise little."""
    jax = pytest.importorskip("jax")
    before = jax.config.values[OPTION]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OPTION.upper(), "1")  # for what is started
        jax.config.update(OPTION, True)
        yield
    jax.config.update(OPTION, before)
