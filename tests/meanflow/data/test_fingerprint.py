import hashlib

import numpy as np
import torch

from fullstride.meanflow.data.dataset import fingerprint


def test_it_is_that_of_type_shape_and_bytes(seed):
    rng = np.random.default_rng(seed)
    pixels, labels = rng.integers(0, 256, (7, 1, 5, 3), dtype=np.uint8), rng.integers(0, 10, 7)
    known = hashlib.sha256(b"|u1(7, 1, 5, 3)\n" + pixels.tobytes() + b"<i8(7,)\n" + labels.astype("<i8").tobytes())
    assert fingerprint(pixels, labels) == known.hexdigest()
    assert fingerprint(torch.tensor(pixels), torch.tensor(labels)) == known.hexdigest()
    assert fingerprint(pixels, labels.astype(">i8")) == known.hexdigest()


def test_order_in_memory_does_not_count(seed):
    image = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    assert fingerprint(image.T) == fingerprint(image.T.contiguous()) != fingerprint(image)


def test_every_change_of_content_changes_it(seed):
    x = torch.randint(0, 256, (6, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    other = x.clone()
    other[3, 2] ^= 1
    changed = [(other,), (x.reshape(4, 6),), (x.int(),), (x[:3], x[3:]), (x.flip(0),), (x, x)]
    found = {fingerprint(*arrays) for arrays in changed if not torch.equal(torch.cat(arrays), x) or len(arrays) > 1}
    found |= {fingerprint(x.reshape(4, 6)), fingerprint(x.int()), fingerprint(x)}
    assert len(found) == len(changed) + 1
