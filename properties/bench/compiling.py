"""torch.compile as one more way to call a subject."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

from veriformer.properties.subject.subject import Subject


def why_not_compiled(subject: Subject) -> str | None:
    """Return why a subject cannot be compiled here, or None: a C++ compiler is needed on the CPU."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "torch.compile needs a C++ compiler, and there is none"
    return None


def compiled(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Return `function(module, ...)` compiled with dynamic shapes, in this process alone."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes behind a limited one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch._inductor.config

        torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)  # a graph break is no news here

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(call, dynamic=True)
