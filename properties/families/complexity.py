"""Cost: multiplications counted against the closed form, and how time and memory must grow with T."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import DispatchWatch, WorkWatch
from veriformer.properties.causes.structure import beside_the_textbook, off_the_record
from veriformer.properties.definitions.costs.flops import COUNTED, Flops, possible_flops, why_unknown
from veriformer.properties.engine.calling import Caller
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.probes.sizes.own_sizes import sizes_of

_MOST_WORK = 7e10
"""Multiplications of a call at T = 512: where it would be more a quarter of that length is called."""

_VASWANI = "Vaswani et al. 2017, table 1; a multiply-add is two operations."


def _call(case: Case, built: Built, batch: int, length: int) -> Caller:
    """Return a call on inputs of a length."""
    config = built.config
    if case.subject.kind == "feed_forward":
        return case.caller(built, case.normal(batch, length, config.d_model, dtype=built.dtype))
    if case.subject.kind == "attention":
        shape = (batch, config.num_heads, length, config.d_head)
        return case.caller(built, *(case.normal(*shape, dtype=built.dtype) for _ in range(3)))
    stream = Stream(case, built, other_length=length)
    return case.caller(built, *stream.inputs(stream.draw(batch, length)))


@functools.cache
def make_ready() -> None:
    """Count some products once: on its first product, norm and kernel torch's counter imports much of torch.

    That takes seconds, and many of them on a busy machine: they are not the subject's.
    """
    x = torch.zeros(1, 2, 4)
    with FlopCounterMode(display=False), sdpa_kernel(SDPBackend.MATH):
        y = functional.gelu(functional.layer_norm(x @ x.mT @ x, (4,)))
        functional.scaled_dot_product_attention(y, functional.linear(x, torch.zeros(4, 4)), x).softmax(-1)


def num_operations(run: Callable[[], object]) -> Tensor:
    """Return the FLOPs of all matrix products of a call."""
    make_ready()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # a fused kernel is not counted
        run()
    return torch.tensor(counter.get_total_flops(), dtype=torch.float64)


@holds(
    "complexity.flops",
    statement="The matrix products of a forward pass are those of the formula, no more and no fewer.",
    formula="FLOPs = B (T (8 d^2 + 4 d d_ff) + 4 T^2 d) a layer; 24 T d^2 + 4 T^2 d at d_ff = 4 d",
    source=_VASWANI,
    kinds=COUNTED,
    level="extended",
    unless=(needs_module, why_unknown, excludes_fact("batch_coupled"), excludes_fact("structure", "other")),
    asks=("structure", "other"),
    examples_factor=0.5,
    catches=("IN02",),
    leaves_open=("activation", "norm_placement", "positions"),
)
def products_are_those_of_the_formula(case: Case) -> None:
    """Counted by torch's dispatcher, in grad mode, where no fused layer hides its products. A causal mask saves
    nothing here: dense attention computes what it masks. Rotary positions may spend an outer product on their angles.
    A model that holds more matrices than the textbook's, or none of its own, has no closed form here; nor has a kernel
    whose cost grows with T where a window, or memory that grows with T, is known of it.
    """
    built = case.built(dtype=torch.float32)
    batch, length = case.batch(1, 2), case.integer("T", 2, 8)
    run = _call(case, built, batch, length)
    got = case.apply(num_operations, run)
    if not got:
        case.does_not_apply("its products are not seen by torch's counter")
    expected = _nearest(_possible(case, run), int(got), batch, length)
    wanted = batch * expected.total(length)
    holds = (wanted <= got) & (got <= wanted + batch * length * expected.angles)
    if not holds:
        _give_up_on_other_structures(case)
    case.require(
        holds,
        "the number of operations is not that of the formula",
        got=f"{int(got)}",
        expected=f"{wanted}",
        error=(got - wanted).abs(),
        cause=lambda: _surplus(case, built, expected),
    )
    case.witness()


def _possible(case: Case, run: Caller) -> list[Flops]:
    """Return the closed forms that what is declared leaves open.

    A decoder may give hidden states instead of logits, an encoder logits instead of hidden states.
    """
    config = sizes_of(case.bench, run.built)
    found = possible_flops(case.subject, config)
    if case.subject.kind not in ("encoder", "decoder") or not case.subject.takes_tokens:
        return found
    width, sizes = run().shape[-1], (config.d_model, config.vocab_size)
    if width in sizes and sizes[0] != sizes[1]:
        output = 2 * sizes[0] * sizes[1] if width == sizes[1] else 0
        found = [replace(f, output=output) for f in found]
    return found


def _nearest(possible: list[Flops], got: int, batch: int, length: int) -> Flops:
    return min(possible, key=lambda f: abs(got - batch * f.total(length)))


def _give_up_on_other_structures(case: Case) -> None:
    """Stop where it is seen that a model is not the textbook's, which the closed form speaks of."""
    if case.subject.fact("structure") == "textbook":
        return
    if seen := beside_the_textbook(case, matrices=True):
        case.does_not_apply(f"its blocks are not the textbook's: {seen}")
    if case.subject.fact("sparse"):
        case.does_not_apply("its attention is sparse: how many products it leaves out is not known")
    if case.subject.fact("window") or case.subject.fact("memory") == "linear":
        key = ("grows with T",)
        if key not in case.bench.measured:
            built = case.bench.pool.get(case.bench.configs[0], torch.float32)
            case.bench.measured[key] = _grows_with_length(case, built)
        if case.bench.measured[key]:
            case.does_not_apply("its cost grows with T and not with T^2: no table of scores is made")


