"""Run in a process of its own, as compiled_loss.py: every newer objective traced as one graph."""

import sys

import torch

from tests.meanflow.objective.newer import NEWER, drawn


def check(name: str) -> None:
    """Compare loss and gradients of an objective traced as one graph with eager ones."""
    torch.manual_seed(1)
    net, loss = NEWER[name]()
    given = drawn(name, loss, seed=2)
    expected, _ = loss.at(net, **given)
    weights = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(expected, weights, allow_unused=True)
    traced = torch.compile(lambda: loss.at(net, **given)[0], fullgraph=True, backend="aot_eager")
    got = traced()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    assert expected > 0
    found = torch.autograd.grad(got, weights, allow_unused=True)
    assert sum(g is not None and bool(g.any()) for g in gradients) > 10
    for a, b in zip(found, gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def main(*names: str) -> None:
    """Check the named objectives; all of them without names."""
    failed = []
    for name in names or NEWER:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        try:
            check(name)
        except Exception as error:  # every fault in one run
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
        torch._dynamo.reset()
    if failed:
        sys.exit("\n\n".join(failed))


if __name__ == "__main__":
    main(*sys.argv[1:])
