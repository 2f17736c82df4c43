"""Permutation: without positions, attention sees a set; with them, it does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.definitions.rounding import rounding_bound
from veriformer.properties.diagnosis.places.positions import odd_positions
from veriformer.properties.diagnosis.places.rows import misplaced
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import PER_POSITION, Stream
from veriformer.properties.subject.paths import DEFAULT, Path
from veriformer.properties.subject.subject import Subject

_FREE = (
    needs_fact("positions", "none"),
    excludes_fact("causal"),
    excludes_fact("window"),
    excludes_fact("sparse"),  # blocks and windows tell positions apart
)
_SET = "Lee et al. 2019 (Set Transformer), property 1; Yun et al. 2020, claim 1."


def _order(case: Case, length: int) -> list[int]:
    """Draw an ordering that is not the identity: random, reversal, adjacent or distant swap, cyclic shift."""
    manner = case.choice("manner", ("swap", "reversal", "shift", "distant", "random"))
    order = list(range(length))
    if manner == "swap":
        at = case.integer("at", 0, length - 2)
        order[at], order[at + 1] = order[at + 1], order[at]
    elif manner == "distant":
        order[0], order[-1] = order[-1], order[0]
    elif manner == "reversal":
        order.reverse()
    elif manner == "shift":
        by = case.integer("by", 1, length - 1)
        order = order[by:] + order[:by]
    else:
        order = case.permutation("order", length)
        if order == sorted(order):
            order = order[1:] + order[:1]
    return order


def _mask(case: Case, x: Tensor) -> Tensor | None:
    """Draw a padding mask with holes, or none; permuting needs one that moves along."""
    if not case.subject.takes_mask("padding") or not case.flag("masked"):
        return None
    mask = torch.rand(x.shape[:2], generator=case.generator).to(x.device) > 0.3
    mask[:, 0] = True
    return mask


@holds(
    "permutation.equivariance",
    statement="Without positions, permuting the inputs permutes the outputs.",
    formula="f(P X) = P f(X)",
    source=_SET,
    kinds=PER_POSITION,
    unless=_FREE,
    sweeps_lengths=True,
    farthest=257,
    catches=("HD01", "HD02", "FF07", "SM01", "CM19"),
)
def permuting_inputs_permutes_outputs(case: Case) -> None:
    """softmax(P Q K^T P^T) P V = P softmax(Q K^T) V, and all else acts on one position at a time. Masks permute along.

    A causal model is not equivariant: its mask does not permute. Rows differ and P is never the identity.
    """
    length = case.length("T", low=2)
    stream = Stream(case, case.built())
    x = stream.draw(2, length)
    order = _order(case, length)
    mask = _mask(case, x)
    for path in case.paths(masks=("none",)):
        straight = stream(x, mask, path=path)
        permuted = stream(x[:, order], None if mask is None else mask[:, order], path=path)
        real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask[:, order].cpu()
        case.close(
            permuted[real],
            straight[:, order][real],
            "permuting the inputs does not permute the outputs, though the model has no positions",
            cause=lambda path=path: _cause(stream, x, order, mask, path),  # type: ignore[misc]
        )
    if bool((x[:, order] != x).any()):
        case.witness()


def _cause(stream: Stream, x: Tensor, order: list[int], mask: Tensor | None, path: Path) -> str | None:
    """Tell a path that differs, a causal mask, outputs that stay where they are, and heads mixed with positions."""
    limit = stream.case.tolerance(stream.built)
    with torch.no_grad():
        plain, moved = stream(x, mask), stream(x[:, order], None if mask is None else mask[:, order])
        if path != DEFAULT and worst_difference(moved, plain[:, order], size_of(plain)).error <= limit:
            return f"the plain path is equivariant, this one alone is not ({path})"
        if told := misplaced(stream.case):
            return told
        other = stream.other(x)
        last = torch.cat([x[:, :-1], other[:, -1:]], dim=1)
        before, after = stream(x, path=path)[:, :-1], stream(last, path=path)[:, :-1]
        first = stream(torch.cat([other[:, :1], x[:, 1:]], dim=1), path=path)[:, -1]
        seen = worst_difference(first, plain[:, -1], size_of(plain)).error > limit
        if seen and worst_difference(after, before, size_of(plain)).error <= limit:
            return "earlier outputs do not depend on the last input: a causal mask is applied"
        if path == DEFAULT and (told := odd_positions(stream.case)):
            return told
        constant = stream(x[:, :1].expand_as(x).contiguous(), path=path)
        spread = (constant - constant[:, :1]).abs().max()
        if float(spread) > limit * float(constant.abs().max()):
            return odd_positions(stream.case) or (
                "equal inputs at all positions give different outputs: something depends on the index of a position"
            )
    return (
        "equal inputs give equal outputs, so no index enters by itself: positions are mixed up with heads or channels"
    )


@holds(
    "permutation.invariance",
    statement="Without positions, a pooled output does not change when the inputs are permuted.",
    formula="pool(f(P X)) = pool(f(X))",
    source="Equivariance followed by a symmetric pooling; class and register tokens stay where they are.",
    kinds=("classifier",),
    unless=_FREE,
    sweeps_lengths=True,
    farthest=257,
    catches=("HD01", "PE07"),
)
def pooling_forgets_order(case: Case) -> None:
    """Mean, max and weighted pooling are symmetric; a class token attends to a set."""
    ends = int(case.subject.fact("pooling") not in ("mean", "max", "weighted", "cls"))  # what is pooled may be an end
    length = case.length("T", low=2 + 2 * ends)
    stream = Stream(case, case.built())
    x = stream.draw(2, length)
    order = [ends + place for place in _order(case, length - 2 * ends)]
    order = [0, *order, length - 1] if ends else order
    mask = _mask(case, x)
    for path in case.paths(masks=("none",)):
        case.close(
            stream(x[:, order], None if mask is None else mask[:, order], path=path),
            stream(x, mask, path=path),
            "the pooled output changes when the inputs are permuted, though no positions are declared",
        )
    if bool((x[:, order] != x).any()):
        case.witness()


def _has_positions(subject: Subject) -> str | None:
    positions = subject.fact("positions")
    if positions is None:
        return "the fact 'positions' is neither declared nor known"
    return "the subject declares no positions" if positions == "none" else None


_has_positions.rests_on = "positions"  # type: ignore[attr-defined]


@holds(
    "permutation.broken-by-positions",
    statement="A subject with positions is not permutation equivariant.",
    formula="f(P X) != P f(X) for some P",
    source="The inverse of equivariance: a declared fact is verified, not believed.",
    kinds=(*PER_POSITION, "classifier"),
    unless=(_has_positions, excludes_fact("sparse")),
    catches=("PE07",),
    asks=("sparse", True),
    leaves_open=("positions",),
)
def positions_break_the_symmetry(case: Case) -> None:
    """Positions exist to tell orders apart. Tokens all differ, so that a permutation is one; ALiBi with symmetric
    pooling cannot tell a sequence from its reverse, so the permutation drawn here is a cyclic shift of three parts.
    """
    length = case.length("T", low=4)
    stream = Stream(case, case.built())
    x = torch.cat([_distinct(case, stream, length) for _ in range(8)])
    order = [1, 0, *range(2, length)]
    permuted, straight = stream(x[:, order]), stream(x)
    case.differs(
        permuted,
        straight[:, order] if stream.per_position else straight,
        "swapping two inputs only swaps their outputs: the declared positions do not enter",
    )
    case.witness()


def _distinct(case: Case, stream: Stream, length: int) -> Tensor:
    x = stream.draw(1, length)
    if not x.is_floating_point():
        x = (torch.arange(length, device=x.device)[None] + x[:, :1]) % case.config().vocab_size
    return x


@holds(
    "positions.order-matters",
    statement="Swapping two inputs changes an output elsewhere.",
    formula="f(P X)_t != f(X)_t for some t that P leaves in place",
    source="Course notes, section 3.2: without order information a sentence is a bag of words.",
    kinds=(*PER_POSITION, "classifier"),
    unless=(_has_positions, excludes_fact("sparse")),
    catches=("PE07", "RP05"),
    asks=("sparse", True),
    leaves_open=("positions",),
)
def swapping_two_inputs_is_seen_elsewhere(case: Case) -> None:
    """Another position, or the pooled output, tells the two orders apart. In a causal model a later position sees it.

    Distances to the observer must differ from a mirror image of one another, or ALiBi would rightly see none: the
    observer stands at the end. The first two inputs are swapped, or the two before the observer: one of the swaps
    must be seen, since far distances may share a bucket, and then the first is rightly invisible to one layer.
    """
    length = case.integer("T", 4, 7)
    if (window := case.subject.fact("window")) is not None and window < length:
        case.reject("the observer does not see both inputs")
    stream = Stream(case, case.built())
    if stream.built.dtype in (torch.bfloat16, torch.float16):
        case.does_not_apply("in half precision the least slope of ALiBi, 2^-8, cannot be told from rounding")
    x = torch.cat([_distinct(case, stream, length) for _ in range(8)])  # one of them will not happen to look away
    far, near = list(range(length)), list(range(length))
    far[:2], near[-3:-1] = [1, 0], [length - 2, length - 3]
    straight, swapped = stream(x), [stream(x[:, far]), stream(x[:, near])]
    if stream.per_position:
        straight, swapped = straight[:, -1], [output[:, -1] for output in swapped]
    case.differs(
        torch.cat(swapped),
        torch.cat([straight, straight]),
        "swapping two inputs changes no output elsewhere: order is not seen",
    )
    case.witness()


@holds(
    "permutation.softmax-conjugation",
    statement="Softmax commutes with permuting rows and columns together.",
    formula="softmax(P X P^T) = P softmax(X) P^T",
    source="Course notes, chapter 10, section 4.1.",
    kinds=("softmax",),
    level="extended",
    catches=("SM01",),
)
def softmax_commutes_with_conjugation(case: Case) -> None:
    """Each row is normalised by a symmetric sum over its entries, whatever their order."""
    built = case.built()
    size = case.integer("T", 2, 9)
    x = case.normal(2, size, size, dtype=built.dtype, scale=3.0)
    order = _order(case, size)
    # two summation orders of `size` terms that add up to 1; entries are at most 1
    bound = 2 * rounding_bound(built.dtype, size, operations=2)
    case.close(
        case.call(built, x[:, order][:, :, order]),
        case.call(built, x)[:, order][:, :, order],
        "permuting rows and columns together does not permute the softmax",
        bound=bound,
    )
    case.witness()


@holds(
    "permutation.gradient-equivariance",
    statement="The parameter gradients of a permutation-invariant loss do not change when the inputs are permuted.",
    formula="d L(f(P X)) / d theta = d L(f(X)) / d theta for L symmetric in positions",
    source="Derivative of equivariance with respect to the parameters.",
    kinds=PER_POSITION,
    level="extended",
    requires=("permutation.equivariance",),
    unless=_FREE,
    examples_factor=0.5,
    catches=("HD01",),
)
def parameter_gradients_forget_order(case: Case) -> None:
    """L is a sum over positions of the cube of a random projection: it does not depend on their order."""
    length = case.length("T", low=2)
    built = case.built()
    if not isinstance(built.module, nn.Module) or not any(p.requires_grad for p in built.module.parameters()):
        case.reject("no parameters to differentiate by")
    stream = Stream(case, built)
    x = stream.draw(1, length)
    order = _order(case, length)
    parameters = [p for p in built.module.parameters() if p.requires_grad]
    probe = case.normal(stream(x).shape[-1], dtype=built.dtype)
    gradients = []
    for given in (x, x[:, order]):
        loss = ((stream(given) * probe).sum(dim=-1) ** 3).sum()
        gradients.append([g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None])
    permuted = torch.cat([g.flatten() for g in gradients[1]])
    straight = torch.cat([g.flatten() for g in gradients[0]])
    # the cube amplifies a relative error threefold, its derivative once more; the sum over positions is reordered
    bound = 16 * case.tolerance(built) * float(straight.abs().max())
    case.close(
        permuted, straight, "permuting the inputs changes the parameter gradients of a symmetric loss", bound=bound
    )
    case.witness()
