import sys

import pytest
from torch.distributed.run import config_from_args, parse_args

import fullstride
from fullstride.errors import ConfigError
from fullstride.launch.processes import single_command, sources, torchrun_command

TRAIN = ["meanflow", "train", "epochs=3"]


def test_one_process_needs_no_launcher():
    assert (
        torchrun_command(TRAIN, 1, restarts=5) == single_command(TRAIN) == [sys.executable, "-m", "fullstride", *TRAIN]
    )


def test_torchrun_takes_the_command_line():
    line = torchrun_command(TRAIN, 3, restarts=5)
    assert line[:3] == [sys.executable, "-m", "fullstride.launch.elastic"]
    config, _, words = config_from_args(parse_args(line[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 3, 5)
    assert words[-5:] == ["fullstride", *TRAIN, "distributed=ddp"]
    options = ["meanflow", "sample", "runs/x", "--num", "7", "--max-restarts", "8"]
    config, _, words = config_from_args(parse_args(torchrun_command(options, 2, restarts=1)[3:]))
    assert (config.max_restarts, words[-8:]) == (1, ["fullstride", *options])
    line = torchrun_command(TRAIN, 4, restarts=2, nodes=2, meeting="first:29500", job="j")
    config, _, _ = config_from_args(parse_args(line[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 2, 4, 2)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "first:29500", "j")


def test_benchmarks_are_called_by_their_own_name_and_taken_along(monkeypatch, tmp_path):
    words = ["benchmarks", "llm"]
    assert single_command(words) == [sys.executable, "-m", *words]
    assert list(sources(TRAIN)) == ["fullstride"]
    folders = sources(words)
    assert list(folders) == ["fullstride", "benchmarks"]
    assert all((folder / "__main__.py").is_file() for folder in folders.values())
    monkeypatch.setattr(fullstride, "__file__", str(tmp_path / "fullstride" / "__init__.py"))
    with pytest.raises(ConfigError, match="benchmarks lie next to the library in a clone, but .* does not exist"):
        sources(words)
