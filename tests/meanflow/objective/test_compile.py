import pytest


# Of `unet` test_products.py checks the compiled loss, too; its convolutions are `song_unet`'s.
@pytest.mark.parametrize(
    "network",
    [*(pytest.param(name, marks=pytest.mark.thorough) for name in ("unet", "song_unet", "dit, recomputed")), "dit"],
)
def test_the_whole_loss_is_one_graph_with_eagers_gradients(forked, network):
    (done,) = forked(["tests.meanflow.objective.compiled_loss", network])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


# The one that always runs has a gradient through its derivative.
@pytest.mark.parametrize("names", [("tvm",), pytest.param((), marks=pytest.mark.thorough)])
def test_every_newer_objective_is_one_graph_with_eagers_gradients(forked, names):
    (done,) = forked(["tests.meanflow.objective.compiled_newer", *names])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
