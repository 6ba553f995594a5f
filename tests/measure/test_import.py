import pkgutil
import subprocess
import sys

import fullstride.measure

MODULES = sorted(f"fullstride.measure.{module.name}" for module in pkgutil.iter_modules(fullstride.measure.__path__))


def test_measuring_loads_no_framework_of_its_own_accord(tmp_path):
    assert len(MODULES) >= 6
    code = f"import sys, {', '.join(MODULES)}; print({{'torch', 'jax'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "set()\n"
