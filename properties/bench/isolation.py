"""Leave the process as it was: random states, gradient mode, dtype, precision, threads, train and eval modes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


def reseed(seed: int) -> None:
    """Seed torch's own generators: of the CPU, and of CUDA where it is in use.

    `torch.manual_seed` seeds devices that were never touched too, which it does by noting the call for later, stack
    and all: most of the time of building a small model.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def is_lost(device: torch.device) -> bool:
    """Whether an assertion failed on the device (an index out of bounds, say): nothing can be called there any more."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def flags() -> tuple[Any, ...]:
    """Return torch's global flags, as `put_back` takes them."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        context.device if context is not None else None,
    )


def put_back(before: tuple[Any, ...]) -> None:
    """Set torch's global flags."""
    dtype, grad, threads, deterministic, warns_only, device = before
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warns_only)


@contextmanager
def kept_flags() -> Iterator[None]:
    """Put torch's global flags back that somebody's code changes: what follows is computed as it was before."""
    before = flags()
    try:
        yield
    finally:
        if flags() != before:
            put_back(before)


_depth = [0]
"""Blocks of `kept_generators` that are inside each other."""


@contextmanager
def kept_generators() -> Iterator[None]:
    """Seed Python's and NumPy's generators for the block; the outermost one puts their states back.

    Every block begins with the same state, so what is drawn there depends on nothing that ran before. To copy 2500
    bytes each way takes fifteen times as long as to seed.
    """
    kept = (random.getstate(), np.random.get_state()) if not _depth[0] else None
    _depth[0] += 1
    random.seed(0)
    np.random.seed(0)
    try:
        yield
    finally:
        _depth[0] -= 1
        if kept is not None:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


@contextmanager
def isolated(module: object = None, *, threads: int = 1) -> Iterator[None]:
    """Run the block with one torch thread and a given module in eval mode; put everything back afterwards.

    Args:
        module: a ready-made model whose train/eval mode is to be restored, module by module.
        threads: torch threads inside the block.
    """
    modes = [(m, m.training) for m in module.modules()] if isinstance(module, nn.Module) else []
    torch_state, cuda = torch.get_rng_state(), torch.device("cuda")
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() and not is_lost(cuda) else None
    grad, dtype, num_threads = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        if isinstance(module, nn.Module):
            module.eval()
        torch.set_grad_enabled(True)
        torch.set_float32_matmul_precision("highest")  # no TF32: its 10 bits are not float32's 23
        torch.backends.cudnn.allow_tf32 = False
        torch.set_num_threads(threads)
        with kept_generators():
            yield
    finally:
        for part, training in modes:
            part.training = training
        torch.set_rng_state(torch_state)
        if cuda_states is not None and not is_lost(cuda):
            torch.cuda.set_rng_state_all(cuda_states)
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = cudnn
        torch.set_num_threads(num_threads)
