"""Results of a folder: its files, and one data frame of all measurements."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.harness.results import SCHEMA, cut_short, finite, read_result
from benchmarks.harness.seeds import check_experiment
from fullstride.errors import ConfigError

Record = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """File of results, and the origin of its numbers."""

    name: str  # the file's
    data: Record
    kind: str = "other"  # or `result` of a case, or `experiment`

    def recorded(self, key: str, kind: type) -> Any:
        """Return a part of the environment; None if it has another type, as in a file that was edited by hand."""
        environment = self.data.get("environment")
        found = environment.get(key) if isinstance(environment, dict) else None
        return found if isinstance(found, kind) else None

    @property
    def moment(self) -> str:
        """Time of the measurement."""
        return self.recorded("date", str) or ""

    @property
    def case(self) -> str:
        """Name of its page: its case or experiment, else the page of files that no case writes."""
        if self.kind == "experiment":
            return f"experiment-{self.data['experiment']}"
        return self.data["case"] if self.kind == "result" else "other"

    @cached_property
    def machine(self) -> str:
        """Name of the GPU, or of the CPU with its cores, or the file's own text, or nothing."""
        config, device = self.data.get("config"), self.data.get("device")
        on = device or (config.get("device") if isinstance(config, dict) else None)
        given = self.recorded("gpu", object) or self.data.get("machine") or {}
        gpu = given.get("name") or given.get("device") if isinstance(given, dict) else given
        if gpu and on != "cpu":  # a result of a CPU may have been measured beside an idle GPU
            return str(gpu)
        if cpu := self.recorded("cpu", str):
            return f"{cpu}, {self.recorded('cores', int)} cores"
        return device if isinstance(device, str) and device not in ("cpu", "cuda", "mps") else ""

    def origin(self, packages: tuple[str, ...] = ()) -> str:
        """Return machine, versions of these or all packages, commits (`+`: changed) and day, if recorded."""
        versions = (self.recorded("versions", dict) or {}).items()
        told = ", ".join(f"{name} {version}" for name, version in versions if not packages or name in packages)
        one = f"{(self.recorded('commit', str) or '')[:7]}{'+' * (self.recorded('dirty', bool) is True)}".lstrip("+")
        commits = ", ".join(map(str, self.recorded("commits", list) or [])) or one
        return ", ".join(filter(None, (self.machine, told, commits and f"commit {commits}", self.moment[:10])))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Rows of the data frame, each with its origin."""
        origin = {"case": self.case, "machine": self.machine, "device": self.data.get("device"), "file": self.name}
        origin |= {"commit": self.recorded("commit", str), "date": self.moment[:10]}
        return pd.DataFrame([record | origin for record in self.records()])

    def records(self) -> Iterator[Record]:
        """Return the file's rows of the data frame.

        Of a case a row each, its times in milliseconds under `median`, `p10`, `p90` and `bound`, conditions under `at_`
        and their names; what was left out has its reason under `why`. Of an experiment a metric of a row each, its mean
        under `median`. Of other files each object that has scalars.
        """
        if self.kind == "result":
            chosen = flat(self.data["conditions"], prefix="at_")
            yield from (chosen | row for row in (*map(_measured, self.data["rows"]), *_asked(self.data["conditions"])))
        elif self.kind == "experiment":
            for name, row in ((part["name"], row) for part in self.data["parts"] for row in part["rows"]):
                for metric, found in row["metrics"].items():
                    seeds = {int(seed): value for seed, value in found["seeds"].items()}
                    yield {"part": name, **row["labels"], "metric": metric, "median": found["mean"], "seeds": seeds}
            for claim in self.data["claims"]:
                yield {"row": claim["text"], "metric": "claim", "found": claim["found"]}
        else:
            yield from _objects({key: value for key, value in self.data.items() if key != "environment"})


def flat(record: Mapping[str, Any], joint: str = "_", prefix: str = "") -> Record:
    """Return the scalars of a record; nested ones under both names, as in `over_flat_ratio`, and an `interval`."""
    found: Record = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found |= flat(value, joint, f"{prefix}{key}{joint}")
        elif key == "interval":
            found |= {f"{prefix}low": value[0], f"{prefix}high": value[1]}
        elif not isinstance(value, list):
            found[f"{prefix}{key}"] = value
    return found


def _objects(node: Any, path: str = "") -> Iterator[Record]:
    """Yield objects with scalars by their place; nested ones with objects or lists are separate."""
    if isinstance(node, list):
        for item in node:
            yield from _objects(item, path)
    elif isinstance(node, dict):
        # What has objects or lists of its own; of others the scalars belong to this one.
        deep = {key: value for key, value in node.items() if isinstance(value, list) or (
            isinstance(value, dict) and any(isinstance(inner, dict | list) for inner in value.values()))}  # fmt: skip
        if own := flat({key: value for key, value in node.items() if key not in deep}):
            yield {"path": path, **own}
        for key, value in deep.items():
            yield from _objects(value, f"{path}, {key}" if path else key)


def _measured(row: Record) -> Record:
    timing, bound = row["timing"], row["floor"]
    times = {key: finite(timing[f"{key}_ms"]) for key in ("median", "p10", "p90")}
    bounds = {"bound": finite(bound["ms"]), "by": str(bound["bound"]), "over": finite(row["over_floor"])}
    own = {"row": str(row["name"]), "metric": "ms", "peak_bytes": timing.get("peak_bytes")}
    return flat(dict(row["extra"])) | own | times | bounds


def _asked(conditions: Record) -> Iterator[Record]:
    """Return requested ratios, and rows that were not measured, with their reason if the case gives one."""
    for one in conditions.get("targets") or []:
        yield flat(one) | {"row": f"{one['name']} / {one['against']}", "metric": "target"}
    told = conditions.get("left_out") or []
    for one in told if isinstance(told, list) else [told]:
        record = {"name": one} if isinstance(one, str) else flat(one)
        row = record.get("name") or f"{record.get('shape')} {record.get('kind')}, {record.get('who')}"
        yield record | {"row": row, "why": record.get("why", "left out")}


@dataclass(frozen=True)
class Results:
    """Results of a folder."""

    folder: Path
    sources: dict[str, Source]  # by their files' names
    unread: dict[str, str] = field(default_factory=dict)  # why nothing of a file is read

    @cached_property
    def frame(self) -> pd.DataFrame:
        """Data frame of a row per measurement: case, machine, device, commit, date, file, labels, metric, numbers."""
        return pd.concat(map(self.of, self.sources), ignore_index=True)

    def of(self, name: str) -> pd.DataFrame:
        """Return a file's rows of the data frame, without columns that it does not have."""
        return self.sources[name].frame

    def newest(self, pattern: str, machine: str = "") -> str:
        """The newest file, whole ones first, of a name, in which `*` is any part and `[...]` may be missing.

        A machine is the last part of the name; ConfigError if there is none.
        """
        pattern = pattern.removesuffix("--*") + f"--{machine}" if machine else pattern
        text = re.escape(pattern).replace(r"\*", "(?:(?!--).)*").replace(r"\[", "(?:").replace(r"\]", ")?")
        found = [source for name, source in self.sources.items() if re.fullmatch(text, name.removesuffix(".json"))]
        if not found:
            raise ConfigError(f"no result {pattern}.json; measure the case again, or remove the table's row")
        return max(found, key=lambda of: (not cut_short(of.data.get("conditions", {})), of.moment)).name


