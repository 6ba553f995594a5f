"""`fullstride meanflow encode`: a folder of pictures as the latents that `data=latents` reads.

Shards are written one after the other, each whole or not at all, and what is there is not made again: an encoding that
was stopped goes on.
"""

import hashlib
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fullstride.device.select import resolve_device
from fullstride.errors import ConfigError
from fullstride.meanflow.config.commands import EncodeOptions
from fullstride.meanflow.data.dataset import Split, decode_images
from fullstride.meanflow.data.latents import MADE, WHOLE
from fullstride.meanflow.data.loader import Loader
from fullstride.meanflow.data.shards import SUFFIX, Shard, write_shard
from fullstride.meanflow.data.sources.image_folder import image_folder
from fullstride.meanflow.sampling.autoencoder import Autoencoder, load_autoencoder
from fullstride.runs.atomic_files import file_sha256, note, replace_file
from fullstride.runs.lock import locked
from fullstride.runs.next_steps import say


@dataclass(frozen=True)
class LatentEncoder:
    """Settings that determine the content of encoded latents.

    Attributes:
        pictures: fingerprint of the pictures' data set.
        vae: sha256 of the autoencoder's files.
        flip: whether the mirrored pictures are encoded, too.
        half: whether moments are stored in 16 bits.
        shard_size: records a file.
        num_classes: of the pictures; 0 without labels.
        scale: what the autoencoder's latents are multiplied by.

    """

    pictures: str
    vae: str
    flip: bool
    half: bool
    shard_size: int
    num_classes: int
    scale: float | None


def encode_command(pictures: Path, options: EncodeOptions) -> None:
    """Write the moments of a folder's pictures to train and test in a folder, and say how to train on them.

    Args:
        pictures: a folder as `data=image_folder` takes it.
        options: options of the command; where an encoding of the same is in `out`, it goes on.

    Raises:
        ConfigError: for pictures or an autoencoder that cannot be read, or a folder with other latents in it, or one
            that another process encodes into.

    """
    out = options.out
    network = load_autoencoder(options.vae, resolve_device(options.device))
    data = image_folder(pictures, image_size=options.image_size or None, holdout=options.holdout)
    contents = [(path.name, file_sha256(path)) for path in sorted(options.vae.iterdir()) if path.is_file()]
    encoding = LatentEncoder(
        pictures=data.fingerprint,
        vae=hashlib.sha256(repr(contents).encode()).hexdigest(),
        flip=options.flip,
        half=options.half,
        shard_size=options.shard_size,
        num_classes=data.num_classes,
        scale=network.scale,
    )
    out.mkdir(parents=True, exist_ok=True)
    with locked(out) as alone:
        if not alone:  # two would write the same shards
            raise ConfigError(f"{out}: another process is encoding there; wait until it ends, or choose another folder")
        _open(out, encoding)
        for name, split in (("train", data.train), ("test", data.test)):
            _encode(network, split, out / name, encoding, options.batch_size, options.workers)
        _keep(out, encoding, whole=True)
    settings = [f"data=latents data.path={out}"]
    settings += [f"data.num_classes={encoding.num_classes}"] if encoding.num_classes > 0 else []
    settings += [f"data.latent_scale={encoding.scale:g}"] if encoding.scale is not None else []
    settings += ["data.hflip=true"] if encoding.flip else []
    say(f"encoded: {out}; train with {' '.join(settings)}")


def _keep(out: Path, encoding: LatentEncoder, *, whole: bool) -> None:
    """Write down what the latents are made of, and whether all are there."""
    replace_file(out / MADE, json.dumps(asdict(encoding) | {WHOLE: whole}, indent=1) + "\n")


def _open(out: Path, encoding: LatentEncoder) -> None:
    """Check that the latents in the folder, if any, are of the same pictures, made alike."""
    try:
        made = json.loads((out / MADE).read_text())
    except FileNotFoundError:
        if found := next(out.rglob(f"*{SUFFIX}"), None):
            raise ConfigError(
                f"{out}: holds {found.relative_to(out)} already; delete it or choose another folder"
            ) from None
        _keep(out, encoding, whole=False)
        return
    except ValueError as error:
        raise ConfigError(f"{out / MADE}: not JSON ({error}); delete the folder or choose another") from None
    if differing := sorted(key for key, value in asdict(encoding).items() if made.get(key) != value):
        changes = ", ".join(f"{key}: {made.get(key)} -> {getattr(encoding, key)}" for key in differing)
        raise ConfigError(f"{out}: holds latents made with other settings ({changes}); choose another folder")


Part = tuple[Path, range]


def _encode(
    network: Autoencoder, split: Split, folder: Path, encoding: LatentEncoder, batch: int, workers: int
) -> None:
    """The shards of a split that are not there yet."""
    folder.mkdir(exist_ok=True)
    missing = [part for part in _shards(folder, len(split), encoding.shard_size) if not _is_there(*part)]
    # The records of each part in batches, the last of which may be smaller.
    orders = (step[None] for _, part in missing for step in torch.arange(part.start, part.stop).split(batch))
    kind = torch.float16 if encoding.half else torch.float32
    with Loader(split, network.device, workers) as loader:
        arriving = loader.batches(orders)
        for file, part in missing:
            moments, labels, flipped = [], [], []
            for read in itertools.islice(arriving, -(-len(part) // batch)):
                x = decode_images(read.raw).expand(-1, 3, -1, -1)  # a grey picture is one in colour, too
                moments.append(network.moments(x).to(kind))
                labels.append(read.labels.cpu())
                if encoding.flip:
                    flipped.append(network.moments(x.flip(-1)).to(kind))
            write_shard(file, torch.cat(moments), torch.cat(labels), torch.cat(flipped) if flipped else None)
            note(f"{file}: records {part.start} to {part.stop - 1} of {len(split)}")


def _shards(folder: Path, count: int, size: int) -> list[Part]:
    """Every file, and the records in it."""
    starts = range(0, count, size)
    return [(folder / f"{i:05d}{SUFFIX}", range(n, min(n + size, count))) for i, n in enumerate(starts)]


def _is_there(file: Path, part: range) -> bool:
    if not file.is_file():
        return False
    if (found := len(Shard.read(file).labels)) != len(part):
        raise ConfigError(f"{file}: holds {found} records, expected {len(part)}; delete it")
    return True