def _grows_with_length(case: Case, built: Built) -> bool:
    """Return whether equal steps of the length, of whole blocks of most sizes, cost the same, and cost something."""
    for step in (math.lcm(48, case.subject.fact("window", 1)), 4 * case.subject.fact("window", 3)):
        try:
            with off_the_record(case):
                costs = [int(num_operations(_plain_call(case, built, n * step))) for n in (1, 2, 3)]
        except SubjectError:  # longer than it can be
            continue
        return costs[2] - costs[1] == costs[1] - costs[0] > 0
    return False


def _plain_call(case: Case, built: Built, length: int, batch: int = 1) -> Callable[[], object]:
    """Return a call on inputs that nothing is drawn for."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length, built.config.d_model)
    x = torch.randn(*shape, generator=generator)
    if case.subject.takes_tokens and case.subject.kind in ("encoder", "decoder"):
        x = torch.randint(1, built.config.vocab_size, (batch, length), generator=generator)
    x = x.to(case.bench.device)
    args = (x, x.clone()) if case.subject.kind == "cross_attention" else (x,)
    return lambda: case.bench.forward(built, *args)


def _surplus(case: Case, built: Built, expected: Flops) -> str | None:
    """Name the part that is made too often, at lengths of which no two parts cost the same multiple."""
    names: set[str] = set()
    for batch, length in ((1, 3), (2, 5), (1, 8)):
        with off_the_record(case):
            got = int(num_operations(_plain_call(case, built, length, batch)))
        surplus = got - batch * expected.total(length)
        parts = {
            "all products": batch * expected.total(length),
            "the attention scores": batch * expected.square * length**2,
            "the projection to the vocabulary": batch * expected.output * length,
            "the projections and feed-forward networks": batch * expected.linear * length,
        }
        told = {
            f"{name} are made {abs(surplus) // size} times too {'often' if surplus > 0 else 'few'}"
            for name, size in parts.items()
            if size and surplus and abs(surplus) % size == 0
        }
        names = told if not names else names & told
        if not names:
            return None
    return sorted(names)[0] if len(names) == 1 else None


@holds(
    "complexity.exponent",
    statement="Cost grows as a T + b T^2; attention overtakes the rest at T = 2 d + d_ff, which is 6 d at d_ff = 4 d.",
    formula="FLOPs(T) = a T + b T^2 at every T; a / b = 2 d + d_ff (ReLU, all heads their own keys)",
    source=_VASWANI,
    kinds=("layer", "encoder", "decoder"),
    level="extended",
    unless=(needs_module, why_unknown, excludes_fact("batch_coupled"), excludes_fact("structure", "other")),
    asks=("structure", "other"),
    examples_factor=0.25,
    leaves_open=("activation", "norm_placement", "positions"),
)
def cost_grows_as_it_must(case: Case) -> None:
    """Fits a and b to two lengths and foretells a third, exactly: padding to a fixed length, or work that is done
    again for every earlier token, shows as another power. Seconds are not judged: they belong to the machine; the
    study `profile` measures them.
    """
    built = case.built(dtype=torch.float32)
    longest = case.subject.longest or 20
    if longest < 8:
        case.does_not_apply(f"sequences of {longest} are too short to tell how cost grows")
    short = case.integer("T", 2, min(5, longest // 4))
    lengths = (short, 2 * short, 4 * short)
    counts = [case.apply(num_operations, _call(case, built, 1, length)) for length in lengths]
    if not counts[0]:
        case.does_not_apply("its products are not seen by torch's counter")
    twice_square = counts[1] - 2 * counts[0]  # 2 b T^2
    foretold = 2 * counts[1] + 4 * twice_square  # a 4T + b 16 T^2
    if counts[2] != foretold:
        _give_up_on_other_structures(case)
    case.require(
        counts[2] == foretold,
        f"{4 * short} tokens do not cost what {short} and {2 * short} foretell",
        got=f"{int(counts[2])}",
        expected=f"{int(foretold)}",
        cause=lambda: "the cost does not depend on T: is the input padded to a fixed length?"
        if counts[0] == counts[2] else None,
    )  # fmt: skip
    expected = _nearest(_possible(case, _call(case, built, 1, short)), int(counts[0]), 1, short)
    square = twice_square / (2 * short**2)
    linear = counts[0] / short - square * short - expected.output
    slack = expected.angles / max(expected.square, 1)
    crossing = linear / square
    wanted = expected.linear / expected.square
    holds = (crossing - wanted).abs() <= slack + 1e-9 * wanted
    if not holds:
        _give_up_on_other_structures(case)
    case.require(
        holds,
        "attention overtakes the rest at another length",
        got=f"T = {crossing:.4g}",
        expected=f"T = {wanted:.4g}",
    )
    case.witness()


class _Largest(DispatchWatch):
    """Notes the bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in given:  # a view makes nothing
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return output


