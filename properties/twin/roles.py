"""Which of a model's parameters play which role of the textbook's model, told by what flows through them.

Every map is found by the numbers that it takes and gives in one forward, so that names, packing and order do not
matter; its weights are the very parameters. Where something flows otherwise than in the textbook, there the two part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, attentions
from veriformer.properties.anatomy.feed_forward import Between, between_linear_maps
from veriformer.properties.anatomy.sublayers import biased, projection_of
from veriformer.properties.anatomy.traced import Product, Traced
from veriformer.properties.twin.heads import map_of_heads, sides
from veriformer.properties.twin.joining import joined, require_one_stream, role_of, side_by_side
from veriformer.properties.twin.looking import Look
from veriformer.properties.twin.networks import require_no_number
from veriformer.properties.twin.parts import (
    Attending,
    Joined,
    Layer,
    Map,
    MixedError,
    NormRole,
    NumberError,
    PartedError,
    Roles,
    StackRole,
)
from veriformer.properties.twin.pooled import pooled


def roles(
    module: nn.Module,
    seen: Traced,
    tokens: Sequence[Tensor],
    width: int,
    result: Tensor,
    *,
    classifies: bool = False,
    encodes: bool = True,
) -> Roles:
    """Return what a model is made of, if that is what the textbook's is.

    Args:
        module: the model.
        seen: the trace of a forward.
        tokens: `[B, T]` that it was given, or embeddings `[B, T, D]`; of two sequences, of other lengths, the source's
            first.
        width: D.
        result: `[B, T, *]` that it gave; `[B, C]` of a classifier.
        classifies: whether it is one.
        encodes: whether the source of two sequences goes through an encoder, rather than being the memory.

    Raises:
        PartedError: it is made of something else.
    """
    look = Look(module, seen, width, result)
    found = [a for a in attentions(seen) if a.over == "keys"]
    if not found:
        raise PartedError("no attention could be followed from its scores to its weights")
    networks = [b for b in between_linear_maps(seen) if (b.inner, b.outer) == (look.width, look.width)]
    lengths = [x.shape[1] for x in tokens]
    grouped = (
        [_of_lengths(found, lengths[n:]) for n in range(len(lengths))] if len(lengths) > 1 else [[[a] for a in found]]
    )
    made = []
    for given, own in list(zip(tokens, grouped, strict=True))[0 if encodes else 1 :]:
        if not own:
            raise PartedError("no attention of one of its sequences over itself could be followed")
        layers = [_layer(look, sites, _network_behind(look, networks, found, sites[-1])) for sites in own]
        _require_one_stream(look, layers)
        made.append((given, layers))
    output, taken = _output(look)
    if not encodes and not look.same(made[0][1][0].attentions[-1].key.taken, tokens[0]):
        raise PartedError("the keys over the memory are made of something else")
    pool = None
    if classifies:
        if output is None:
            raise PartedError("its classes come from no linear map")
        pool = pooled(look, taken, tokens[0].shape[1])
        taken = pool.hidden
    stacks = []
    for number, (given, layers) in enumerate(made):
        first = layers[0].attentions[0].joined.stream
        entering = next((n for n in look.norms if look.same(n.made, first)), None)
        if entering is None and (odd := next((n for n in look.norms if look.multiple(first, n.made)), None)):
            raise NumberError(f"what {odd.place} gives is multiplied by {look.multiple(first, odd.made):.6g}")
        entered = first if entering is None else entering.given
        table, scale, added, extras = _embedding(look, given, entered, with_extras=classifies)
        norm = None if entering is None else role_of(look, entering)
        end = taken if number == len(made) - 1 else made[-1][1][0].attentions[-1].key.taken
        stacks.append(StackRole(table, scale, added, extras, norm, layers, _closing(look, layers, end)))
    return Roles(stacks, output, pool, takes_memory=not encodes)


def _require_one_stream(look: Look, layers: list[Layer]) -> None:
    """Require that each sublayer takes what the one before it left."""
    chain = []
    for layer in layers:
        chain += [(attending.place, attending.joined) for attending in layer.attentions]
        if not layer.is_parallel:
            chain.append((f"the feed-forward network behind {layer.place}", layer.joined))
    for (_, before), (place, after) in pairwise(chain):
        require_one_stream(look, before.end, after.stream, place)


def _of_lengths(found: list[Attention], lengths: list[int]) -> list[list[Attention]]:
    """Return the attentions of each layer over the first sequence: over itself, and over the memory if it is the last.

    Args:
        found: all attentions.
        lengths: of this sequence and of those behind it.
    """
    own = [a for a in found if a.hidden.shape[1:] == (lengths[0], lengths[0])]
    if len(lengths) > 1:
        return [[a] for a in own]
    across = [a for a in found if a.hidden.shape[1] == lengths[0] != a.hidden.shape[2]]
    if len(across) != len(own):
        raise PartedError(f"{len(own)} attentions over the target and {len(across)} over the memory were recognised")
    return [list(pair) for pair in zip(own, across, strict=True)]


def _network_behind(look: Look, networks: list[Between], found: list[Attention], last: Attention) -> Between:
    """Return the feed-forward network between one attention and the next."""
    end = min((a.when for a in found if a.when > last.when), default=len(look.seen.values))
    # one may be narrower than the stream; what is narrower and leads elsewhere is a head
    wide = [b for b in networks if b.width >= look.width or b.inner == b.outer == look.width]
    here = [b for b in wide if last.when < b.when < end]
    if not here:
        require_no_number(look, last.when, end, last.place or "the model")
    if len(here) != 1:
        raise PartedError(
            f"{last.place or 'the model'}: {len(here)} feed-forward networks were recognised behind it, where the "
            "textbook has one"
        )
    return here[0]


def _layer(look: Look, sites: list[Attention], network: Between) -> Layer:
    """Return one layer of its attentions and its feed-forward network."""
    up_product, up = look.source(network.first, f"the feed-forward network in {network.place}")
    gate = look.source(network.other, f"the gate in {network.place}")[1] if network.other else None
    product = look.products[network.when]
    down = look.map_of(
        product, range(look.width), biased(look.seen, product.when), f"the second map of {network.place}"
    )
    if network.odd:
        raise NumberError(f"the activation in {network.place} is {network.activation} {network.odd}")
    if gate is not None:
        up, gate = gate, up  # the activation stands on the gate
    last = (product, up_product.left, network.place)
    made = [_attending(look, site) for site in sites]
    both = [(out, attending.query.taken, attending.place) for attending, out in made]
    try:
        around, is_parallel = [joined(look, *one) for one in (*both, last)], False
        for one, (_, _, place) in zip(around, both, strict=False):
            if one.placement != around[-1].placement:
                raise MixedError(f"{place} is {one.placement}-LN, and {network.place} is {around[-1].placement}-LN")
    except NumberError:
        raise
    except PartedError:
        beside = side_by_side(look, (*both, last)) if len(both) == 1 else None
        if beside is None:
            raise
        around, is_parallel = beside, True
    for (attending, _), one in zip(made, around, strict=False):
        attending.joined = one
    return Layer([a for a, _ in made], network.activation, up, gate, down, around[-1], is_parallel)


def _attending(look: Look, seen: Attention) -> tuple[Attending, Product]:
    """Return an attention with its projections, not joined to the stream as yet, and its last map."""
    place = seen.place or "the model"
    seen, query, key = sides(look, seen)
    value, _ = map_of_heads(look, seen.value_from, f"the values of {place}")
    if any(v is None or abs(v.factor - 1) > 1e-6 for v in seen.value_from):
        raise NumberError(f"the values of {place} are multiplied by something")
    if bool(seen.misfit.isnan().any()):
        raise PartedError(f"a head of {place} gives all weight to one key, so that its scores tell nothing")
    if not bool((seen.misfit <= 2 * look.limit).all()):
        raise PartedError(f"the weights of {place} are not the softmax of its scores")
    factors = [s for s in seen.scale if s is not None]
    if len(factors) < len(seen.query_from) or max(factors) - min(factors) > 1e-5 * max(factors):
        raise PartedError(f"the heads of {place} do not have one scale")
    product = projection_of(look.seen, seen)
    if product is None:
        raise PartedError(f"what the heads of {place} give goes into no linear map, head by head")
    what = f"the output projection of {place}"
    output = look.map_of(product, range(product.output.shape[-1]), biased(look.seen, product.when), what)
    unknown = Joined({}, query.taken, product.output)
    return Attending(place, query, key, value, output, factors[0], seen, unknown), product


def _embedding(
    look: Look, tokens: Tensor, first: Tensor, *, with_extras: bool
) -> tuple[Tensor | None, float, Tensor, Tensor]:
    """Return the table, its factor, what positions add, and tokens that stand before all others.

    So that `first = [extras, factor table[tokens] + added[t]]`.
    """
    batch, length = tokens.shape[:2]
    lookup = next((u for u in look.seen.lookups if _holds(u.rows, tokens)), None)
    if lookup is None and not tokens.is_floating_point():
        raise PartedError("no table is looked up by the tokens")
    table = None if lookup is None else lookup.table.double().cpu()
    rows = tokens.double().cpu() if table is None else table[tokens.cpu()]
    if rows.shape[-1] != look.width:
        raise PartedError(f"rows of {rows.shape[-1]} numbers are looked up, and the stream has {look.width}")
    before, left = divmod(first.numel() - rows.numel(), batch * look.width)
    if left or before < 0 or (before and not with_extras):
        raise PartedError("the stream has more positions than there are tokens")
    x = first.double().reshape(batch * (before + length), -1)
    size = look.limit * float(x.abs().amax())
    orders = (x.unflatten(0, (batch, -1)), x.unflatten(0, (-1, batch)).transpose(0, 1))
    for extras, stream in (whole.split([before, length], 1) for whole in orders):
        moved, given = stream - stream.mean(0), rows - rows.mean(0)
        factor = float((moved * given).sum() / given.square().sum())
        added = (stream - factor * rows).mean(0)
        is_alike = not before or float((extras - extras[0]).abs().amax()) <= size
        if is_alike and float((stream - factor * rows - added).abs().amax()) <= size:
            return table, factor, added, extras[0]
    raise PartedError("what enters the first layer is not the tokens' rows and something for each position")


def _holds(rows: Tensor, tokens: Tensor) -> bool:
    return any(rows.shape == t.shape and bool((rows == t).all()) for t in (tokens, tokens.mT, tokens.flatten()))


def _output(look: Look) -> tuple[Map | None, Tensor]:
    """Return the map to the vocabulary or the classes, and what it is given."""
    last = look.seen.products[-1]
    if last.when in look.sums:
        return None, look.result
    for norm in look.norms:  # whatever is done to what the map gives
        if norm.made.numel() == last.left.numel() and norm.made.shape[-1] == last.left.shape[-1]:
            share = look.multiple(last.left, norm.made)
            if share is not None:
                return _scaled(look, last, share), norm.made
    if look.same(biased(look.seen, last.when), look.result):
        return _scaled(look, last, 1.0), last.left
    if (factor := look.multiple(look.result, biased(look.seen, last.when))) is not None:
        raise NumberError(f"what the last map gives is multiplied by {factor:.6g}")
    return None, look.result


def _scaled(look: Look, last: Product, factor: float) -> Map:
    """Return the map to the vocabulary; T5 divides what it is given by sqrt(d_model) where it is tied."""
    what = "the map to the outputs"
    if min(abs(factor - 1), abs(factor * look.width**0.5 - 1)) > 1e-5:
        raise NumberError(f"what {what} is given is multiplied by {factor:.6g}")
    own = look.map_of(last, range(last.output.shape[-1]), biased(look.seen, last.when), what)
    return Map(own.weight * factor, own.bias)


def _closing(look: Look, layers: list[Layer], end: Tensor) -> NormRole | None:
    """Return the norm behind the last layer, whose output is the end of the stack; None where there is none."""
    last = next((n for n in reversed(look.norms) if look.same(n.made, end)), None)
    own = layers[-1].joined
    if last is not None and look.same(last.given, own.end):
        return role_of(look, last)
    if look.same(own.end, end):
        return None
    factors = [look.multiple(end, own.end), None if last is None else look.multiple(last.given, own.end)]
    if told := [f for f in factors if f is not None]:
        raise NumberError(f"what the last layer gives is multiplied by {told[0]:.6g}")
    raise PartedError("what comes out of its stack is neither what the last layer gives nor a norm of it")
