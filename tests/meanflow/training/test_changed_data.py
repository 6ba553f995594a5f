"""A run that goes on with files that were removed, replaced or added since it began."""

import shutil

import numpy as np
import pytest

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import find_checkpoint
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.sources.known_files import KNOWN, known_files
from fullstride.meanflow.evaluation.checkpoint import _data_of
from fullstride.meanflow.sampling.generate import load_generator
from fullstride.meanflow.training.trainer import Trainer, train
from tests.meanflow.data.pictures import write_picture
from tests.meanflow.data.test_reading import config, folder  # noqa: F401  the fixture


def names(split) -> set[str]:
    return {split.records.file(i).name for i in range(len(split))}


def changed(pictures):
    return config(pictures, epochs=3, save_every=1, resume=True, data={"allow_changed": True})


def test_a_removed_picture_is_named_and_the_run_goes_on_without_it(folder, capfd):  # noqa: F811
    first = Trainer(config(folder, epochs=2, save_every=1))
    held, trained = names(first.data.test), names(first.data.train)
    run = first.run_to_end()
    gone = min(trained)
    (folder / gone).unlink()
    with pytest.raises(ConfigError, match=rf"other data: 1 gone \(\./{gone}\); .*data.allow_changed=true") as refused:
        train(config(folder, epochs=3, save_every=1, resume=True))
    assert "\n" not in str(refused.value)
    resumed = Trainer(changed(folder))
    assert f"1 gone (./{gone})" in capfd.readouterr().err
    assert names(resumed.data.test) == held
    assert names(resumed.data.train) == trained - {gone}
    assert names(load_data(resumed.config.data).test) != held  # dealt out anew it would be trained-on pictures
    resumed.run_to_end()
    assert find_checkpoint(run).name == f"step_{10 + resumed.steps:08d}"
    # From its own checkpoint on it is the same data, which an evaluation finds again, too.
    again = Trainer(config(folder, epochs=3, resume=True))
    assert names(again.data.test) == held
    assert names(_data_of(load_generator(run, "cpu"), run, "").test) == held


def test_replaced_and_new_pictures_are_named_and_new_ones_are_trained_on(folder, capfd):  # noqa: F811
    first = Trainer(config(folder, epochs=1))
    held = names(first.data.test)
    first.run_to_end()
    write_picture(folder / "0001.png", np.random.default_rng(5), (8, 8), mode="RGBA")
    write_picture(folder / "zz.png", np.random.default_rng(6), (8, 8))
    resumed = Trainer(changed(folder))
    told = capfd.readouterr().err
    assert "1 new (./zz.png)" in told
    assert "1 of another size (./0001.png)" in told
    assert names(resumed.data.test) == held
    assert "zz.png" in names(resumed.data.train)


def test_a_set_that_became_much_smaller_begins_its_next_epoch(folder):  # noqa: F811
    first = Trainer(config(folder, epochs=1))
    first.state.position.epoch, first.state.position.batch, first.state.position.step = 0, 4, 4
    first._save(must=True)
    for name in sorted(names(first.data.train))[:12]:
        (folder / name).unlink()
    resumed = Trainer(changed(folder))
    assert resumed.steps == 2
    assert (resumed.state.position.epoch, resumed.state.position.batch) == (1, 0)
    assert len(list(zip(range(3), resumed.batches, strict=False))) == 3


def test_a_class_that_is_gone_or_new_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    for kind in ("ant", "bee"):
        for i in range(12):
            write_picture(tmp_path / "data" / kind / f"{i}.png", rng, (8, 8))
    trainer = Trainer(config(tmp_path / "data", epochs=1))
    trainer._save(must=True)
    shutil.move(tmp_path / "data/ant", tmp_path / "data/cow")  # as many classes, and bees would be class 0
    with pytest.raises(ConfigError, match="class ant is gone, expected the same class folders"):
        Trainer(changed(tmp_path / "data"))


def test_without_a_list_of_files_what_was_held_out_is_not_guessed(folder):  # noqa: F811
    first = Trainer(config(folder, epochs=1))
    first._save(must=True)
    assert known_files(first.run) is not None
    (first.run / KNOWN).unlink()
    (folder / "0003.png").unlink()
    with pytest.raises(ConfigError, match="the changed files are unknown"):
        Trainer(config(folder, epochs=3, resume=True))
    with pytest.raises(ConfigError, match=f"the run has no {KNOWN}"):
        Trainer(changed(folder))


def test_it_is_for_folders_of_pictures(tmp_path):
    given = config(tmp_path / "data", data={"allow_changed": True})
    given.data.name, given.data.path = "digits", ""
    with pytest.raises(ConfigError, match="data.allow_changed=true data=digits: expected data=image_folder"):
        Trainer(given)
