"""Requests of the peers' own tests, and the page that counts them."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.llm.server.peers.cases import GROUPS, Case
from tests.llm.server.real import real_server

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "conformance.md"


@pytest.fixture(scope="module")
def http(tiny_engine):
    with real_server(*tiny_engine) as live, httpx.Client(base_url=f"{live.url}/v1/", timeout=60) as client:
        yield client


def _answer(http: httpx.Client, case: Case) -> tuple[int, Any]:
    """The status, and the answer or a stream's events."""
    found = http.post(case.route, json={"model": "tiny", **case.body})
    if found.status_code != 200 or not case.body.get("stream"):
        return found.status_code, found.json()
    return 200, [json.loads(line[6:]) for line in found.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("group", GROUPS)
def test_what_peers_are_asked_is_answered_or_refused_with_its_reason(http, group):
    refusals = 0
    for case in GROUPS[group]:
        status, answer = _answer(http, case)
        if callable(case.expected):
            assert status == 200, (case.name, answer)
            assert case.expected(answer), (case.name, answer)
            continue
        assert status in (400, 404), (case.name, answer)
        assert (case.expected or "") in answer["error"]["message"], case.name
        refusals += case.expected is not None
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {group} |"))
    counts = re.fullmatch(r"\| .+? \| `[^|]+` \| (\d+) \| (\d+)(?:: .+)? \|", row)
    assert counts is not None
    assert counts.groups() == (str(len(GROUPS[group]) - refusals), str(refusals))
