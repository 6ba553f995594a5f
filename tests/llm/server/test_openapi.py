"""Requests made from /openapi.json, whatever they are, get documented answers."""

import hypothesis
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.llm.server.fake_engine import FakeEngine
from tests.llm.server.live import fake_server


@pytest.fixture(scope="module")
def described():
    """The description of a server whose answers are short."""
    with fake_server(FakeEngine(script=lambda *_: b"ok", max_length=256)) as live:
        yield schemathesis.openapi.from_url(f"{live.url}/openapi.json")


# What the schema allows may still be too much for a server's limits, or ask for a model that is none.
BUT = [positive_data_acceptance]
SETTINGS = hypothesis.settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


GET = ["/v1/models", "/v1/models/{model}", "/health", "/ready", "/metrics"]
POST = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"]
GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [("GET", path, GOOD) for path in GET] + [("POST", path, mode) for path in POST for mode in (GOOD, BAD)],
)
def test_every_answer_is_as_documented(described, method, path, mode):
    operation = described[path][method]

    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    @SETTINGS
    def check(case):
        case.call_and_validate(excluded_checks=BUT)

    check()


def test_a_guarded_server_says_so():
    with fake_server(api_keys=("k",)) as live:
        described = live.app.openapi()
    security = {path: methods[min(methods)].get("security") for path, methods in described["paths"].items()}
    assert security.pop("/health") is security.pop("/ready") is None
    assert all(each == [{"key": []}] for each in security.values())
    assert not any("422" in each["responses"] for methods in described["paths"].values() for each in methods.values())
