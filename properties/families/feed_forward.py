"""Feed-forward networks: each token by itself, not linear, the declared activation, the count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import beside_the_textbook
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.feed_forward import (
    ACTIVATIONS,
    Reading,
    can_be_read,
    nearest_reading,
    needs_readable_maps,
    read,
)
from veriformer.properties.definitions.rounding import rounding_bound
from veriformer.properties.engine.case import Case, Cause
from veriformer.properties.engine.premises import excludes_fact, is_one_network, needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.feed_forward_rows import inputs_of_many_tokens, many_tokens, unused_experts_cause
from veriformer.properties.families.row_gradients import gradients_add_up
from veriformer.properties.formulas.feed_forwards import feed_forward_cause
from veriformer.reference.counting import feed_forward_parameters

_KIND = ("feed_forward",)
_VASWANI = "Vaswani et al. 2017, section 3.3: applied to each position separately and identically."


@holds(
    "ffn.position-wise",
    statement="Token t of the output depends on token t alone, and is what that token gives by itself.",
    formula="f(x)_t = f(x_t)",
    source=_VASWANI,
    kinds=_KIND,
    sweeps_lengths=True,
    catches=("FF07",),
)
def each_token_by_itself(case: Case) -> None:
    """The same as two convolutions of kernel size 1. A reshape that mixes axes shows where B, T and D differ; a chunk
    of tokens that is left out, among up to 1161.
    """
    built, length = case.built(), case.length("T")
    x = case.normal(2, length, built.config.d_model, dtype=built.dtype)
    together = case.call(built, x)
    alone = case.call(built, x.reshape(2 * length, 1, -1)).reshape(together.shape)
    case.close(together, alone, "a token gives another output among others than by itself",
               cause=lambda: unused_experts_cause(case, built))  # fmt: skip
    token = case.integer("t", 0, length - 1)
    changed = x.clone()
    changed[:, token] = case.normal(2, x.shape[-1], dtype=built.dtype)
    after = case.call(built, changed)
    others = [t for t in range(length) if t != token]
    if others:
        case.close(after[:, others], together[:, others], "a token's output changed when another token was replaced")
    case.differs(after[:, token], together[:, token], "a token that was replaced by another kept its output")
    many_tokens(case, built)
    gradients_add_up(case, built)
    case.witness()


@holds(
    "ffn.nonlinear",
    statement="The network is not an affine map.",
    formula="f(x + y) - f(x) - f(y) + f(0) != 0",
    source="Without an activation two linear maps are one (Vaswani et al. 2017, equation 2 has a ReLU between them).",
    kinds=_KIND,
)
def the_network_is_not_affine(case: Case) -> None:
    """An affine map has no second difference."""
    built = case.built()
    x, y = (case.normal(2, 3, built.config.d_model, dtype=built.dtype) for _ in range(2))
    f = [case.call(built, z) for z in (x + y, x, y, torch.zeros_like(x))]
    case.differs(f[0] - f[1], f[2] - f[3], "the second difference vanishes: the network is affine",
                 cause=lambda: "there is no activation between the linear maps")  # fmt: skip
    case.witness()


@holds(
    "ffn.definition",
    statement="The output is that of the declared activation between the network's own linear maps.",
    formula="W2 act(W1 x + b1) + b2; SwiGLU: W2 (silu(W1 x) * W3 x)",
    source="Vaswani et al. 2017, equation 2; Hendrycks & Gimpel 2016; Shazeer 2020, equation 6.",
    kinds=_KIND,
    level="extended",
    unless=(
        needs_fact("activation", *ACTIVATIONS),
        needs_readable_maps,
        is_one_network,
        excludes_fact("structure", "other"),
        excludes_fact("quantised"),
    ),
    asks=("structure", "other"),
    catches=("FF01", "FF02", "FF04", "FF05"),
)
def the_declared_activation_is_used(case: Case) -> None:
    """The maps are found by their shapes; of SwiGLU either order of gate and value is right. GELU and its tanh form
    differ by up to 5e-4, which rounding in float32 does not hide. Then for up to 1161 tokens, and for a large odd
    width.
    """
    built, name = case.built(), str(case.subject.fact("activation"))
    x = case.normal(2, 4, built.config.d_model, dtype=built.dtype) * case.choice("scale", (1.0, 0.1, 3.0))
    case.require(
        case.apply(can_be_read, built.module, built.config, name),
        f"the linear maps do not fit the declared activation {name!r}",
        got=_shapes(built),
        expected="two maps, for SwiGLU three",
        cause=lambda: _too_few(built, name),
    )
    _agrees(case, built, x, name)
    for model, many, where, cause in inputs_of_many_tokens(case, built, name):
        if read(model.module, model.config, name):
            _agrees(case, model, many, name, where, cause)
    case.witness()


def _agrees(case: Case, built: Built, x: Tensor, name: str, where: str = "", cause: Cause | None = None) -> None:
    """Require the output of an activation between the network's own maps, read in the way that comes nearest to it."""
    try:
        got = case.call(built, x).detach().double()
    except SubjectError:
        if where:  # it is made for fewer tokens
            return
        raise
    readings = read(built.module, built.config, name)
    # two products, with the activation's few roundings between them
    width = max(built.config.d_model, readings[0].down[0].shape[1])
    expected = case.apply(nearest_reading, built.module, built.config, x, name, got)
    bound = (
        8 * rounding_bound(built.dtype, width, operations=3) * max(size_of(expected), _inner_size(readings[0], x, name))
    )
    case.close(
        got,
        expected,
        f"{where}the output is not that of {name}",
        bound=bound,
        cause=cause or (lambda: feed_forward_cause(readings, x, name, got, bound) or _other(built, x, got, bound)),
    )


