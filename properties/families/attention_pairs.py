"""Pairwise masks of modules: which query may attend to which key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.causes.influence_maps import declared_region
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_mask
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import Stream
from veriformer.properties.subject.paths import Path

_ROUNDING = 1e-4
"""Of the size of an output; causes differ by far more."""


@holds(
    "attention.pairwise-mask",
    statement="Under a pairwise mask output t of one layer depends on the inputs that row t allows, and on no other.",
    formula="d f(x, M)_t / d x_s != 0  <=>  M_ts or s = t (the query itself); M [T, S] and M [B, T, S] agree",
    source="Vaswani et al. 2017, section 3.2.3; defects: masks transposed, inverted, of another sample.",
    kinds=("self_attention", "layer"),
    unless=needs_mask("pairwise"),
    examples_factor=0.5,
    farthest=129,
    catches=("CM09", "CM12", "HD10"),
)
def rows_of_the_mask_say_what_is_seen(case: Case) -> None:
    """Masks are random, one key at least in each row, and no symmetric matrix: its transpose would pass. A mask a
    sample says the same as the one mask for all, and each sample obeys its own. Causality is kept besides. In long
    sequences, which may be taken in parts, an output must be that under a mask whose rows are all its own.
    """
    stream = Stream(case, case.built())
    if case.reaches:
        return _each_obeys_its_row(case, stream, case.length("T"))
    length = case.integer("T", 3, 5)
    x = stream.draw(2, length)
    masks = torch.rand(2, length, length, generator=case.generator) < 0.5
    keep = torch.randint(0, length, (2, length, 1), generator=case.generator)
    region = _region(case, length)
    if case.subject.fact("causal"):
        keep = keep.minimum(torch.arange(length)[None, :, None])
    outside = ~region[torch.arange(length)[None, :, None], keep]  # of a window: the query itself is inside
    masks.scatter_(-1, torch.where(outside, torch.arange(length)[None, :, None], keep), True)
    masks[:, 0, -1], masks[:, -1, 0] = False, True  # not symmetric
    masks[:, 0, 0] = True
    masks = masks.to(x.device)
    path = Path(mask="pairwise")
    case.path = str(path)
    each = stream(x, masks, path=path).detach()
    for sample in range(2):
        alone = stream(x[sample : sample + 1], masks[sample : sample + 1], path=path).detach()
        case.close(each[sample : sample + 1], alone, "a sample of a batch does not obey its own pairwise mask")
    one = stream(x[:1], masks[0], path=path).detach()
    case.close(one, each[:1], "a mask [T, S] and the same mask [B, T, S] give other outputs")
    seen = _influence(case, stream, x[:1], masks[0], path)
    if seen is None:
        case.path = ""
        case.witness()
        return
    allowed = masks[0].cpu() & region
    itself = torch.eye(length, dtype=torch.bool)  # a query reaches its own output whatever it sees
    illegal = torch.where(allowed | itself, torch.zeros_like(seen), seen)
    case.exact(illegal, torch.zeros_like(illegal), "an input that the pairwise mask hides reaches the output",
               cause=lambda: _cause(stream, seen, allowed))  # fmt: skip
    missing = (seen == 0) & allowed
    case.require(~missing.any(), "an input that the pairwise mask shows does not reach the output",
                 got=f"{int(missing.sum())} of {int(allowed.sum())}", expected="all of them",
                 cause=lambda: _cause(stream, seen, allowed))  # fmt: skip
    case.path = ""
    case.witness()


def _each_obeys_its_row(case: Case, stream: Stream, length: int) -> None:
    """Compare outputs of a long sequence with those under masks whose rows are all one of its rows.

    Each query sees itself besides, so that no row is empty where causality hides what the mask shows.
    """
    x, itself = stream.draw(1, length), torch.eye(length, dtype=torch.bool)
    mask = (torch.rand(length, length, generator=case.generator) < 0.5) | itself
    path = Path(mask="pairwise")

    def under(row: int, query: int) -> Tensor:
        """Return an output under the mask that is a row of `mask` throughout; other queries see themselves besides."""
        rows = mask[row].expand(length, length) | itself
        rows[query] = mask[row]
        return stream(x, rows.to(x.device), path=path).detach()[0, query]

    each = stream(x, mask.to(x.device), path=path).detach()[0]
    case.path = str(path)
    for query in sorted({length - 1, length // 2, case.integer("t", 0, length - 1)}):
        case.close(
            each[query],
            under(query, query),
            "an output is not the one under a mask whose rows are all its own row",
            cause=partial(_other_row, under, each[query], length, query),
        )
    case.path = ""
    case.witness()


def _other_row(under: Callable[[int, int], Tensor], output: Tensor, length: int, query: int) -> str | None:
    """Say which row of a mask an output obeys in place of its own."""
    off = [float((output - under(row, query)).abs().amax()) for row in range(length)]
    size = float(output.abs().amax())
    near = [row for row, error in enumerate(off) if error <= 1e-3 * size]
    if len(near) != 1 or near[0] == query:
        return None
    return (
        f"query {query} of {length} obeys row {near[0]} of the pairwise mask, not row {query}: where queries are taken "
        "in parts, the rows of the mask are cut from another place than theirs"
    )


def _region(case: Case, length: int) -> Tensor:
    """Return `[T, T]`: what may be seen besides the mask, by causality and a declared window."""
    if not case.subject.fact("causal"):
        return torch.ones(length, length, dtype=torch.bool)
    return declared_region(case.subject, length)


def _influence(case: Case, stream: Stream, x: Tensor, mask: Tensor, path: Path) -> Tensor | None:
    """Return `[T, T]`: the largest gradient of a random projection of output t by input s, over four draws."""
    length = x.shape[1]
    found = torch.zeros(length, length)
    for _ in range(4):
        leaf = stream.draw(1, length).detach().requires_grad_()
        if not leaf.is_floating_point():
            return None
        output = stream(leaf, mask, path=path)
        if not output.requires_grad:
            return None
        weight = case.normal(*output.shape[1:], dtype=output.dtype)
        found = torch.maximum(found, case.apply(_reached, output, weight, leaf))
    return found


def _reached(output: Tensor, weight: Tensor, leaf: Tensor) -> Tensor:
    """Return `[T, T]`: the largest gradient of the projection of output t by input s."""
    found = []
    for t in range(output.shape[1]):
        (gradient,) = torch.autograd.grad((output[0, t] * weight[t]).sum(), leaf, retain_graph=True)
        found.append(gradient[0].abs().amax(-1).float().cpu())
    return torch.stack(found)


def _cause(stream: Stream, seen: Tensor, allowed: Tensor) -> str | None:
    reaches, itself = seen > 0, torch.eye(len(seen), dtype=torch.bool)
    for words, mask in (("is transposed", allowed.T), ("is inverted", ~allowed)):
        if bool(((reaches | itself) == (mask | itself)).all()):
            return f"the pairwise mask {words}"
    if not bool((reaches | itself).all()):
        return None
    x, path = stream.draw(1, len(seen)), Path(mask="pairwise")
    every = torch.ones_like(allowed).to(x.device)
    if not _differs(stream(x, allowed.to(x.device), path=path), stream(x, every, path=path)):
        return "the pairwise mask is not applied"
    if stream.case.subject.kind == "self_attention" and _runs_over_queries(stream, x, every, path):
        return (
            "the outputs of all queries add up to what is linear in the inputs, so the weights of a key sum to one: "
            "the softmax runs over the queries (the rows that have a key in common), not over the keys of a query"
        )
    return None


def _runs_over_queries(stream: Stream, x: Tensor, every: Tensor, path: Path) -> bool:
    """Whether outputs are linear in the inputs once they are summed over the queries, and not before."""
    y = stream.draw(1, x.shape[1])
    both, one, other, none = (stream(z, every, path=path).detach() for z in (x + y, x, y, torch.zeros_like(x)))
    return _differs(both + none, one + other) and not _differs((both + none).sum(1), (one + other).sum(1))


def _differs(one: Tensor, other: Tensor) -> bool:
    return worst_difference(one.detach(), other.detach(), size_of(other)).error > _ROUNDING
