"""Whether the loss that a model gives has the gradient of the loss that it is; part of `loss.of-model`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case

_NEAR = 1e-3
"""Of the size of a gradient; a backward that leaves out a chunk, or a factor, is far further off."""


def gradient_is_that_of_the_logits(case: Case, built: Built, own: Tensor, right: Tensor) -> None:
    """Require that every parameter has the gradient that the mean of -log p gives it, by the model's own logits.

    Args:
        case: of `loss.of-model`.
        built: the model.
        own: the loss that it gives, with its graph.
        right: the loss of its logits, with theirs.
    """
    if not (own.requires_grad and right.requires_grad and isinstance(built.module, nn.Module)):
        return
    got, wanted = (case.apply(gradient_of, loss, built.module) for loss in (own, right))
    sizes = {n: p.numel() for n, p in built.module.named_parameters() if p.requires_grad}
    parts = [x.split(list(sizes.values())) for x in (got, wanted)]
    case.close(
        got, wanted, "the gradient of the loss that the model gives is not that of the loss of its logits",
        bound=max(_NEAR, 100 * case.tolerance()) * max(size_of(x) for x in parts[1]),
        constants_allowed=True, cause=lambda: _cause(list(sizes), *parts),
    )  # fmt: skip


def mean_loss(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """Return the mean of -log p(label), smoothed, and the term that holds the normaliser small, with its graph.

    Args:
        logits: `[..., V]`.
        labels: `[...]`; each counts.
        smoothing: share of the target that is spread evenly.
        z_loss: factor on the squares of log sum exp.
    """
    wide = logits.double()
    log_p = wide.log_softmax(-1)
    nll = -log_p.gather(-1, labels[..., None])[..., 0]
    return ((1 - smoothing) * nll - smoothing * log_p.mean(-1) + z_loss * wide.logsumexp(-1).square()).mean()


def gradient_of(loss: Tensor, module: nn.Module) -> Tensor:
    """Return the gradient of a loss by all parameters, one behind another; zeros for what it does not depend on."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([x.flatten() for x in found])


def _cause(names: Sequence[str], got: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    off = [
        (name, float((g * w).sum() / w.square().sum()))
        for name, g, w in zip(names, got, wanted, strict=True)
        if bool((g - w).abs().max() > _NEAR * w.abs().max()) and bool(w.any())
    ]
    told = ", ".join(f"{name} ({share:.3g} of it)" for name, share in off[:3])
    rest = (
        "that of all parameters is"
        if len(off) == len(names)
        else f"that of the {len(names) - len(off)} others is right"
    )
    words = f"the loss is right and the gradient of {told}{' ...' if len(off) > 3 else ''} is not, {rest}"
    return f"{words}: a backward of its own leaves out a part of it, or adds what is not there"
