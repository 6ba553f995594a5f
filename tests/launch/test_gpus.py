from fullstride.launch import gpus
from fullstride.launch.gpus import count_gpus


def test_without_a_driver_or_with_one_that_hangs_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_COUNT", gpus._COUNT.replace("libcuda.so.1", str(tmp_path / "libcuda.so.1")))
    assert count_gpus() == 0
    monkeypatch.setattr(gpus, "_COUNT", "import time; time.sleep(60)")
    monkeypatch.setattr(gpus, "PATIENCE", 0.2)
    assert count_gpus("0") == 0
