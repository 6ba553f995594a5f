"""The dashboards and alerts of docs/monitoring ask for numbers that are there."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
import httpx
import yaml

from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.runs.trackers.tracker import open_tracker
from tests.llm.server.live import fake_server

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
RULES = FOLDER / "rules.yml"
DASHBOARDS = sorted(FOLDER.glob("*.json"))


def names_in(text: str) -> set[str]:
    """The metrics that a text in Prometheus' format has, with the parts of histograms."""
    return set(re.findall(r"^(?:# TYPE )?([a-z_]\w+)", text, re.MULTILINE))


@pytest.fixture(scope="module")
def there(tmp_path_factory) -> set[str]:
    folder = tmp_path_factory.mktemp("run")
    open_tracker("prometheus", TrackedRun("p", "r", folder, {})).close()
    with fake_server() as live, httpx.Client(base_url=live.url) as http:
        return names_in(http.get("/metrics").text + (folder / "prometheus" / "train.prom").read_text())


def queries() -> dict[str, list[str]]:
    """Each file's queries."""
    boards = {path.name: json.loads(path.read_text())["panels"] for path in DASHBOARDS}
    asked = {
        name: [target["expr"] for panel in panels for target in panel["targets"]] for name, panels in boards.items()
    }
    return asked | {
        RULES.name: [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    }


@pytest.mark.parametrize("file", queries())
def test_every_metric_of_a_query_exists(file, there):
    asked = {name for query in queries()[file] for name in re.findall(r"\b(?:fullstride|process)_\w+", query)}
    assert asked
    assert asked - there == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole(path):
    board = json.loads(path.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps([panels, board["templating"]]))) - {"__all"} <= variables
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(corners) == len(panels)


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")
def test_promtool_takes_every_query(tmp_path):
    rules = [
        {"record": f"r:{number}", "expr": re.sub(r"\$__rate_interval", "1m", query)}
        for number, query in enumerate(query for of in queries().values() for query in of)
    ]
    (tmp_path / "all.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    subprocess.run(["promtool", "check", "rules", RULES, tmp_path / "all.yml"], check=True)
