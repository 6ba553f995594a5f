import os

import torch

# Without a GPU the kernels run in Triton's interpreter, which reads this where a kernel is defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
