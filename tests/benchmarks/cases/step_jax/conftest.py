"""As of the steps in JAX."""

from tests.helpers.strict_jax import strict  # noqa: F401, for every test here
