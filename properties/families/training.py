"""Training: a few steps move all that is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from veriformer.properties.bench.measured import given_dtype
from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.calling import Caller
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.rounded_weights import cut_by_rounding, rounding_words
from veriformer.properties.families.zero_starts import held_at_zero
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS

_KINDS = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("softmax", "attention"))
STEPS = 8  # a layer that stochastic depth drops half of the time is missed in all of them once in 256 draws; then 64
RATE = 1e-3


@holds(
    "training.parameters-move",
    statement="In a few steps of an optimiser every trainable parameter moves, in the numbers that it is kept in.",
    formula="theta_k != theta_0 where d f / d theta != 0; |step| >= u |theta| / 2, or rounding holds it still",
    source="Definition of training; documented bug NM13: gains of 1 in bfloat16 never moved in thousands of steps.",
    kinds=_KINDS,
    level="extended",
    requires=("parameters.all-used",),
    unless=needs_module,
    examples_factor=0.1,
    catches=("NM13",),
)
def all_that_is_trained_moves(case: Case) -> None:
    """Eight steps of 0.001 against the sign of the gradient, which is what Adam does first, in train mode and in the
    dtype that the parameters are built in. Left out is what has no gradient in eval mode either, on the same inputs
    (experts nobody chose). A weight or a norm that asks for no gradient while others do is a question, and so is one
    that rounding holds still: an optimiser may keep float32 copies. Of two matrices that are multiplied one may start
    at zero; where both do neither learns.
    """
    built = _as_it_is_built(case)
    module = built.module
    if not isinstance(module, nn.Module) or not any(p.requires_grad for p in module.parameters()):
        case.integer("none", 0, 1)
        case.witness()
        return
    batches = [_batch(case, built) for _ in range(3)]
    call = case.caller(built)
    held = case.apply(held_at_zero, call, module, batches, STEPS)
    case.equal(
        held, [], f"{len(held)} parameters start at zero and stay there: no gradient reaches them in {STEPS} steps",
        got=", ".join(held[:4]) + (" ..." if len(held) > 4 else ""), expected="none",
        cause=lambda: f"{held[0]} and {held[1]} both start at zero, so that neither learns: each lets the gradient of "
        "the other through",
    )  # fmt: skip
    frozen = [] if case.subject.fact("frozen") else case.apply(not_trained, module)
    case.equal(
        frozen, [], f"{len(frozen)} weights ask for no gradient, so they are never trained, while others are",
        got=", ".join(frozen[:4]) + (" ..." if len(frozen) > 4 else ""), expected="none", asks=("frozen", True),
    )  # fmt: skip
    output = case.call(built, *batches[0])
    if not output.requires_grad:
        case.does_not_apply("its output has no gradient")
    cut = [] if case.subject.fact("frozen") else case.apply(cut_by_rounding, call, module, batches[0])
    case.equal(
        cut, [], f"of {len(cut)} matrices at most one entry a row has a gradient: the others are never trained",
        got=", ".join(cut[:4]), expected="a gradient for every entry", asks=("frozen", True),
        cause=lambda: rounding_words(call, module, batches[0]),
    )  # fmt: skip
    weight = case.normal(*output.shape, dtype=output.dtype)
    raised, still, unreached = case.apply(train_a_little, call, module, batches, weight, STEPS)
    if unreached:
        raised, still, unreached = case.apply(train_a_little, call, module, batches, weight, 8 * STEPS)
    case.equal(
        raised, [], "a step of training that follows another raises",
        got=raised[0] if raised else "", expected="another step",
    )  # fmt: skip
    case.equal(
        unreached, [], f"{len(unreached)} parameters have a gradient in eval mode and none in train mode",
        got=", ".join(unreached[:4]), expected="a gradient for each",
        cause=lambda: "in train mode they are detached or left out, so that they are never trained",
    )  # fmt: skip
    if case.subject.fact("master_weights"):
        case.witness()
        return
    rounded = [p.dtype for name, p in module.named_parameters() if name in still and p.dtype.itemsize < 4]
    case.equal(
        still, [], f"{len(still)} parameters with a gradient stay as they are, to the last bit, for {STEPS} steps",
        got=", ".join(still[:4]), expected="every one moves",
        cause=lambda: (
            f"steps of {RATE:g} are below the rounding of {str(rounded[0]).removeprefix('torch.')} at their size: "
            "they never move"
            if rounded
            else "something puts their values back in every forward"
        ),
        asks=("master_weights", True) if rounded else None,
    )  # fmt: skip
    case.witness()


def _as_it_is_built(case: Case) -> Built:
    """Return a model of its own in the dtypes of its parameters, whichever these are; inputs have that of most."""
    if case.subject.module is not None:
        return case.copy_of(case.built(dtype=given_dtype(case.bench)))
    return case.bench.pool.as_built(case.config())


def _batch(case: Case, built: Built) -> list[Tensor]:
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    return [*(x.to(case.bench.device) for x in inputs.tensors), *inputs.extras]


def not_trained(module: nn.Module) -> list[str]:
    """Return the names of the weights of linear maps, norms and attention that ask for no gradient."""
    kinds = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention)
    return [
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if isinstance(part, kinds)
        for name, parameter in part.named_parameters(recurse=False)
        if not parameter.requires_grad
    ]


def train_a_little(
    call: Caller, module: nn.Module, batches: list[list[Tensor]], weight: Tensor, steps: int
) -> tuple[list[str], list[str], list[str]]:
    """Take steps against the sign of the gradient, in train mode.

    Returns:
        what a step raised, if one did, the parameters that have a gradient and did not move, and those that have one in
        eval mode alone.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.numel()]
    before = {name: p.detach().clone() for name, p in named}
    reached: dict[bool, set[str]] = {True: set(), False: set()}
    moved: set[str] = set()
    was = module.training
    try:
        torch.default_generator.manual_seed(0)  # of what train mode drops
        for training in (False, True):
            module.train(training)
            for step in range(steps + 1 if training else len(batches)):
                output = call(*batches[step % len(batches)])
                # behind a forward, which may put values back; two steps may cancel, so that one moved place is enough
                moved |= {name for name, p in named if not torch.equal(p.detach(), before[name])}
                total = (output * weight).sum() if output.shape == weight.shape else output.sum()
                for (name, p), gradient in zip(named, _gradients(total, [p for _, p in named]), strict=True):
                    if gradient is None:
                        continue
                    dense = gradient.to_dense() if gradient.is_sparse else gradient
                    if dense.any():
                        reached[training].add(name)
                    if training:
                        with torch.no_grad():
                            p.sub_(1e-3 * dense.sign())
        told = []
    except RuntimeError as raised:
        told = [str(raised).splitlines()[0][:200]]
    finally:
        module.train(was)
    return told, sorted(reached[True] - moved), sorted(reached[False] - reached[True])


def _gradients(total: Tensor, leaves: list[nn.Parameter]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
