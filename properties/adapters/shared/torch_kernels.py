"""The kernels behind F.scaled_dot_product_attention, as backends of a subject."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Backends = Mapping[str, Callable[[], AbstractContextManager[Any]]]

MATH: Backends = {"math": partial(sdpa_kernel, SDPBackend.MATH)}
"""For whole modules, whose default is the fused kernel where one fits."""

_FUSED = {"flash": SDPBackend.FLASH_ATTENTION}
_CUDA = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

KERNELS: Backends = {
    **MATH,
    **{
        name: partial(sdpa_kernel, kernel)
        for name, kernel in (_FUSED | (_CUDA if torch.backends.cuda.is_built() else {})).items()
    },
}
"""Every kernel that this torch was built with: asking for a device here would break processes forked from this one."""
