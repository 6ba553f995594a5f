"""Reference statistics: cached features of real images, and the score of real images themselves (the floor).

A Frechet distance, precision and recall all depend on how many samples they are made from, so a score carries its
counts, and the floor takes as many training images as are generated.
"""

import contextlib
import fcntl
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fullstride.assets.fetch import cache_folder
from fullstride.errors import ConfigError
from fullstride.meanflow.data.dataset import Dataset, Split
from fullstride.meanflow.metrics.classifier import FeatureClassifier, train_classifier
from fullstride.meanflow.metrics.distances import frechet_distance, kernel_distance, precision_recall
from fullstride.meanflow.metrics.features import Features
from fullstride.runs.atomic_files import note, replace_file

Entry = tuple[dict[str, Tensor], dict[str, Any]]


def reference_folder() -> Path:
    """`reference` in $FULLSTRIDE_CACHE, or in the user's cache folder of fullstride."""
    return cache_folder() / "reference"


def cache_key(*parts: str | int | None) -> str:
    """The name of an entry: sha256 over everything its content depends on."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cached(folder: Path, key: str, make: Callable[[], Entry]) -> Entry:
    """Return the entry cached under `key`; if there is none, cache and return the result of `make`.

    One process at a time makes it, and no process that finds it waits.
    """
    if (entry := read_entry(folder, key)) is None:
        with by_one_process(folder, key):
            # Another process may have made it in the meantime; of what is damaged it was told.
            if (entry := read_entry(folder, key, quiet=True)) is None:
                entry = make()
                write_entry(folder, key, *entry)
    return entry


@contextmanager
def by_one_process(folder: Path, key: str) -> Iterator[None]:
    """A block in which no other process makes this entry; where there can be no lock, a plain block.

    Unlike the lock of a run's folder, flock's holds between a process's own threads, too.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / f".{key}.lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                note(f"{folder}: another process computes this entry; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            held.callback(fcntl.flock, file, fcntl.LOCK_UN)
        yield


def _digest(content: bytes, values: Any) -> str:
    digest = hashlib.sha256(content)
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()


