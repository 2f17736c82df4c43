"""Why train mode is not eval mode though nothing is dropped; part of `dropout.zero`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.causes.tracing.ways import ways_part
from veriformer.properties.engine.case import Case
from veriformer.properties.probes.dropping.dropouts import BendWatch, DropoutWatch


def modes_part(case: Case, built: Built, call: Callable[..., Tensor]) -> str | None:
    """Name the part that computes something else in eval mode, where train mode draws nothing.

    Args:
        case: of the failure.
        built: its model.
        call: calls it in a mode, `training`, with a seed.
    """
    if not torch.equal(call(training=True, seed=1), call(training=True, seed=2)):
        return None
    with DropoutWatch() as dropouts:
        call(training=True, seed=1)
    if 1.0 in dropouts.seen:
        return (
            "at a rate of 0 everything is dropped: dropout is given 1 less the rate, the share to keep, where it "
            "takes the share to drop"
        )
    one, two = (partial(call, training=training) for training in (False, True))
    where = where_it_enters(built.module, one, two, lambda t: t, case.tolerance(built), ways_differ=True)
    if not where:
        return None
    if ways := ways_part(one, two, ("eval mode", "train mode")):
        return f"nothing is drawn, and the modes part {where}: {ways}"
    if turned := _turned(built, where, one, two):
        return turned
    return (
        f"nothing is drawn, and the modes part {where}: what eval mode computes there in another way (weights that are "
        "merged, say) is not what train mode computes"
    )


def _turned(built: Built, where: str, one: Callable[[], object], two: Callable[[], object]) -> str | None:
    """Say that a linear part is given an update in one mode whose transpose the other one is given."""
    name = where.removeprefix("behind ").split(" ")[0]
    part = dict(built.module.named_modules()).get(name)
    square = [(n, p) for n, p in part.named_parameters() if p.ndim == 2 and p.shape[0] == p.shape[1]] if part else []
    if part is None or len(square) != 1:
        return None
    (label, weight), was = square[0], part.training
    basis = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        updates = [part.train(mode)(basis) - part(0 * basis) - weight.T for mode in (False, True)]
    part.train(was)
    size = float(updates[1].abs().amax())
    if not size > 0 or float((updates[0] - updates[1].T).abs().amax()) > 1e-4 * size:
        return None
    return (
        f"to {label} of {name} eval mode adds the transpose of what train mode adds: its update is merged turned round"
    )


def bent_behind(call: Callable[..., Tensor]) -> str:
    """Return the function that is not linear behind the first dropout, as on what a low-rank update is given.

    Args:
        call: calls a model in a mode, `training`.
    """
    with BendWatch() as watch:
        call(training=True)
    return watch.bent


def masks_are_drawn_anew(
    case: Case, module: nn.Module, run: Callable[[], Tensor], without: Callable[..., Tensor]
) -> None:
    """Require that calls in train mode differ where one of them differs from eval mode, and none does without a rate.

    Args:
        case: that judges.
        module: built with a rate.
        run: calls it.
        without: calls one that was built without, in a mode, `training`.
    """
    if not torch.equal(without(training=True), without(training=False)):
        return  # train mode is something else by itself
    case.require(
        ~case.apply(drops_the_same, module, run),
        "every call in train mode drops the same",
        got="three equal outputs, other than in eval mode",
        expected="a mask of its own for each call",
        cause=lambda: (
            "the mask, or the seed that it is drawn with, is made once (when the model is built) and used in every step"
        ),
    )


def drops_the_same(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Return whether a model gives the same three times in train mode, and something else in eval mode."""
    usual, made = run(), []
    with torch.random.fork_rng(devices=[]):
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            module.train()
            try:
                made.append(run())
            finally:
                module.eval()
    return torch.tensor(all(torch.equal(made[0], other) for other in made) and not torch.equal(made[0], usual))


def scale_cause(mean: Tensor, expected: Tensor, rate: float) -> str | None:
    """Say that what is kept is not scaled, where the mean over masks is that much less."""
    ratio = float((mean * expected).sum() / expected.square().sum())
    if abs(ratio - (1 - rate)) < 0.1 * rate:
        return "what is kept is not scaled by 1 / (1 - p)"
    return None
