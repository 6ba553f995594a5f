"""Each area imports only what its extra installs; an error names all missing packages and the extra."""

import json

import pytest

from fullstride.extras import area_of, how_to_install
from tests.helpers.only_installed import ROOT, brought_by, lines_of, run_only

# PyTorch's own builds for CUDA require it, and the modules of its kernels import it.
TORCH = ["torch", "triton"]
IMPORT = """
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""
USE = """
import torch
from fullstride.measure.flops import count_flops
from fullstride.jvp import jvp, prepare
from fullstride.step.torch import TrainStep

model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
prepare(model)
x, v = torch.randn(2, 6, 5).double()
u, du = jvp(model.double(), (x,), (v,))
assert torch.allclose(du, (model(x + 1e-6 * v) - model(x - 1e-6 * v)) / 2e-6, atol=1e-6), du
assert count_flops(lambda: model(x)) == 2 * 6 * (5 * 7 + 7 * 3)
step = TrainStep(lambda model, x: model(x).square().mean(), model, torch.optim.SGD(model.parameters()), backend="eager")
before = [p.clone() for p in model.parameters()]
step(x)
assert not any(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
"""


def _modules(*areas: str) -> list[str]:
    """Modules of areas."""
    paths = [path for area in areas for path in sorted((ROOT / "fullstride" / area).rglob("*.py"))]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize(
    ("lines", "modules", "use"),
    [
        (lines_of("") + TORCH, _modules("jvp", "step/torch", "measure"), USE),
        (lines_of("torch") + TORCH, _modules("meanflow"), ""),
        (lines_of("jax"), _modules("step/jax", "bert"), ""),
        (lines_of("llm"), [name for name in _modules("llm") if ".server" not in name], ""),
        (lines_of("serve"), _modules("llm/server"), ""),
        (lines_of("launch"), _modules("launch"), ""),
    ],
    ids=["torch alone", "torch", "jax", "llm", "serve", "launch"],
)
def test_an_area_imports_nothing_but_what_it_says(lines, modules, use):
    assert len(modules) > 10
    done = run_only(lines, IMPORT + use, *modules)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def failed() -> dict[str, list[str]]:
    """Modules that the base package alone cannot import, with the missing package and the message."""
    code = """
import functools, importlib
from fullstride import extras
extras.version = functools.cache(extras.version)  # which reads a file each time
failed = {}
for name in sys.argv[1:]:
    if any(name.startswith(f"{other}.") for other in failed):
        continue  # it is in a package that failed
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        failed[name] = [error.name, str(error)]
print(json.dumps(failed))
"""
    modules = [name for path in (ROOT / "fullstride").iterdir() if path.is_dir() for name in _modules(path.name)]
    done = run_only(lines_of(""), code, *modules)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_module_that_lacks_packages_names_them_all_and_their_extra(failed):
    base = brought_by(lines_of(""))
    brought = {
        extra: brought_by(lines_of(extra), deep=False) - base for extra in ("torch", "jax", "llm", "serve", "launch")
    }
    for module, (name, message) in failed.items():
        area = area_of(module)
        told, _, remedy = message.partition("; ")
        names = told.removeprefix(f"{area.module} needs packages that are not installed: ").split(", ")
        assert set(names) == set(area.part or brought[area.extra]), module
        assert remedy == how_to_install(area.extra), module
        assert not name.startswith("fullstride"), module


def test_every_area_has_such_a_module(failed):
    areas = {area_of(module).module.removeprefix("fullstride.") for module in failed}
    assert areas >= {"jvp", "step.torch", "meanflow", "step.jax", "bert", "llm", "llm.server"}
    assert areas >= {"launch.modal", "launch.slurm", "launch.skypilot"}
