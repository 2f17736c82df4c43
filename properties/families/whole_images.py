"""A model of which a part alone is judged: what its whole is made of must reach its output, or has another entrance.

Part of `parameters.all-used`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case


def all_of_it_is_connected(case: Case, built: Built) -> None:
    """Require a gradient for every parameter of the model that the stack was taken from, called on an image."""
    if not isinstance(vars(built.module).get("whole"), nn.Module) or case.subject.image is None:
        return
    image = case.normal(1, *case.subject.image, dtype=torch.float32)
    unused = case.apply(unreached_from_an_image, built.module, image)
    case.equal(
        unused,
        [],
        f"{len(unused)} of the parameters of the whole model are not connected to what it gives for an image",
        got=", ".join(unused[:4]) + (" ..." if len(unused) > 4 else ""),
        expected="a gradient for each",
        cause=lambda: f"{unused[0]} takes no part in what the model gives for an image",
        asks=("structure", "other"),
    )


def unreached_from_an_image(stack: nn.Module, image: Tensor) -> list[str]:
    """Return the names of the parameters that what a model gives for an image does not depend on.

    Args:
        stack: of the model, which it keeps as `whole`; both are left as they are.
        image: `[1, C, H, W]`.
    """
    model = copy.deepcopy(vars(stack)["whole"]).float().eval()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with torch.enable_grad():
        output = model(image.float())
        output = dict(vars(output)) if hasattr(output, "__dataclass_fields__") else output
        given = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
        if not given or not named:
            return []
        total = torch.stack([x.sum().float() for x in given]).sum()
        gradients = torch.autograd.grad(total, [p for _, p in named], allow_unused=True)
    return [name for (name, _), g in zip(named, gradients, strict=True) if g is None]


def of_what_is_judged(lost: list[str], module: nn.Module, is_called: bool) -> list[str]:
    """Return the names of parameters without those that another method of the model is for.

    Args:
        lost: names that an output does not depend on.
        module: the model.
        is_called: whether the model was called as a whole; where some of its parts were, the rest may belong to a head,
            or to what makes embeddings of an image.
    """
    if is_called:
        return lost
    written = ""
    for name, method in inspect.getmembers(type(module), inspect.isfunction):
        if name != "__init__" and method.__module__ == type(module).__module__:
            with contextlib.suppress(OSError, TypeError):
                written += inspect.getsource(method)
    return [name for name in lost if not re.search(rf"self\.{re.escape(name.split('.')[0])}\b", written)]
