import pytest


@pytest.mark.parametrize(
    ("backend", "families"),
    [
        pytest.param("eager", ["attention", "networks", "transforms"], marks=pytest.mark.thorough),
        pytest.param("aot_eager", ["more_rules", "more_formats", "masks"], marks=pytest.mark.thorough),
        ("aot_eager", ["attention", "rules"]),
        ("aot_eager", ["norms", "formats", "explicit", "products"]),
        ("aot_eager", ["networks", "checkpointed", "switched", "dynamic", "transforms"]),
        ("inductor", ["representatives"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_one_graph_has_eagers_values_and_gradients(forked, backend, families):
    (done,) = forked(["tests.jvp.compiled", backend, *families])
    assert done.returncode == 0, done.stderr[-3000:]
