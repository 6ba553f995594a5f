"""Tally of the tests that attack something, by kind; `python -m tests.helpers.attacks` writes it into its page."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "hostile-requests.md"
START, END = "<!-- attacks -->\n", "<!-- end of attacks -->"
SERVER, TEXT, WEIGHTS = "tests/llm/server/", "tests/llm/text/", "tests/llm/weights/"


class Kind(NamedTuple):
    """Kind of attack: its name, what holds, and the tests of it by file, as a pattern of their names."""

    name: str
    holds: str
    tests: dict[str, str]


KINDS = (
    Kind(
        "requests without a key, or with what is none",
        "401 on every route but those of probes",
        {f"{SERVER}test_middleware.py": "every_route|is_no_key|that_is_none|constant_time|even_measured|own$"},
    ),
    Kind(
        "foreign pages and foreign host names",
        "400 or 405; nothing runs",
        {f"{SERVER}test_middleware.py": "foreign_page|by_local_names|any_name|end_alike"},
    ),
    Kind(
        "headers and bodies that are too long, too slow or no HTTP",
        "431, 408, 400 or 503; others are answered",
        {f"{SERVER}test_connections.py": "without_end|does_not_come|byte_by_byte|no_http|upgrade|more_connections"},
    ),
    Kind(
        "bodies and values that are wrong",
        "400 with the name of the parameter; never a 5xx",
        {
            f"{SERVER}test_errors.py": "refuse|are_none|cannot_read|deeper|said_to_be|above_the_limit|compressed",
            f"{SERVER}test_beside_loop.py": "long_|counted",
        },
    ),
    Kind(
        "requests generated from the server's own description",
        "an answer as documented",
        {f"{SERVER}test_openapi.py": "as_documented"},
    ),
    Kind(
        "grammars, schemas and checks that cost too much",
        "refused within their limits of time and memory",
        {
            f"{TEXT}test_grammar.py": "costly|is_refused",
            f"{TEXT}test_grammar_trial.py": "too_much|not_understood|with_its_client",
            f"{SERVER}tools/test_shapes.py": "costly|that_has_gone|without_end",
            f"{SERVER}tools/test_conformance.py": "cannot_be_checked|ends$|is_no_schema|whose_schema_is_none",
        },
    ),
    Kind(
        "chat templates that reach out or never end, texts that spell special tokens",
        "the sandbox and its process hold; texts stay texts",
        {
            f"{TEXT}test_chat_template.py": "reaches_nothing|all_time_or_memory|no_template",
            f"{TEXT}test_confined.py": "too_much|imported_from|whom_it_belongs",
            f"{TEXT}test_special_text.py": "",
        },
    ),
    Kind(
        "attacks beside which others are served",
        "each is answered as it should be, and others are served meanwhile",
        {"tests/benchmarks/cases/llm/test_hostile.py": "comes_to_the_server", f"{SERVER}test_load.py": ""},
    ),
    Kind(
        "damaged or forged weights: safetensors, GGUF, their settings",
        "one line that says what is wrong; never a crash, never a pickle",
        {
            f"{WEIGHTS}test_hostile.py": "",
            f"{WEIGHTS}test_gguf_file.py": "cut|damage|noise|versions",
            f"{WEIGHTS}test_safetensors_file.py": "cut|damage",
            f"{WEIGHTS}test_stacked_experts.py": "damage|refused",
        },
    ),
    Kind(
        "damaged checkpoints and runs",
        "refused by name, and the one before is used",
        {"tests/meanflow/checkpoints/test_folder.py": "damage|manifest|refuse", "tests/runs/test_survey.py": "damaged"},
    ),
    Kind(
        "damaged or forged data: pickles, pictures, shards, downloads",
        "refused with the place; no function of a pickle is called",
        {
            "tests/meanflow/data/test_cifar10.py": "pickle|refused",
            "tests/meanflow/data/test_fashion_mnist.py": "refused",
            "tests/meanflow/data/test_shards.py": "refused|strangers",
            "tests/meanflow/data/test_reading.py": "damage|befalls|away",
            "tests/assets/test_fetch.py": "damaged|wrongly|without_end",
        },
    ),
    Kind(
        "signals, full disks and stuck processes",
        "saved, or ended with a reason",
        {
            "tests/process/test_signals.py": "",
            "tests/process/test_watchdog.py": "",
            "tests/meanflow/training/test_trainer.py": "signal|full_disk",
        },
    ),
)
FILES = sorted({file for kind in KINDS for file in kind.tests})


def tally(nodes: Iterable[str]) -> list[int]:
    """Count the cases of each kind among the identifiers of collected tests."""
    parts = [node.partition("::")[::2] for node in nodes]
    named = [(file, name.partition("[")[0]) for file, name in parts]
    return [
        sum(file in kind.tests and bool(re.search(kind.tests[file], name)) for file, name in named) for kind in KINDS
    ]


def filled(page: str, counts: list[int]) -> str:
    """A page with the tally between its marks."""
    rows = [f"| {kind.name} | {count:,} | {kind.holds} |" for kind, count in zip(KINDS, counts, strict=True)]
    table = "\n".join(["| attack | tests | what held |", "|---|---:|---|", *rows, f"| all | {sum(counts):,} | |"])
    before, _, rest = page.partition(START)
    return f"{before}{START}{table}\n{END}{rest.partition(END)[2]}"


class Collected:
    """Plugin that keeps the identifiers of the tests that are collected."""

    nodes: tuple[str, ...] = ()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep them before any is deselected."""
        self.nodes = tuple(item.nodeid for item in items)


if __name__ == "__main__":
    collected = Collected()
    if code := pytest.main(["--collect-only", "-qq", *(str(ROOT / file) for file in FILES)], [collected]):
        raise SystemExit(code)
    PAGE.write_text(filled(PAGE.read_text(), tally(collected.nodes)))
