import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.harness.drift import drifts


def test_a_line_is_found_and_the_warm_up_is_none_of_it(seed):
    rng = np.random.default_rng(seed)
    hours = np.sort(rng.uniform(0, 2, 41))
    slope, level = rng.uniform(1, 9), rng.uniform(100, 200)
    values = level + slope * hours + np.where(np.arange(41) < 9, 1e6, 0)  # 9 of 41 are the first fifth
    found = drifts([*hours], {"rising": [*values], "level": [level] * 41, "none": [0.0] * 41})
    rising, span = found["rising"], hours[-1] - hours[9]
    assert rising["per_hour"] == pytest.approx(slope)
    assert rising["growth"] == pytest.approx(slope * span / (level + slope * hours[9:].mean()))
    assert rising["last"] == values[-1]
    assert found["level"]["per_hour"] == pytest.approx(0, abs=1e-9)
    assert found["none"]["growth"] == 0


@pytest.mark.parametrize("count", [1, 2])
def test_few_samples_are_no_error(count):
    (found,) = drifts([float(i) for i in range(count)], {"a": [5.0] * count}).values()
    assert (found["per_hour"], found["first"], found["last"]) == (pytest.approx(0), 5, 5)


# In a process of its own: beside other tests, memory that they freed would serve the array, and threads of theirs end.
HOLDING = """
import json, os, threading
import numpy as np
from benchmarks.harness.drift import held
before, pipe = held(), os.pipe()
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
kept = np.ones(1 << 23)
after = held()
stop.set()
thread.join()
print(json.dumps({"bytes": kept.nbytes, "held": {name: after[name] - before[name] for name in after}}))
"""


def test_what_is_held_is_seen():
    ran = subprocess.run([sys.executable, "-c", HOLDING], capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(ran.stdout)
    assert found["held"].pop("resident_bytes") == pytest.approx(found["bytes"], rel=0.1)  # 64 MiB
    assert found["held"] == {"descriptors": 2, "threads": 1, "python_threads": 1}
