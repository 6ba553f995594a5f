"""Fixtures with the texts of BERT's own tests."""

from tests.bert.conftest import texts, tiny_is_small  # noqa: F401, fixtures
from tests.helpers.compiled_soon import compiled_soon  # noqa: F401, a fixture
from tests.helpers.strict_jax import strict  # noqa: F401, for every test here
