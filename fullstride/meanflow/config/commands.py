"""Options of the commands that use a trained run or convert files: each field is an option, its annotation the help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

AT_LEAST_1 = {"min": 1}
Device = Annotated[str, "Device; auto takes the first of the others that exists.", "auto|cuda|mps|cpu"]
Ema = Annotated[float | None, "Decay, or relative width, of the averaged weights to use; by default the run's first."]


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Generate images: PNG files and grids.

    A class-conditional run also gets a grid of its classes; a run on latents leaves latents.safetensors.
    """

    sampler: Annotated[str, "Sampler that turns noise into images.", "meanflow|euler|midpoint|heun|rk4|dopri5"] = (
        "meanflow"
    )
    steps: Annotated[
        int | None, "Number of sampler steps; by default 1 for meanflow; dopri5 chooses its own.", AT_LEAST_1
    ] = None
    num: Annotated[int, "Number of images.", AT_LEAST_1] = 64
    seed: Annotated[int, "Random seed; image i depends on the seed and i alone."] = 0
    label: Annotated[int | None, "Class of all images; by default all classes."] = None
    guidance: Annotated[
        float, "Scale of classifier-free guidance, for a run with loss.label_dropout; 1 is none, others cost twice."
    ] = 1.0
    no_class: Annotated[
        bool, "Images of no class in particular, of a run with loss.label_dropout.", {"names": ("--no-class",)}
    ] = False
    conditions: Annotated[
        Path | None, "File of conditions, for a run on data that have some; sample i takes the i-th in turn."
    ] = None
    out: Annotated[Path | None, "Folder for the PNG files; by default in the run's folder, under samples."] = None
    batch_size: Annotated[int, "Number of images per forward pass; does not change the images.", AT_LEAST_1] = 512
    device: Device = "auto"
    precision: Annotated[
        str, "Precision of the network's matrix products; tf32 and bf16 are faster.", "fp32|tf32|bf16"
    ] = "fp32"
    backend: Annotated[
        str,
        "Backend that runs the network; graph: one launch per evaluation; auto: graph on CUDA.",
        "auto|eager|graph",
    ] = "auto"
    ema: Ema = None
    vae: Annotated[Path | None, "Folder of a diffusers AutoencoderKL that decodes latents to images."] = None
    omega: Annotated[float | None, "Guidance scale as an input of the network, of a run of loss=imf_whole."] = None
    omega_start: Annotated[float, "Smallest time at which the scale holds."] = 0.0
    omega_end: Annotated[float, "Largest time at which the scale holds."] = 1.0


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Score MeanFlow samples, compared with training images."""

    num_samples: Annotated[
        int, "Number of images to generate; 0 means as configured, or as many as were held out.", {"min": 0}
    ] = 0
    device: Device = "auto"
    ema: Ema = None
    features: Annotated[
        tuple[str, ...],
        "Feature network: classifier, efficientnet_lite0 or inception; may be repeated; by default as configured.",
    ] = ()
    inception_weights: Annotated[
        Path | None, "File of Inception's weights, for --features inception; by default as configured."
    ] = None
    data_path: Annotated[str, "Path of the data, if they were moved since the run."] = ""
    precision: Annotated[
        str | None, "Precision of the network's matrix products; by default as configured.", "fp32|tf32|bf16"
    ] = None
    batch_size: Annotated[int | None, "Number of images per forward pass; by default as configured.", AT_LEAST_1] = None
    backend: Annotated[str | None, "Backend that runs the network; by default as configured.", "auto|eager|graph"] = (
        None
    )


@dataclass(frozen=True, kw_only=True)
class ConsistencyOptions(ScoreOptions):
    """Compare one-step samples with ODE solvers.

    Euler and RK4 solve with the same weights: does one MeanFlow step land where they do?
    """


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    """Encode pictures as latents, to train on with data=latents.

    Their moments go to train/ and test/ in --out, in shards.
    """

    vae: Annotated[Path, "Folder of a diffusers AutoencoderKL, such as sd-vae-ft-mse."]
    out: Annotated[Path, "Folder for the latents; an encoding that was stopped continues there."]
    image_size: Annotated[
        int, "Side of the squares that images are cropped to; 0 leaves them uncropped.", {"min": 0}
    ] = 256
    flip: Annotated[bool, "Encode mirrored images as well.", {"names": ("--flip",)}] = False
    half: Annotated[bool, "Store 16 bits per number.", {"names": ("--half",)}] = False
    batch_size: Annotated[int, "Number of images per forward pass.", AT_LEAST_1] = 32
    workers: Annotated[int, "Number of processes that decode images.", {"min": 0}] = 2
    holdout: Annotated[float, "Share held out if the folder has no test/ or val/."] = 0.1
    shard_size: Annotated[int, "Number of records per file.", AT_LEAST_1] = 10_000
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a trained sampler to one file.

    PyTorch alone loads it: torch.export.load(FILE).module()(noise), or (noise, label) if the run has classes.
    """

    out: Annotated[Path, "File to write, ending in .pt2."]
    steps: Annotated[int, "Number of MeanFlow steps.", AT_LEAST_1] = 1
    ema: Ema = None
    device: Device = "auto"


@dataclass(frozen=True, kw_only=True)
class AverageOptions:
    """Average a run's weights over another length, after training.

    Combines the power-function averages (ema.widths) of all checkpoints that the run has kept.
    """

    width: Annotated[float, "Relative width of the average, such as 0.07."]
    out: Annotated[Path, "Folder for the checkpoint of the averaged network, for every other command."]
    step: Annotated[int | None, "Checkpoint at whose step the average ends; by default the newest.", AT_LEAST_1] = None