def largest_made(run: Callable[[], object]) -> Tensor:
    """Return the bytes of the largest tensor that an operation of a call makes."""
    with _Largest() as watch:
        run()
    return torch.tensor(watch.bytes, dtype=torch.float64)


@holds(
    "complexity.memory",
    statement="The largest intermediate tensor grows with T where attention is fused, with T^2 where it is not.",
    formula="memory = linear: size(2T) = 2 size(T); quadratic: size(2T) = 4 size(T), T large",
    source="Dao et al. 2022, theorem 2; Rabe & Staats 2021.",
    kinds=("attention", "self_attention"),
    level="extended",
    unless=needs_fact("memory"),
    examples_factor=0.25,
)
def memory_grows_as_declared(case: Case) -> None:
    """At T = 256 and 512, where a score matrix outgrows everything else by far; at shorter ones where a longest length
    is known, or the steps of a call at T = 64 foretell too much work. A kernel that was to be fused and falls back to
    scores in full is caught here, long before memory runs out.
    """
    built = case.built(dtype=torch.float32)
    run = _call(case, built, 1, 64)
    if (limit := case.subject.fact("max_len", 512)) < 128:
        case.does_not_apply(f"max_len = {limit} is too short for a score matrix to outgrow the rest")
    with off_the_record(case), WorkWatch() as watch:
        run()
    parameters = built.module.parameters() if isinstance(built.module, torch.nn.Module) else ()
    foreseen = watch.work * 8**2 + 512 * sum(p.numel() for p in parameters)  # at T = 512
    longest = min(limit, 512 if foreseen < _MOST_WORK else 128)
    sizes = [case.apply(largest_made, _call(case, built, 1, length)) for length in (longest // 2, longest // 2 * 2)]
    ratio = sizes[1] / sizes[0].clamp(min=1)
    linear = case.subject.fact("memory") == "linear"
    case.require(
        ratio < 2.5 if linear else ratio > 3.5,
        f"the largest intermediate tensor does not grow as {'T' if linear else 'T^2'}",
        got=f"{ratio:.3g} times as large for twice the length",
        expected="2 times" if linear else "4 times",
        cause=lambda: "the score matrix is made in full" if linear and ratio > 3.5 else None,
    )
    case.witness()
