from tests.compiled_soon import compiled_soon  # noqa: F401, for tests that ask for it
from tests.strict_jax import strict  # noqa: F401, for every test here
