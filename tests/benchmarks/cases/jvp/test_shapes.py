import torch

from benchmarks.cases.jvp.shapes import (
    ERRORS,
    NORMS,
    NORMS_ODD,
    NORMS_SMALL,
    NORMS_TUNING,
    ODD,
    REFERENCE,
    SMALL,
    SPEED,
    TUNING,
    AttentionShape,
    NormShape,
    distinct,
)


def test_the_table_of_reference_3_and_the_speed_table():
    sizes = [(s.heads, s.length) for s in REFERENCE]
    assert sizes == [(h, length) for h in (1, 24) for length in (128, 1024, 4096, 8192, 16384, 32768)]
    assert {s.dim for s in REFERENCE} == {128}
    # Its forward operations are those of the first row of that table: 6 products, 412.3 GFLOP at L16384.
    assert [round(6 * s.product / 1e9, 1) for s in REFERENCE if s.length == 16384] == [412.3, 9895.6]
    assert [s.q for s in SPEED] == [(1, 24, 16384, 128), (1, 32, 8192, 64), (64, 12, 256, 64), (64, 4, 256, 80)]


def test_shapes_fit_each_other_and_are_each_there_once():
    shapes = [*REFERENCE, *SPEED, *ODD, *SMALL, ERRORS]
    assert len(set(shapes)) == len(shapes)
    for s in shapes:
        assert s.q[3] == s.k[3]
        assert s.k[:3] == s.v[:3]
        assert s.q[1] % s.k[1] == 0
        assert s.matrix == s.q[0] * s.q[1] * s.q[2] * s.k[2]
    grouped = AttentionShape("grouped", 2, 6, 10, 8, keys=4, kv_heads=3, dim_v=4)
    assert (grouped.k, grouped.v) == ((2, 3, 4, 8), (2, 3, 4, 4))
    assert 2 * grouped.product == 2 * 2 * 6 * 10 * 4 * (8 + 4)
    assert str(grouped) == "grouped B2 H6 L10 D8"


def test_what_kernels_stumble_over_is_there():
    assert {s.dim for s in ODD} >= {16, 72, 96, 256}
    assert any(s.length == 1 for s in ODD)
    assert any(s.k[2] == 1 for s in ODD)
    assert any(s.length % 16 for s in ODD)
    assert any(s.k[1] == 1 < s.heads for s in ODD)
    assert any(torch.Size(n.size[2:]).numel() == 1 for n in NORMS_ODD if n.op == "group_norm")


def test_norms_have_groups_that_divide_their_channels():
    for n in (*NORMS, *NORMS_ODD, *NORMS_SMALL, *NORMS_TUNING):
        assert isinstance(n, NormShape)
        assert n.groups == 0 or n.size[1] % n.groups == 0
        assert (n.groups > 0) == (n.op == "group_norm")
        assert n.parameters == {"group_norm": (n.size[1],), "ada_layer_norm": (n.size[0], n.size[-1])}.get(
            n.op, (n.size[-1],)
        )
    assert {n.op for n in NORMS} == {"group_norm", "layer_norm", "rms_norm", "ada_layer_norm"}
    assert len(set(NORMS)) == len(NORMS)


def test_what_must_be_fast_is_tuned_for():
    assert [TUNING[s.name] for s in SPEED] == SPEED
    assert all(TUNING[name].name == name for name in TUNING)
    assert {(n.op, n.size) for n in NORMS if n.op in ("group_norm", "layer_norm")} <= {
        (n.op, n.size) for n in NORMS_TUNING
    }
    assert len(set(NORMS_TUNING)) == len(NORMS_TUNING)


def test_sizes_under_two_names_are_measured_once():
    same = AttentionShape("again", 1, 24, 16384, 128)
    assert distinct([*SPEED, same, *REFERENCE]) == [*SPEED, *(s for s in REFERENCE if s.q != same.q)]
