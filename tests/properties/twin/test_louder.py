"""Every place of a model with a twin that holds no parameter, multiplied by 1.1: the twin asks about the number.

Multiplied there are what each module gives, so each norm, map, network, attention, branch and sum of the stream; what
the twin takes over as a scale of its own, alike in all layers, is another property's to find.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import check
from veriformer.properties.anatomy.traced import traced
from veriformer.properties.subject.subject import Subject
from veriformer.properties.twin.carrying import twin_of
from veriformer.properties.twin.parts import NumberError, PartedError
from veriformer.properties.twin.roles import roles
from veriformer.reference.config import Config
from veriformer.reference.model import build

SIZES: dict[str, Any] = {"vocab_size": 13, "d_model": 12, "num_heads": 2, "d_ff": 20, "num_layers": 2, "max_len": 20}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"architecture": "decoder", "positions": "learned", "activation": "gelu", "embedding_scale": False},
    "bert": {"norm_placement": "post", "positions": "learned", "activation": "gelu", "embedding_norm": True},
    "neox": {"architecture": "decoder", "positions": "rotary", "rotary_dim": 4, "parallel": True},
    "gemma": {
        "architecture": "decoder", "positions": "rotary", "norm": "rms", "norm_placement": "sandwich",
        "query_key_norm": True, "activation": "geglu_tanh", "bias": False,
    },
    "classifier": {"architecture": "classifier", "positions": "sinusoidal", "pooling": "cls", "num_registers": 1},
}  # fmt: skip
ELSEWHERE = {"attention.dropout": "anatomy.softmax", "attention.rotary": "anatomy.scale"}
"""Places that another property holds: weights that do not sum to one, and a scale that all layers share."""


def made(name: str) -> Any:
    model = build(Config(**SIZES, **MODELS[name])).double().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            low, high = (-0.6, 0.6) if parameter.ndim > 1 else (0.5, 1.5)
            parameter.uniform_(low, high, generator=draw)
    return model


def difference(model: nn.Module) -> float:
    """Return how far the twin is from a model, relatively; `NumberError` where a number is another one."""
    tokens = torch.randint(0, 13, (4, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        seen = traced(model, lambda: model(tokens), 4, 1e-6)
        assert seen.output is not None
        classifies = type(model).__name__ == "Classifier"
        found = roles(model, seen, [tokens], SIZES["d_model"], seen.output, classifies=classifies)
        twin = twin_of(found, list(model.parameters()), 1e-6, None)
        expected: Tensor = twin.head(twin.module(tokens))
    factor = float((seen.output * expected).sum() / expected.square().sum())
    if abs(factor - 1) > 1e-4 and float((seen.output - factor * expected).abs().amax()) < 1e-6:
        raise NumberError(f"the outputs are {factor:.6g} times those of the textbook's model")
    return float((seen.output - expected).abs().amax() / expected.abs().amax())


def places(model: nn.Module) -> Iterator[str]:
    """Yield the modules that are called and give a tensor, of the layers those of the last."""
    called: list[str] = []
    handles = [
        part.register_forward_hook(lambda _m, _a, _o, name=name: called.append(name))
        for name, part in model.named_modules()
        if name and not name.startswith("stack.layers.0")
    ]
    model(torch.zeros(2, 5, dtype=torch.long))
    for handle in handles:
        handle.remove()
    yield from dict.fromkeys(called)


def louder(_module: nn.Module, _given: Any, output: Any) -> Any:
    return 1.1 * output if isinstance(output, Tensor) else None if output is None else (1.1 * output[0], *output[1:])


@pytest.mark.parametrize("name", MODELS)
def test_a_number_too_many_is_found_wherever_it_stands(name: str) -> None:
    model = made(name)
    assert difference(model) < 1e-12
    missed, tried = [], 0
    for place in places(model):
        tried += 1
        handle = model.get_submodule(place).register_forward_hook(louder)
        try:
            difference(model)
            missed.append(place)
        except NumberError:
            pass
        except PartedError as parted:
            missed.append(f"{place}: {parted}")
        handle.remove()
    left = [m for m in missed if not any(m.split(":")[0].endswith(known) for known in ELSEWHERE)]
    assert tried > 20
    assert left == []


@pytest.mark.parametrize(("place", "held"), ELSEWHERE.items())
def test_what_the_twin_takes_over_another_property_finds(place: str, held: str) -> None:
    def broken(c: Any) -> nn.Module:
        model = build(Config(architecture="decoder", d_model=c.d_model, num_heads=c.num_heads, d_ff=c.d_ff,
                             vocab_size=c.vocab_size, positions="rotary"))  # fmt: skip
        model.get_submodule(f"stack.layers.1.{place}").register_forward_hook(louder)
        return model

    subject = Subject(
        kind="decoder", build=broken, forward=lambda m, tokens: m(tokens), domain={"d_model": [8], "num_heads": [2]}
    )
    (result,) = check(subject, only=[held], profile="quick").results
    assert result.outcome in ("FAIL", "OPEN")
    assert result.id == held
