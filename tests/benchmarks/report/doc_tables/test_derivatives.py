"""Tables about ops with forward derivatives: each cell is the file's number, what misses or did not run says so."""

import json
from dataclasses import replace

import pytest

from benchmarks.harness.results import Row
from benchmarks.report.doc_tables import derivatives
from benchmarks.report.reading import Measurement, read_folder
from fullstride.measure.roofline import Floor
from tests.benchmarks.report.made import RANDOM, ms, row, write_rows
from tests.benchmarks.report.markup import as_number, cells_of

WHOLE, SHAPE, OTHER = "dit B2 H3 L128 D64", "long64 B1 H2 L64 D64", "table B1 H1 L128 D64"
KINDS = ("forward", "detached", "through")
PEERS = {
    "forward": ("ours", "vanilla"),
    "detached": ("ours", "cudnn", "flash", "vanilla"),
    "through": ("ours", "vanilla"),
}


def _op(kinds: dict[str, tuple[str, ...]], shapes: tuple[str, ...]) -> list[Row]:
    return [
        row(f"{shape} {kind}, {who}", shape=shape, kind=kind, who=who, gflop=RANDOM.uniform(1, 9), bytes=1 << 25)
        for shape in shapes
        for kind, whos in kinds.items()
        for who in whos
    ]


def test_attention_stands_beside_its_peers_and_what_did_not_run_says_why(tmp_path):
    rows = [r for r in _op(PEERS, (WHOLE, SHAPE, OTHER)) if r.name != f"{SHAPE} through, vanilla"]
    left = [{"shape": SHAPE, "kind": "through", "who": "vanilla", "why": "no memory"}]
    folder = write_rows(tmp_path, "jvp-attention", rows, precision="bf16", at="all", left_out=left)
    table = derivatives.attention(folder)
    assert OTHER.partition(" ")[2] not in str(table)
    found = {r.name: r for r in rows}
    columns = [(kind, who) for kind, whos in PEERS.items() for who in whos]
    for shape in (WHOLE, SHAPE):
        cells = cells_of(table, shape.partition(" ")[2])
        for (kind, who), cell in zip(columns, cells, strict=True):
            if (shape, kind, who) == (SHAPE, "through", "vanilla"):
                assert cell == "no memory"
                continue
            of = found[f"{shape} {kind}, {who}"]
            time, _, rate = cell.partition(" ")
            assert as_number(time) == pytest.approx(of.timing.median_ms, rel=1e-3)
            rated = who == "ours" and kind != "detached"
            assert rate == (f"({of.extra['gflop'] / of.timing.median_ms:.0f} TFLOP/s)" if rated else "")


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_run_that_was_cut_short_tells_of_the_shapes_that_come_first_where_it_is_newer(tmp_path, hours):
    whole, short = (_op(PEERS, (WHOLE, OTHER)), _op(PEERS, (WHOLE,)))
    left = [{"shape": OTHER, "kind": "all", "who": "all", "why": "no time"}]
    for rows, left_out, hour in ((whole, [], 12), (short, left, 12 + hours)):
        more = {"date": f"2026-11-02T{hour}:00:00+00:00", "precision": "bf16", "at": "all", "left_out": left_out}
        folder = write_rows(tmp_path, "jvp-attention", rows, **more)
    newest = short if hours > 0 else whole
    times = {name: cells_of(derivatives.attention(folder), name.partition(" ")[2])[1] for name in (WHOLE,)}
    assert as_number(times[WHOLE]) == pytest.approx(newest[1].timing.median_ms, rel=1e-3)
    sizes = str(derivatives.attention_sizes(folder))
    assert OTHER in sizes
    (row_of_whole,) = (line for line in sizes.splitlines() if line.startswith(f"| {WHOLE} |"))
    assert as_number(row_of_whole.split("|")[2].strip()) == pytest.approx(whole[0].timing.median_ms, rel=1e-3)


def test_columns_of_attention_say_whose_they_are(tmp_path):
    folder = write_rows(tmp_path, "jvp-attention", _op(PEERS, (WHOLE,)), precision="bf16", at="all", left_out=[])
    assert cells_of(derivatives.attention(folder), "ms") == [
        *("forward: ours", "forward: math"),
        *(f"past the tangent: {who}" for who in ("ours", "cuDNN", "flash", "math")),
        *("through it: ours", "through it: math"),
    ]


