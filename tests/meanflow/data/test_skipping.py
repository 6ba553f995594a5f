"""Damaged pictures that are passed over, and those that a check finds before the first step."""

from typing import Any

import numpy as np
import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.meanflow.checkpoints.folder import find_checkpoint
from fullstride.meanflow.data.catalogue import load_data
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.training.trainer import Trainer, train
from tests.meanflow.data.pictures import write_picture
from tests.meanflow.data.test_reading import config


@pytest.fixture
def classes(tmp_path):
    """Two classes of 14 pictures each."""
    rng = np.random.default_rng(3)
    for kind in ("ant", "bee"):
        for i in range(14):
            write_picture(tmp_path / "data" / kind / f"{i:02d}.png", rng, (8, 8))
    return tmp_path / "data"


def damage(split, places):
    for place in places:
        file = split.records.file(place)
        file.write_bytes(file.read_bytes()[:70])


@pytest.mark.parametrize("workers", [0, 1])
def test_the_next_whole_picture_of_its_class_stands_in(classes, workers, capfd):
    data = load_data(config(classes, data={"skip_damaged": 4}).data)
    whole, labels = data.train.read(torch.arange(len(data.train))), data.train.labels
    last = [int((labels == kind).nonzero().max()) for kind in (0, 1)]
    damage(data.train, [2, 3, *last])
    first = [int((labels == kind).nonzero().min()) for kind in (0, 1)]
    stands_in = {2: 4, 3: 4} | dict(zip(last, first, strict=True))
    expected = torch.stack([whole[stands_in.get(i, i)] for i in range(len(whole))])
    assert torch.equal(data.train.read(torch.arange(len(whole))), expected)
    order = torch.randperm(len(whole))[None, None]
    with Loader(data.train, torch.device("cpu"), workers) as loader:
        (batch,) = loader.batches([order])
    assert torch.equal(batch.raw[0], expected[order[0, 0]])
    assert torch.equal(batch.labels[0], labels[order[0, 0]])
    assert capfd.readouterr().err.count("skipped, ") == 4


def test_more_than_that_are_refused_and_the_run_is_saved(classes):
    trainer = Trainer(config(classes, epochs=2, data={"skip_damaged": 2}))
    damage(trainer.data.train, [1, 5, 9])
    with pytest.raises(ConfigError, match=r"3 are damaged, more than data.skip_damaged=2 allows"):
        trainer.run_to_end()


def test_a_run_ends_with_as_many_as_it_allows(classes):
    trainer = Trainer(config(classes, data={"skip_damaged": 3}))
    damage(trainer.data.train, [1, 5, 9])
    assert find_checkpoint(trainer.run_to_end())


def test_other_faults_than_damage_are_not_passed_over(classes):
    write_picture(classes / "ant" / "03.png", np.random.default_rng(0), (9, 9))
    with pytest.raises(ConfigError, match="expected the same"):
        train(config(classes, epochs=2, data={"skip_damaged": 9}))


def test_a_class_of_which_none_is_whole_is_refused(classes):
    data = load_data(config(classes, data={"skip_damaged": 99}).data)
    damage(data.train, (data.train.labels == 1).nonzero().flatten().tolist())
    with pytest.raises(ConfigError, match="no other record of its class is intact"):
        data.train.read(torch.tensor([len(data.train) - 1]))


def test_a_check_names_every_fault_before_the_first_step(classes, capfd):
    data: Any = load_data(config(classes).data)
    damage(data.train, [1, 5])
    damage(data.test, [0])
    with pytest.raises(ConfigError, match=r"3 of 28 records cannot be used, .*data.skip_damaged=3"):
        Trainer(config(classes, data={"check": True, "skip_damaged": 2}))
    said = capfd.readouterr().err
    assert all(data.train.records.file(i).name in said for i in (1, 5))
    assert not (classes.parent / "run").exists()
    assert find_checkpoint(train(config(classes, data={"check": True, "skip_damaged": 3, "workers": 0})))


@pytest.mark.parametrize("given", [{"skip_damaged": 1}, {"check": True}], ids=str)
def test_both_are_for_folders(tmp_path, given):
    made = config(tmp_path / "data", data=given)
    made.data.name, made.data.path = "digits", ""
    with pytest.raises(ConfigError, match=f"{next(iter(given))}=.*expected data=image_folder"):
        Trainer(made)
