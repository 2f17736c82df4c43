"""Importing torchvision where its compiled operators do not load (beside a CPU build of torch from another index).

timm, open_clip and transformers import torchvision for its image transforms. Its Python part registers shapes for
operators of its compiled part, and fails where that part cannot be loaded. No model checked here calls one of them.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import torch


@cache
def name_operators() -> torch.library.Library | None:
    """Give torch the names of torchvision's operators, if torchvision is there and its compiled part does not load.

    Returns:
        What keeps the names alive, or None where nothing had to be done. Calling such an operator raises.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    for extension in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            break
        return None
    registrations = (folder / "_meta_registrations.py").read_text(encoding="utf-8")
    names = set(re.findall(r"register_fake\(\"torchvision::(\w+)\"\)|@register_meta\(\"(\w+)\"", registrations))
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in sorted(first or second for first, second in names):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    return library