def test_another_fused_op_has_columns_where_it_ran_and_says_why_it_did_not(tmp_path):
    whose = derivatives.FUSED_DUAL
    peers = PEERS | {kind: (*PEERS[kind], whose) for kind in ("forward", "detached")}
    rows = _op(peers, (WHOLE, SHAPE, "unet80 B1 H2 L64 D80"))
    rows = [r for r in rows if r.extra["who"] != whose or r.extra["shape"] == WHOLE]
    left = [{"shape": SHAPE, "kind": "forward", "who": whose, "why": "GateError: wrong"}]
    folder = write_rows(tmp_path, "jvp-attention", rows, precision="bf16", at="all", left_out=left)
    table = derivatives.attention(folder)
    places = [i for i, name in enumerate(cells_of(table, "ms")) if name.endswith(f": {whose}")]
    assert [cells_of(table, "ms")[i] for i in places] == [f"forward: {whose}", f"past the tangent: {whose}"]
    found = {r.name: r for r in rows}
    for place, kind in zip(places, ("forward", "detached"), strict=True):
        time = as_number(cells_of(table, WHOLE.partition(" ")[2])[place])
        assert time == pytest.approx(found[f"{WHOLE} {kind}, {whose}"].timing.median_ms, rel=1e-3)
    assert [cells_of(table, SHAPE.partition(" ")[2])[i] for i in places] == ["GateError: wrong", ""]
    assert [cells_of(table, "B1 H2 L64 D80")[i] for i in places] == ["", ""]


def _all_sizes(tmp_path, without: tuple[str, ...] = ()):
    """The folder and the rows by name, of which some were left out, each above its floor and with memory of its own."""
    every = _op(PEERS | {"primal": ("flash", "cudnn")}, (WHOLE, OTHER))
    floors = [Floor(*[r.timing.median_ms * RANDOM.uniform(0.02, 1) for _ in range(2)]) for r in every]
    memory = [RANDOM.randrange(1, 10**12) for _ in every]
    every = [
        replace(r, floor=floor, timing=replace(r.timing, peak_bytes=peak))
        for r, floor, peak in zip(every, floors, memory, strict=True)
    ]
    rows = [r for r in every if r.name not in without]
    gone = (r.extra for r in every if r.name in without)
    left = [{key: of[key] for key in ("shape", "kind", "who")} | {"why": "no memory"} for of in gone]
    folder = write_rows(tmp_path, "jvp-attention", rows, precision="bf16", at="all", left_out=left)
    return folder, {r.name: r for r in rows}


def test_every_size_has_its_work_its_rate_and_its_time_over_the_librarys_fastest(tmp_path):
    without = (f"{OTHER} primal, flash", f"{OTHER} detached, cudnn", f"{OTHER} through, vanilla")
    folder, found = _all_sizes(tmp_path, without)
    fastest = {
        WHOLE: [("primal", "flash", "cudnn"), ("detached", "flash", "cudnn")],
        OTHER: [("primal", "cudnn"), ("detached", "flash")],
    }
    for shape, theirs in fastest.items():
        *cells, over = cells_of(derivatives.attention_sizes(folder), shape)
        ours = [found[f"{shape} {kind}, ours"] for kind in ("forward", "through")]
        for row_, (first, math, *rest) in zip(ours, (cells[:5], cells[5:]), strict=True):
            shown, slow = [first, *rest], found.get(row_.name.replace("ours", "vanilla"))
            if slow is None:
                assert (math, row_.name) == ("no memory", f"{OTHER} through, ours")
            else:
                assert as_number(math) == pytest.approx(slow.timing.median_ms, rel=1e-3)
            time, gflop = row_.timing.median_ms, row_.extra["gflop"]
            wanted = [time, gflop, gflop / time, time / row_.floor.ms]
            assert [as_number(cell) for cell in shown] == pytest.approx(wanted, rel=6e-3)
        times = [min(found[f"{shape} {kind}, {who}"].timing.median_ms for who in whos) for kind, *whos in theirs]
        wanted = sum(row_.timing.median_ms for row_ in ours) / sum(times)
        assert as_number(over) == pytest.approx(wanted, rel=6e-3)