def _read(path: Path) -> Source | str:
    """Return a file's results, or the reason for ignoring it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: finite(float(name)))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path}: not JSON ({error}); measure the case again or delete the file") from None
    if not isinstance(data, dict):
        return f"a JSON {type(data).__name__}, expected an object"
    if "experiment" in data:
        return Source(path.name, check_experiment(data, path), "experiment")
    if "schema" not in data:
        return Source(path.name, data)
    if data["schema"] != SCHEMA:
        return f"schema {data['schema']!r}, expected {SCHEMA}"
    if not read_result(path)["rows"]:
        raise ConfigError(f"{path}: no rows, expected at least one; measure the case again or delete the file")
    return Source(path.name, data, "result")


def read_results(folder: Path) -> Results:
    """Read every `*.json` of a folder; ConfigError names the folder without any, or the file that is not whole."""
    found = {path.name: _read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ConfigError(
            f"{folder}: found no *.json; run `python -m benchmarks ... --out {folder}`, or give another --results"
        )
    sources = {name: one for name, one in found.items() if isinstance(one, Source)}
    results = Results(folder, sources, {name: one for name, one in found.items() if isinstance(one, str)})
    for name in sources:
        try:
            results.of(name)  # which reads its rows
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{folder / name}: a row is incomplete ({type(error).__name__}: {error}), expected name, timing, "
                "floor, over_floor and extra; measure the case again or delete the file"
            ) from None
    return results
