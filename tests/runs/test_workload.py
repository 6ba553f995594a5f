import json

import pytest

from fullstride.bert.training.settings import TrainSettings
from fullstride.errors import ConfigError
from fullstride.meanflow.config.schema import TrainConfig
from fullstride.runs.folder import MARKS, TITLES, check_kind, kind_of, open_folder, run_config, write_config
from fullstride.runs.lock import release

SETTINGS = {"meanflow": TrainConfig, "bert": TrainSettings}


def test_each_workloads_settings_have_its_mark_alone():
    assert MARKS.keys() == TITLES.keys() == SETTINGS.keys()
    for kind, make in SETTINGS.items():
        assert [name for name, mark in MARKS.items() if mark in vars(make())] == [kind]
        assert kind_of(vars(make())) == kind
    assert kind_of({"model_type": "bert"}) is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"steps": 3}', "\udcff"])
def test_a_file_that_no_run_wrote_is_of_no_workload(tmp_path, text):
    assert run_config(tmp_path) == {}
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert run_config(tmp_path) == {}
    check_kind(tmp_path, "bert")


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("bert", "meanflow", "run is a MeanFlow run, not a BERT run; expected another folder"),
        ("meanflow", "bert", "run is a BERT run, not a MeanFlow run; expected another folder"),
    ],
)
def test_a_run_of_another_workload_is_refused_and_keeps_its_settings(tmp_path, kind, other, message):
    run = tmp_path / "run"
    run.mkdir()
    write_config(run, SETTINGS[other](run_name="run"))
    before = (run / "config.json").read_text()
    for given in ({}, {"resume": True}):
        with pytest.raises(ConfigError, match=message):
            open_folder(SETTINGS[kind](output_dir=str(tmp_path), run_name="run", **given))
    assert (run / "config.json").read_text() == before
    release(open_folder(SETTINGS[other](output_dir=str(tmp_path), run_name="run", resume=True)))
    replaced = SETTINGS[kind](output_dir=str(tmp_path), run_name="run", overwrite=True)
    release(open_folder(replaced))
    assert json.loads(before) != run_config(run)