def test_memory_of_every_size_is_in_millions_of_bytes_and_what_did_not_run_says_why(tmp_path):
    folder, found = _all_sizes(tmp_path, without=(f"{OTHER} through, vanilla",))
    table = derivatives.attention_memory(folder)
    for shape in (WHOLE, OTHER):
        names = [f"{shape} {kind}, {who}" for kind in ("forward", "through") for who in ("ours", "vanilla")]
        for name, cell in zip(names, cells_of(table, shape), strict=True):
            if name in found:
                assert as_number(cell) == pytest.approx((found[name].timing.peak_bytes or 0) / 1e6, rel=6e-3)
            else:
                assert cell == "no memory"


def test_each_peer_that_is_faster_is_listed_and_no_other(tmp_path):
    folder, found = _all_sizes(tmp_path)
    table = derivatives.attention_slower(folder)
    shown = 0
    for shape in (WHOLE, OTHER):
        for kind, who in ((kind, who) for kind, whos in PEERS.items() for who in whos[1:]):
            its, ours = (found[f"{shape} {kind}, {name}"].timing.median_ms for name in (who, "ours"))
            if its < ours:
                cells = cells_of(table, f"{shape} | {derivatives.PASS[kind]} | {derivatives.NAMES[who]}")
                assert [as_number(cell) for cell in cells] == pytest.approx([its, ours, ours / its], rel=6e-3)
                shown += 1
    assert len(table.rows) == shown


def test_a_norm_below_its_target_is_bold_and_one_above_is_not(tmp_path):
    rows = _op(dict.fromkeys(KINDS, ("ours", "eager")), ("group_norm 1x1",))
    table = derivatives.norms(write_rows(tmp_path, "jvp-norms", rows, precision="bf16", at="all", left_out=[]))
    *shares, over = cells_of(table, "group_norm 1x1")
    for kind, cell, ratio in zip(KINDS, shares, over.split(" / "), strict=True):
        ours, eager = (next(r for r in rows if r.name.endswith(f"{kind}, {who}")) for who in ("ours", "eager"))
        percent = 100 * ours.floor.ms / ours.timing.median_ms
        assert cell.startswith("**") == (percent < derivatives.LEAST[kind])
        assert as_number(cell) == pytest.approx(percent, abs=0.51)
        assert as_number(ratio) == pytest.approx(eager.timing.median_ms / ours.timing.median_ms, rel=0.05)


def test_a_share_just_below_its_target_is_not_rounded_up_to_it():
    def at(share: float) -> Measurement:
        return Measurement("x", 1.0, 1.0, 1.0, share, "memory", 1 / share, {})

    assert derivatives._share(at(0.797), 80.0) == "**79.7**"
    assert derivatives._share(at(0.803), 80.0) == "80"


def test_times_are_means_over_machines_beside_what_the_lowest_scores_lost(tmp_path):
    whos, shape = ("fullstride", "cuDNN", "flash"), {"batch": 4, "heads": 2, "length": 64, "head_dim": 80}
    took = {who: [ms(), ms()] for who in whos}
    lost = {who: RANDOM.randrange(1, 512) for who in whos}
    rows = [
        {"who": who, "length": 64, "head_dim": head_dim, "score": score, "rows": 512}
        | {"rows_not_finite": {"q": lost[who] if (score, head_dim) == (-1800, 80) else 0, "k": 7, "v": 7}}
        for who in whos
        for head_dim in (64, 80)
        for score in (-150, -1800, 0)
    ]
    times = [shape | {"who": who, "ms": [{"median": one} for one in found]} for who, found in took.items()]
    path = tmp_path / "attention-low-scores--some-gpu.json"
    path.write_text(json.dumps({"case": "attention-low-scores", "rows": rows, "times": times}))
    *us, cudnn, ours = cells_of(derivatives.low_scores(read_folder(tmp_path)), "4, 2, 64, 80")
    assert [as_number(cell) for cell in us] == pytest.approx([500 * sum(took[who]) for who in whos], rel=1e-2)
    assert (cudnn, ours) == (f"{lost['cuDNN']} of 512", f"{lost['fullstride']} of 512")
