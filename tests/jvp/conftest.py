"""Triton kernels run through its interpreter where there is no GPU; it must know before any kernel is decorated."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
