"""Which weights of attention the forward drops and which the backward, both read off; and who draws anew."""

from __future__ import annotations

from itertools import permutations

import torch
from torch import Tensor

from veriformer.properties.bench.isolation import reseed
from veriformer.properties.causes.asking import answer_to
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.derivatives.differentiating import Setting, Sizes, setting
from veriformer.properties.diagnosis.derivatives.gradient_parts import Called, outermost
from veriformer.properties.diagnosis.derivatives.gradients import wrong_gradient
from veriformer.properties.diagnosis.derivatives.own_backwards import wrong_backward
from veriformer.properties.engine.case import Case

_RATE = 0.5
_OTHERS = "the backward drops others than the forward did"
_AXES = ("B", "H", "T", "S")


def wrong_dropped_gradient(case: Case) -> str | None:
    """Say what is wrong with the gradients of a subject that drops, in train mode."""
    if told := wrong_gradient(case):
        return told  # without dropout already
    with off_the_record(case):
        return answer_to(lambda: _wrong_when_dropped(case))


def _wrong_when_dropped(case: Case) -> str | None:
    made = setting(case, Sizes(batch=2, queries=5, keys=7, heads=3, rate=_RATE))
    if made.is_right():
        return None
    told = _drawn_in_the_backward(made) or (_masks(case) if case.subject.kind == "attention" else None)
    return told or wrong_gradient(case, _RATE) or _OTHERS


def _drawn_in_the_backward(made: Setting) -> str | None:
    """Say that the backward draws numbers itself: its gradient depends on the generator as the backward finds it."""

    def gradients(seed: int) -> tuple[list[str], dict[str, Tensor | None]]:
        value = made.value()
        with torch.random.fork_rng(devices=[]), Called(made.built.module) as again:
            reseed(seed)
            return again, made.gradients(value=value)

    (again, one), (_, two), (_, same) = gradients(21), gradients(22), gradients(21)

    def differ(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
        pairs = zip(a.values(), b.values(), strict=True)
        return any(x is not None and y is not None and not torch.equal(x, y) for x, y in pairs)

    if differ(one, same) or not differ(one, two):
        return None
    outer = outermost(again)
    where = f" {', '.join(outer[:3])}{' ...' if len(outer) > 3 else ''}" if outer else ""
    own = wrong_backward(made.run)
    if own is not None:
        return f"the backward of {own[0].name}, written by hand, draws a mask of dropout of its own, not the forward's"
    if not outer and not again:
        return "the backward draws a mask of dropout of its own: its gradient depends on the generator's state there"
    return (
        f"what the backward computes again (checkpointing:{where}) draws another mask of dropout and so "
        "drops others than the forward did: the generator's state is not restored (preserve_rng_state)"
    )


def _masks(case: Case) -> str | None:
    """Compare the weights that the forward multiplies the values with to those that the backward does."""
    forward, backward = _weights(case, _RATE)
    whole, _ = _weights(case, 0.0)
    here, there = forward / whole, backward / whole
    if float((here - here.round()).abs().max()) > 1e-6 or float((there - there.round()).abs().max()) > 1e-6:
        if float((backward - forward * (1 - _RATE)).abs().max()) < 1e-9:
            return "the backward does not divide what is kept by 1 - p, which the forward does"
        return None
    if bool((there.round() == 1).all()):
        return "the backward forgets the mask of dropout: it takes the weights before they were dropped"
    if torch.equal(here.round(), there.round()):
        return (
            "the gradient of the values has the mask of the forward: it is forgotten, or applied at the wrong place, "
            "in the gradient of the weights"
        )
    for order in permutations(range(4)):
        if order == (0, 1, 2, 3):
            continue
        drawn = here.flatten().view([here.shape[axis] for axis in order])  # the same numbers, in another order of axes
        back = [order.index(axis) for axis in range(4)]
        if torch.equal(drawn.permute(back).round(), there.round()):
            read = ", ".join(_AXES[axis] for axis in order)
            return (
                f"the backward draws the mask of dropout in the order [{read}], the forward in [B, H, T, S]: the same "
                "numbers fall on other weights"
            )
    return _OTHERS


def _weights(case: Case, rate: float) -> tuple[Tensor, Tensor]:
    """Return `[B, H, T, S]` as the forward multiplies values with it, and as the gradient of the values shows it."""
    made = setting(case, Sizes(batch=2, queries=5, keys=7, heads=3, rate=rate))
    values = made.leaves["the values"]
    forward, rows = [], []
    for s in range(values.shape[2]):
        with torch.no_grad():
            values.zero_()
            values[:, :, s, 0] = 1.0
            forward.append(made.output()[..., 0].clone())
    output = made.run()
    made.built.module.train()
    for t in range(output.shape[2]):
        one = torch.zeros_like(output)
        one[:, :, t, 0] = 1.0
        rows.append(torch.autograd.grad(output, values, one, retain_graph=True)[0][..., 0])
    made.built.module.eval()
    return torch.stack(forward, -1).detach(), torch.stack(rows, 2)
