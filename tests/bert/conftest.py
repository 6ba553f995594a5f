from pathlib import Path

import pytest

from fullstride.bert.model import config
from tests.bert.data.texts import corpus
from tests.bert.runs import TINY
from tests.helpers.compiled_soon import compiled_soon  # noqa: F401, for tests that ask for it
from tests.helpers.strict_jax import strict  # noqa: F401, for every test here


@pytest.fixture
def tiny_is_small(monkeypatch):
    """`model=tiny` of a size that compiles at once."""
    monkeypatch.setitem(config.SIZES, "tiny", TINY)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    """The made-up entries, one a line."""
    path = tmp_path_factory.mktemp("texts") / "made.txt"
    path.write_text("\n".join(corpus().entries))
    return path
