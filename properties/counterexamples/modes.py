"""The modes that hold while a subject is called: stepping out of one, and writing the others around the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from veriformer.properties.subject.paths import Path


@contextmanager
def left(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave a mode for a while, so that what runs takes the same paths as without it.

    A check may hold a mode of its own, which then is on top of it and must stay.
    """
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for top in reversed(above):
        _push_mode(top)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        _push_mode(mode)
        for top in reversed(above):
            _push_mode(top)


def in_modes(text: str, path: Path, trained: str) -> str:
    """Put a call into the modes that hold now, and into those of a path.

    Args:
        text: one statement, perhaps with another before it.
        path: the way to call.
        trained: the model, if it is in train mode; else "".
    """
    contexts = []
    if torch.is_inference_mode_enabled():
        contexts.append("torch.inference_mode()")
    elif not torch.is_grad_enabled():
        contexts.append("torch.no_grad()")
    if path.backend != "default":
        contexts.append(f"backends[{path.backend!r}]()")
    autocast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    contexts += [f"torch.autocast({device!r}, dtype={torch.get_autocast_dtype(device)})" for device in autocast]
    if torch.get_default_device().type == "meta":
        contexts.append("torch.device('meta')")
    if contexts:
        text = f"with {', '.join(contexts)}:\n" + "\n".join(f"    {line}" for line in text.split("\n"))
    return f"{trained}.train()\n{text}\n{trained}.eval()" if trained else text


def seeded(text: str, state: Tensor) -> str:
    """Put the seed before a call that may draw, if it is the first since the seed was set.

    Args:
        text: of the call.
        state: of torch's generator before it.
    """
    seed = torch.initial_seed()
    fresh = torch.equal(state, torch.Generator().manual_seed(seed).get_state())
    return f"torch.manual_seed({seed})\n{text}" if fresh else text
