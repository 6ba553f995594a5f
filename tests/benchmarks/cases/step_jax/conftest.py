"""Fixtures with strict JAX, as for the tests of its steps."""

from tests.helpers.strict_jax import strict  # noqa: F401, for every test here
