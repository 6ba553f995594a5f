"""A fixture for tests whose programs run for a moment: XLA optimises little of them."""

from collections.abc import Iterator

import pytest

OPTION = "jax_disable_most_optimizations"


@pytest.fixture(scope="module")
def compiled_soon() -> Iterator[None]:
    """Compiling with optimisations would take longer than all that is run."""
    jax = pytest.importorskip("jax")
    before = jax.config.values[OPTION]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(OPTION.upper(), "1")  # for what is started
        jax.config.update(OPTION, True)
        yield
    jax.config.update(OPTION, before)
