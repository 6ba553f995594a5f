import gc
import importlib.util
import os
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest

from tests.helpers.attacks import Collected
from tests.helpers.forked import Run, forks

# Before anything of the package is imported. Without its checker nothing is checked, as on a machine for GPU tests.
if importlib.util.find_spec("beartype"):
    from tests.helpers import typed

    typed.install()

# What is fetched or computed is kept for this run of the tests alone, and not in the user's cache.
os.environ.setdefault("FULLSTRIDE_CACHE", tempfile.mkdtemp(prefix="fullstride_tests_"))

# Nothing that a test writes has to outlive the machine: a process that is killed loses no write.
os.fsync = lambda fd: None

# Collected seldom: tracing makes millions of objects that stay, and JAX collects garbage of its own each time.
gc.set_threshold(20_000, 20, 20)

# Tests assert what is done, not how soon: the processes of a suite wait for each other's cores.
hypothesis.settings.register_profile("any time", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any time")

# One thread a test process: two processes share two cores. What a test starts is told so, too: two threads that wait
# for each other on a core that others use take three times the processor's time.
try:
    import torch

    torch.set_num_threads(1)
    # Without a GPU Triton's kernels run in its interpreter, which reads this where a kernel is defined.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # More would be processes that import PyTorch, for each process that compiles.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        from tests.helpers import interpreted

        interpreted.install()
except ModuleNotFoundError:
    pass


def pytest_configure(config: pytest.Config) -> None:
    """Keep what is collected, for the page that counts it."""
    config.pluginmanager.register(Collected(), Collected.__name__)


def pytest_collection_finish() -> None:
    """Freeze the objects of libraries and tests, so that garbage collection skips them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=range(int(os.environ.get("SEEDS", "1"))), ids="seed{}".format)
def seed(request) -> int:
    """Return a seed of random inputs; `SEEDS=3 make test` tries each test with three."""
    return request.param


@pytest.fixture(scope="session")
def forked() -> Iterator[Run]:
    """Return what runs modules in processes that cost no start of Python."""
    with forks() as run:
        yield run