def write_entry(folder: Path, key: str, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Keep tensors and JSON-serialisable values under `key`, in place of what was there.

    Where the folder cannot be written, a note on stderr says so: what was computed is worth more than its copy.
    """
    content = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    digest = _digest(content, values)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{digest}.safetensors", content)
        text = json.dumps({"sha256": digest, "values": values}, indent=1)
        replace_file(folder / f"{key}.json", text)
    except OSError as error:
        note(f"{folder}: nothing is cached ({error}); set FULLSTRIDE_CACHE to a writable folder")


def read_entry(folder: Path, key: str, quiet: bool = False) -> Entry | None:
    """Read the entry under `key`; None if there is none, or if it is damaged, which is noted unless `quiet`."""
    path = folder / f"{key}.json"
    if not path.is_file():
        return None
    try:
        entry = json.loads(path.read_bytes())
        content = (folder / f"{entry['sha256']}.safetensors").read_bytes()
        if (found := _digest(content, entry["values"])) != entry["sha256"]:
            raise ValueError(f"sha256 {found[:12]}..., expected {entry['sha256'][:12]}...")
        return load(content), entry["values"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if not quiet:
            note(f"{path}: damaged cache entry ({error}); computing it again")
        return None


# Of what is kept: raise it when the same key would mean other numbers.
VERSION = 2
SEED = 20_002
BATCH = 512
NEIGHBOURS = 3
# Numbers of the pictures that the classifier is trained on, which lie on the device all at once: 1 GiB.
TRAINED = 2**28


@dataclass(frozen=True)
class FeatureScore:
    """A set of images against the reference, on one kind of features.

    Attributes:
        label: name of the Frechet distance, such as `FD-EffNetLite0`.
        frechet: Frechet distance; comparable only at equal counts.
        kernel: kernel distance; unbiased at any counts, possibly below 0.
        precision: share of the images within the reference's manifold; compares only at equal counts.
        recall: share of the reference within the images' manifold; compares only at equal counts.
        num_samples: images scored.
        num_reference: real images they were scored against.

    """

    label: str
    frechet: float
    kernel: float
    precision: float
    recall: float
    num_samples: int
    num_reference: int


@dataclass(frozen=True)
class Reference:
    """Features of real images.

    Attributes:
        label: name of the Frechet distance on these features.
        features: the features, in fp32 on the CPU.

    """

    label: str
    features: Float[Tensor, "n d"]

    def score(self, features: Float[Tensor, "m d"]) -> FeatureScore:
        """Score features of the same extractor, on their device.

        Raises:
            ValueError: for fewer than 4 samples, another number of features, or features that are not finite.

        """
        real = self.features.to(features.device)
        precision, recall = precision_recall(features, real, NEIGHBOURS)
        frechet, kernel = frechet_distance(features, real), kernel_distance(features, real)
        return FeatureScore(self.label, frechet, kernel, precision, recall, len(features), len(real))


def choose_reference(total: int, num: int) -> Tensor:
    """Indices of `num` of `total` records, the same on every machine: data sets are often sorted by class."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randperm(total, generator=generator)[:num].sort().values


def split_features(data: Dataset, split: Split, num: int, extractor: Features) -> Float[Tensor, "n d"]:
    """Features of `num` records of a split (all where there are fewer), in batches, in fp32 on the CPU.

    Raises:
        ConfigError: if the records are not pictures.

    """
    if not data.pixels:
        raise ConfigError(
            f"data={data.name} holds latents, but features={extractor.name} needs pictures; decode them first"
        )
    parts = choose_reference(len(split), num).split(BATCH)
    return torch.cat([extractor(data.images(split, part)).cpu() for part in parts])


def reference(
    data: Dataset, extractor: Features, *, num_floor: int, num: int = 0, folder: Path | None = None
) -> tuple[Reference, FeatureScore]:
    """The held-out split's statistics and the floor: what the training split scores. From the cache if they are there.

    Args:
        data: a data set of pictures.
        extractor: the extractor of the features.
        num_floor: training images of the floor, as many as are generated; all of them where there are fewer, which
            the floor's `num_samples` then tells.
        num: number of held-out images; 0, or more than there are, for all.
        folder: folder of the cache; None for `reference_folder()`.

    Raises:
        ConfigError: if the data set holds no pictures, or fewer than 4 of them in a split are asked for.

    """
    num, num_floor = min(num or len(data.test), len(data.test)), min(num_floor, len(data.train))
    if min(num, num_floor) <= NEIGHBOURS:
        raise ConfigError(
            f"data={data.name}: {num} held-out and {num_floor} training images for the reference, expected at least "
            f"{NEIGHBOURS + 1} of each; raise evaluation.num_samples"
        )
    folder = folder or reference_folder()
    key = cache_key("reference", VERSION, data.fingerprint, "test", num, "train", num_floor, extractor.identity)

    def make() -> Entry:
        found = Reference(extractor.label, split_features(data, data.test, num, extractor))
        floor = found.score(split_features(data, data.train, num_floor, extractor))
        about = {"data": data.name, "fingerprint": data.fingerprint, "features": extractor.identity}
        return {"features": found.features}, about | {"floor": asdict(floor)}

    tensors, values = cached(folder, key, make)
    return Reference(extractor.label, tensors["features"]), FeatureScore(**values["floor"])


def reference_classifier(
    data: Dataset, device: torch.device, *, epochs: int = 30, folder: Path | None = None
) -> FeatureClassifier:
    """The classifier trained on the training split, from the cache if it is there: kept, it measures every run alike.

    Of a split whose pictures are more than 1 GiB in fp32 it sees as many as are that, the same ones each time.

    Raises:
        ConfigError: if the data set has no labels.

    """
    if not data.num_classes:
        raise ConfigError(f"data={data.name} has no labels, but features=classifier needs them; choose other features")
    folder = folder or reference_folder()
    total, most = len(data.train), max(1, TRAINED // math.prod(data.image_shape))
    part = (most,) if most < total else ()
    key = cache_key("classifier", VERSION, data.fingerprint, epochs, *part)

    def make() -> Entry:
        if part:
            note(f"the classifier is trained on {most} of {total} pictures of data={data.name}, which take 1 GiB")
        indices = choose_reference(total, most) if part else torch.arange(total)
        images, labels = data.images(data.train, indices), data.train.labels[indices]
        model = train_classifier(images, labels, num_classes=data.num_classes, epochs=epochs, device=device)
        return model.state_dict(), {"data": data.name, "fingerprint": data.fingerprint}

    # On no device, so that no random number is drawn for weights that are not kept.
    with torch.device("meta"):
        model = FeatureClassifier(data.image_shape[0], data.num_classes)
    model.load_state_dict(cached(folder, key, make)[0], assign=True)
    return model.to(device).eval().requires_grad_(False)