def _inner_size(reading: Reading, x: Tensor, name: str) -> float:
    """Return the size of the sums before they cancel."""
    magnitude = Reading(tuple((w.abs(), b if isinstance(b, float) else b.abs()) for w, b in reading.up),
                        (reading.down[0].abs(), 0.0))  # fmt: skip
    return size_of(magnitude(x.double().abs(), name))


def _shapes(built: Built) -> str:
    return "parameters " + ", ".join(str(list(p.shape)) for p in built.module.parameters())


def _too_few(built: Built, name: str) -> str | None:
    others = [other for other in ACTIVATIONS if other != name and read(built.module, built.config, other)]
    return f"it has the maps of {' or '.join(others)}" if others else None


def _other(built: Built, x: Tensor, got: Tensor, bound: float) -> str | None:
    """Name the formula that gives the answers, if there is one."""
    for name in ACTIVATIONS:
        for reading in read(built.module, built.config, name):
            if worst_difference(got, reading(x, name)).error <= bound:
                return f"it computes {name}"
            if name == "swiglu":
                inner = [x.double() @ w.T + b for w, b in reading.up]
                slipped = ACTIVATIONS[name](inner[0] * inner[1]) @ reading.down[0].T + reading.down[1]
                if worst_difference(got, slipped).error <= bound:
                    return "silu is taken of the product gate * value instead of the gate: a parenthesis slip"
    return None


@holds(
    "ffn.neuron-permutation",
    statement="Permuting the hidden units, in every matrix and bias alike, changes nothing.",
    formula="W2 P^T act(P W1 x + P b1) = W2 act(W1 x + b1)",
    source="An activation by coordinate commutes with permutations; hidden units have no order.",
    kinds=_KIND,
    level="extended",
    unless=(needs_module, needs_readable_maps, is_one_network),
)
def hidden_units_have_no_order(case: Case) -> None:
    """Axes of the inner width are permuted; a fused gate and value by halves, or by turns, whichever it is."""
    built = case.built()
    inner = built.config.d_ff
    order = torch.tensor(case.permutation("order", inner), device=case.bench.device)
    x = case.normal(2, 3, built.config.d_model, dtype=built.dtype)
    expected = case.call(built, x)
    halves, turns = torch.cat([order, order + inner]), torch.stack([2 * order, 2 * order + 1], dim=1).flatten()
    got = [_permuted(case, built, x, order, fused) for fused in (halves, turns)]
    if order.tolist() == sorted(order.tolist()):
        case.reject("nothing was permuted")
    case.close(
        min(got, key=lambda one: float((one - expected).detach().abs().max())),
        expected,
        "permuting the hidden units changed the output",
        bound=size_of(expected) * max(case.tolerance(built), 4 * rounding_bound(built.dtype, inner)),
    )
    case.witness()


def _permuted(case: Case, built: Built, x: Tensor, order: Tensor, fused: Tensor) -> Tensor:
    """Return the output of a copy whose hidden units are permuted; `fused` where gate and value stand in one matrix."""
    inner, twin, moved = built.config.d_ff, case.copy_of(built), 0
    if not isinstance(twin.module, nn.Module):
        case.does_not_apply("what build gives is no nn.Module, so no hidden units are found in it")
    with torch.no_grad():
        for parameter in twin.module.parameters():
            for axis, size in enumerate(parameter.shape):
                if size in (inner, 2 * inner) and size != built.config.d_model:
                    parameter.copy_(parameter.index_select(axis, order if size == inner else fused))
                    moved += 1
    if moved < 2:
        case.reject("nothing was permuted")
    return case.call(twin, x)


@holds(
    "ffn.parameters",
    statement="The number of parameters is that of two maps D to F and back, of three for SwiGLU.",
    formula="2 D F + F + D with biases, 2 D F without; SwiGLU 3 D F",
    source="Vaswani et al. 2017, section 3.3; Shazeer 2020, section 3.",
    kinds=_KIND,
    unless=(
        needs_fact("activation", *ACTIVATIONS),
        needs_fact("bias"),
        needs_module,
        is_one_network,
        excludes_fact("structure", "other"),
    ),
    asks=("structure", "other"),
    catches=("FF02",),
)
def the_count_is_exact(case: Case) -> None:
    """A tensor that is shared is counted once; buffers are no parameters: weights that are integers in buffers, or made
    anew by a parametrization, have no closed form here.
    """
    built = case.built()
    config, name, bias = built.config, str(case.subject.fact("activation")), bool(case.subject.fact("bias"))
    expected = feed_forward_parameters(config.d_model, config.d_ff, name, bias)
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("what build gives is no nn.Module, so nothing is registered in it")
    got = case.apply(num_parameters, built.module)
    if got != expected and (seen := beside_the_textbook(case)):
        case.does_not_apply(f"it is not the textbook's network: {seen}")
    case.equal(got, expected, "the number of parameters is not that of the formula",
               cause=lambda: _count_cause(config.d_model, config.d_ff, got))  # fmt: skip
    case.witness()


def num_parameters(module: object) -> int:
    """Return the number of entries of all parameters; a tensor that is shared is counted once."""
    return sum(p.numel() for p in module.parameters()) if isinstance(module, nn.Module) else 0


def _count_cause(d_model: int, d_ff: int, got: int) -> str | None:
    for name in ("relu", "swiglu"):
        for bias in (True, False):
            if feed_forward_parameters(d_model, d_ff, name, bias) == got:
                maps = "three maps" if name == "swiglu" else "two maps"
                return f"it has {maps} {'with' if bias else 'without'} biases"
    return None
