from tests.strict_jax import strict  # noqa: F401, for every test here
