"""The texts of BERT's own tests."""

from tests.bert.conftest import texts, tiny_is_small  # noqa: F401, fixtures
