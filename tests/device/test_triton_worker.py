import importlib.util
import os
import sys
import time
from pathlib import Path

from fullstride.device.triton_worker import changed_since


def test_files_that_were_changed_or_removed_since_they_were_imported_are_named(tmp_path, monkeypatch):
    for name in ("made_kernels", "made_kernels.others", "made_elsewhere"):
        path = tmp_path / f"{name}.py"
        path.write_text("FACTOR = 2")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    os.utime(tmp_path / "made_elsewhere.py", (2e9, 2e9))
    now = time.time() + 1
    assert changed_since(now, "made_kernels") == []
    os.utime(tmp_path / "made_kernels.others.py", (now + 1, now + 1))
    assert [Path(file).name for file in changed_since(now, "made_kernels")] == ["made_kernels.others.py"]
    (tmp_path / "made_kernels.py").unlink()
    assert len(changed_since(now, "made_kernels")) == 2
