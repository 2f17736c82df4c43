"""What untrained models say already: rank collapse, entropy collapse, the gradient's path through depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from veriformer.ablations.measuring.measurement import Measurement, Point, register
from veriformer.ablations.statistics.intervals import mean_interval
from veriformer.ablations.training.observation import attention_entropy, gradient_norms
from veriformer.ablations.trials.models import reference_model
from veriformer.reference.attention import attention

BLOCKS, DEEPEST = (1, 2, 4, 6, 12), 24
HEAD_WIDTHS = (16, 64, 128, 512)


def _spread(x: Tensor) -> float:
    """Return norm(X - mean over tokens) / norm(X) of `[B, T, D]`: 0 when all tokens are alike, rank one."""
    return float((x - x.mean(dim=1, keepdim=True)).norm() / x.norm())


def _rank(residual: bool, blocks: int, seed: int) -> float:
    config = {"num_layers": blocks, "residual": residual, "d_model": 64, "vocab_size": 32, "positions": "none"}
    model = reference_model(config, seed)
    tokens = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return _spread(model.double()(tokens))


def _entropy(scaled: bool, width: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(4, 4, 32, width, generator=generator) for _ in range(2))
    weights = attention(q, k, k, scale=None if scaled else 1.0)[1]
    return float(attention_entropy(weights[None]).mean())


def _gradient_ratio(placement: str, seed: int) -> float:
    """Return the gradient's norm in the last layer over that in the first."""
    config = {
        "architecture": "classifier",
        "num_layers": DEEPEST,
        "norm_placement": placement,
        "d_model": 64,
        "vocab_size": 32,
    }
    model = reference_model(config, seed)
    tokens = torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(8) % 2
    torch.nn.functional.cross_entropy(model(tokens), labels).backward()
    named = {}
    for name, parameter in model.named_parameters():
        stacked = parameter[None].detach()
        stacked.grad = parameter.grad[None] if parameter.grad is not None else None
        named[name] = stacked
    norms = gradient_norms(named)
    return float(norms[f"layer {DEEPEST}"] / norms["layer 1"])


def _point(quantity: str, variant: str, x: int, values: list[float]) -> Point:
    interval = mean_interval(values)
    return {"quantity": quantity, "variant": variant, "x": x, "value": [interval.value, interval.low, interval.high]}


def _points(device: str, seeds: int) -> Iterator[Point]:
    for residual, variant in ((True, "residual"), (False, "no residual")):
        for blocks in BLOCKS:
            values = [_rank(residual, blocks, seed) for seed in range(seeds)]
            yield _point("token spread", variant, blocks, values)
    for scaled, variant in ((True, "1 / sqrt(d_k)"), (False, "no scale")):
        for width in HEAD_WIDTHS:
            yield _point("attention entropy", variant, width, [_entropy(scaled, width, seed) for seed in range(seeds)])
    for placement in ("pre", "post"):
        values = [_gradient_ratio(placement, seed) for seed in range(seeds)]
        yield _point("gradient ratio", f"{placement}-LN", DEEPEST, values)


def _conclude(points: list[Point]) -> dict[str, Any]:
    told = []
    names = {
        "token spread": "norm(X - mean) / norm(X) after {x} blocks",
        "attention entropy": "attention entropy over ln T at d_k = {x}",
        "gradient ratio": "gradient of the last layer over the first at N = {x}",
    }
    for p in points:
        value, low, high = p["value"]
        told.append(f"{names[p['quantity']].format(x=p['x'])}, {p['variant']}: {value:.3g} [{low:.3g}, {high:.3g}]")
    return {"kind": "initialisation", "lines": told}


register(
    Measurement(
        name="initialisation",
        question="What do residuals, the scale and the place of the norm do before any training?",
        source="Dong et al. 2021 (rank); Vaswani et al. 2017, footnote 4 (scale); Xiong et al. 2020 (gradient)",
        count=lambda device: 2 * len(BLOCKS) + 2 * len(HEAD_WIDTHS) + 2,
        points=_points,
        conclude=_conclude,
    )
)
