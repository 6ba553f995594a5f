"""Tables about forms of kernels: each cell is the file's number, and what was not measured is an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.doc_tables import forms
from benchmarks.report.reading import Folder, read_folder
from fullstride.errors import ConfigError
from tests.benchmarks.report.made import RANDOM
from tests.benchmarks.report.markup import cells_of


def _folder(path: Path, name: str, data: dict[str, Any]) -> Folder:
    (path / f"{name}--gpu.json").write_text(json.dumps({"case": name, "device": "a GPU", **data}))
    return read_folder(path)


def _any() -> float:
    return RANDOM.uniform(1, 9)


def _step(label: str, rows: int) -> dict[str, Any]:
    return {"label": label, "rows": rows, "ctx": 1_000, "ms": _any(), "floor": _any()}


def _versions() -> dict[str, list[dict[str, Any]]]:
    few, many = forms.FEW_ROWS, forms.FEW_ROWS + 1
    kept = [_step(label, rows) for rows in (few, many) for label in ("base", "sentinel")]
    only = {group: [_step("base", rows) for rows in (few, many)] for group in ("first version", forms.NOW)}
    return only | {"attention by mma, variants": kept}


def test_versions_of_the_token_kernel_have_the_form_that_was_kept_for_so_many_rows(tmp_path):
    groups = _versions()
    table = forms.token(_folder(tmp_path, "llm-token-kernel", {"groups": groups}))
    kept = groups["attention by mma, variants"]
    for place, (rows, middle) in enumerate(((4, kept[1]), (5, kept[2]))):
        first, now = (groups[group][place] for group in ("first version", forms.NOW))
        times = [f"{now['floor']:.3f}", f"{first['ms']:.3f}", f"{middle['ms']:.3f}", f"**{now['ms']:.3f}**"]
        assert cells_of(table, str(rows)) == ["1,000", *times, f"{1e3 * rows / now['ms']:,.0f}"]


def test_a_version_that_was_not_timed_is_an_error(tmp_path):
    folder = _folder(tmp_path, "llm-token-kernel", {"groups": _versions() | {"first version": []}})
    with pytest.raises(ConfigError, match="no row with label=base, rows=4, ctx=1000"):
        forms.token(folder)


def test_stamps_are_told_in_microseconds(tmp_path):
    made = {
        group: {step: {what: {which: 1e3 * _any()} for what, which in forms.STAMPS} for step in ("1x100", "4x100")}
        for group in (forms.BEFORE, forms.NOW)
    }
    table = forms.stamps(_folder(tmp_path, "llm-token-kernel", {"stamps": made}))
    for (what, which), shown in forms.STAMPS.items():
        times = (made[group][step][what][which] for group, step in forms.STAMPED.values())
        assert cells_of(table, shown) == [f"{time / 1e3:.1f}" for time in times]


def _chain() -> list[dict[str, Any]]:
    names = dict.fromkeys((name, rows) for of in forms.CHAIN.values() for name, rows in zip(of, (64, 32), strict=True))
    return [{"name": name, "rows": rows, "ms": _any(), "floor": _any()} for name, rows in names]


def test_a_chain_stands_beside_separate_kernels(tmp_path):
    rows = _chain()
    table = forms.chain(_folder(tmp_path, "llm-decode-chain", {"groups": {"rows as images": rows}}))
    found = {(row["name"], row["rows"]): row for row in rows}
    assert cells_of(table, "bound") == [f"{found['paged', n]['floor']:.2f}" for n in (64, 32)]
    ours = found["chained {'qkv': (64, 2)}", 64], found["chained", 32]
    assert cells_of(table, "**chain**") == [f"**{row['ms']:.2f}**" for row in ours]


def test_choosing_a_token_is_what_comes_beyond_the_product(tmp_path):
    rows = [
        {"batch": batch, "way": way, "us": 100 * _any()}
        for batch in forms.BATCHES
        for way in ("product alone", *forms.CHOICES)
    ]
    folder = _folder(tmp_path, "llm-sampling", {"rows": rows})
    us = {(row["way"], row["batch"]): row["us"] for row in rows}
    for way, shown in forms.CHOICES.items():
        expected = [f"{us[way, batch] - us['product alone', batch]:.0f}" for batch in forms.BATCHES]
        assert cells_of(forms.sampling(folder), shown) == expected
    with pytest.raises(ConfigError, match="no row with way=product alone, batch=64"):
        forms.sampling(_folder(tmp_path, "llm-sampling", {"rows": rows[1:]}))


def test_a_form_is_empty_where_it_was_not_timed_and_an_error_where_it_never_was(tmp_path):
    times = {f"{form} | {size}": 100 * _any() for form in forms.FORMS for size in forms.SIZES}
    del times["stream 4x1 | A | 8"]
    folder = _folder(tmp_path, "paged-attention-forms", {"us": times})
    for form, shown in forms.FORMS.items():
        found = (times.get(f"{form} | {size}") for size in forms.SIZES)
        expected = ["" if us is None else f"{us:.1f}" for us in found]
        assert cells_of(forms.attention(folder), shown) == expected
    others = {name: us for name, us in times.items() if not name.startswith("new 8x2")}
    with pytest.raises(ConfigError, match="no form 'new 8x2'"):
        forms.attention(_folder(tmp_path, "paged-attention-forms", {"us": others}))


def test_sums_of_our_own_stand_beside_the_librarys(tmp_path):
    rows = [
        {"dtype": dtype, "rows": rows, "hidden": hidden, "psum": _any(), "ours": _any()}
        for dtype in ("float32", "bfloat16")
        for rows, hidden in forms.SUMS
    ]
    table = forms.sums(_folder(tmp_path, "llm-device-sums", {"rows": rows}))
    half = rows[len(forms.SUMS) :]
    assert cells_of(table, "NCCL") == [f"{row['psum']:.1f}" for row in half]
    assert cells_of(table, "ours") == [f"{row['ours']:.1f}" for row in half]
