"""Which of a model's parameters play which role of the textbook's model, told by what flows through them.

Every map is found by the numbers that it takes and gives in one forward, so that names, packing and order do not
matter; its weights are the very parameters. Where something flows otherwise than in the textbook, there the two part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from veriformer.properties.anatomy.attention import Attention, attentions
from veriformer.properties.anatomy.feed_forward import Between, Source, between_linear_maps, map_behind
from veriformer.properties.anatomy.norms import NormCall, held, measured_gain, normalised
from veriformer.properties.anatomy.sources import Head
from veriformer.properties.anatomy.sublayers import biased, projection_of, streams_before
from veriformer.properties.anatomy.traced import Product, Traced
from veriformer.properties.twin.looking import Look
from veriformer.properties.twin.parts import Attending, Layer, Map, NormRole, NumberError, PartedError, Roles, StackRole


def roles(module: nn.Module, seen: Traced, tokens: Sequence[Tensor], width: int, result: Tensor) -> Roles:
    """Return what a model is made of, if that is what the textbook's is.

    Args:
        module: the model.
        seen: the trace of a forward.
        tokens: `[B, T]` that it was given, or embeddings `[B, T, D]`; of two sequences, of other lengths, the source's
            first.
        width: D.
        result: `[B, T, *]` that it gave.

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
    for given, own in zip(tokens, grouped, strict=True):
        if not own:
            raise PartedError("no attention of one of its sequences over itself could be followed")
        layers = [_layer(look, sites, _network_behind(look, networks, found, sites[-1])) for sites in own]
        made.append((given, own, layers))
    output, taken = _output(look)
    stacks = []
    for number, (given, own, layers) in enumerate(made):
        first = _entering(look, layers[0], own[0][0])
        entering = next((n for n in look.norms if look.same(n.made, first)), None)
        table, scale, added = _embedding(look, given, first if entering is None else entering.given)
        norm = None if entering is None else _norm(look, entering)
        end = taken if number == len(made) - 1 else _memory(look, made[-1][1])
        stacks.append(StackRole(table, scale, added, norm, layers, _closing(look, layers, end)))
    return Roles(stacks, output)


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


def _memory(look: Look, decoder: list[list[Attention]]) -> Tensor:
    """Return what the keys over the memory are made of."""
    head = next(h for h in decoder[0][-1].key_from if h is not None)
    product = map_behind(look.products, look.seen, head.when)
    if product is None:
        raise PartedError("the keys of the memory come from no linear map")
    return product.left


def _network_behind(look: Look, networks: list[Between], found: list[Attention], last: Attention) -> Between:
    """Return the feed-forward network between one attention and the next."""
    end = min((a.when for a in found if a.when > last.when), default=len(look.seen.values))
    here = [b for b in networks if last.when < b.when < end and b.width >= look.width]
    if len(here) != 1:
        raise PartedError(
            f"{last.place or 'the model'}: {len(here)} feed-forward networks were recognised behind it, where the "
            "textbook has one"
        )
    return here[0]


def _layer(look: Look, sites: list[Attention], network: Between) -> Layer:
    """Return one layer of its attentions and its feed-forward network."""
    both = [_attending(look, site) for site in sites]
    up_product, up = look.source(network.first, f"the feed-forward network in {network.place}")
    gate = look.source(network.other, f"the gate in {network.place}")[1] if network.other else None
    product = look.products[network.when]
    down = look.map_of(
        product, range(look.width), biased(look.seen, product.when), f"the second map of {network.place}"
    )
    norm, placement = _norm_around(look, product, up_product.left, network.place)
    for attending, other in both:
        if other != placement:
            raise PartedError(f"{attending.place} is {other}-LN, and {network.place} is {placement}-LN")
    if gate is not None:
        up, gate = gate, up  # the activation stands on the gate
    return Layer([a for a, _ in both], network.activation, up, gate, down, norm, placement)


def _attending(look: Look, seen: Attention) -> tuple[Attending, str]:
    """Return an attention with its projections, and where its norm stands."""
    place = seen.place or "the model"
    query, into = _heads(look, seen.query_from, f"the queries of {place}")
    key, _ = _heads(look, _groups(seen.key_from), f"the keys of {place}")
    value, _ = _heads(look, _groups(seen.value_from), f"the values of {place}")
    if any(v is None or abs(v.factor - 1) > 1e-6 for v in seen.value_from):
        raise NumberError(f"the values of {place} are multiplied by something")
    if not bool((seen.misfit <= 2 * look.limit).all()):
        raise PartedError(f"the weights of {place} are not the softmax of its scores")
    factors = [s for s in seen.scale if s is not None]
    if len(factors) < len(seen.query_from) or max(factors) - min(factors) > 1e-5 * max(factors):
        raise PartedError(f"the heads of {place} do not have one scale")
    output, out = _projected(look, seen)
    norm, placement = _norm_around(look, out, into, place)
    return Attending(place, query, key, value, output, factors[0], seen, norm), placement


def _groups(heads: list[Head | None]) -> list[Head | None]:
    """Return the sources of heads, each once."""
    found: list[Head | None] = []
    for head in heads:
        if head is None or not any(h is not None and (h.when, h.start) == (head.when, head.start) for h in found):
            found.append(head)
    return found


def _heads(look: Look, heads: list[Head | None], what: str) -> tuple[Map, Tensor]:
    """Return the map of all heads, and what it takes."""
    weights, biases, taken = [], [], []
    for head in heads:
        if head is None:
            raise PartedError(f"{what} do not come from a linear map alone")
        product, own = look.source(Source(head.when, head.channels), what)
        weights.append(own.weight)
        biases.append(own.bias if own.bias is not None else torch.zeros(len(own.weight), dtype=torch.float64))
        taken.append(product.left)
    bias = torch.cat(biases)
    return Map(torch.cat(weights), bias if bool(bias.any()) else None), taken[0]


def _projected(look: Look, attention: Attention) -> tuple[Map, Product]:
    """Return the map that takes what the heads gave, one behind another."""
    place = attention.place or "the model"
    product = projection_of(look.seen, attention)
    if product is None:
        raise PartedError(f"what the heads of {place} give goes into no linear map, head by head")
    what = f"the output projection of {place}"
    return look.map_of(product, range(product.output.shape[-1]), biased(look.seen, product.when), what), product


def _norm_around(look: Look, product: Product, taken: Tensor, what: str) -> tuple[NormRole, str]:
    """Return the norm of a sublayer and its place.

    Args:
        look: the forward.
        product: the sublayer's last map.
        taken: what its first map takes.
        what: the sublayer in words.
    """
    total = look.sums.get(product.when)
    if total is None:
        raise PartedError(f"what {what} gives is not added to the stream")
    if max(abs(total.stream - 1), abs(total.branch - 1)) > 1e-5:
        raise NumberError(
            f"behind {what} the stream is taken {total.stream:.6g} times and the sublayer {total.branch:.6g} times"
        )
    summed = look.seen.values[total.when].output
    streams = streams_before(look.seen, product.when, total.when)
    for norm in look.norms:
        if look.same(norm.made, taken) and any(look.same(norm.given, stream) for stream in streams):
            return _norm(look, norm), "pre"
    for norm in look.norms:
        if look.same(norm.given, summed):
            return _norm(look, norm), "post"
    raise PartedError(f"no norm stands before {what}, and none behind it")


def _norm(look: Look, call: NormCall) -> NormRole:
    """Return a norm's gain and bias: its own parameters, or 1 more than the gain that it keeps."""
    if not call.kind:
        raise PartedError(f"{call.place} is neither LayerNorm nor RMSNorm")
    width = call.given.shape[-1]
    gain, (own, _) = measured_gain(call), held(call)
    plain = normalised(call.given, call.kind, call.eps).reshape(-1, width)
    bias = (call.made.reshape(-1, width) - gain * plain).mean(0)
    if not any(float((gain - k).abs().amax()) <= 1e2 * look.limit * float(k.abs().amax()) for k in (own, 1 + own)):
        told = f"the gain of {call.place} is not the parameter that it keeps"
        share = gain / own
        is_multiple = float((share - share.mean()).abs().amax()) <= 1e-3  # another formula: the variance by d - 1, say
        has_its_own = any(p.shape == (width,) for p in call.part.parameters()) and not is_multiple
        raise NumberError(told) if has_its_own else PartedError(told)
    return NormRole(call.kind, gain, bias, call.eps, call.when)


def _entering(look: Look, layer: Layer, attention: Attention) -> Tensor:
    """Return the stream that enters the first layer, `[B, T, D]`."""
    head = next(h for h in attention.query_from if h is not None)
    product = map_behind(look.products, look.seen, head.when)
    assert product is not None
    if layer.placement == "post":
        return product.left
    return next(n.given for n in look.norms if look.same(n.made, product.left))


def _embedding(look: Look, tokens: Tensor, first: Tensor) -> tuple[Tensor | None, float, Tensor]:
    """Return the table, its factor, and what positions add: `first = factor table[tokens] + added[t]`."""
    batch, length = tokens.shape[:2]
    lookup = next((u for u in look.seen.lookups if _holds(u.rows, tokens)), None)
    if lookup is None and not tokens.is_floating_point():
        raise PartedError("no table is looked up by the tokens")
    table = None if lookup is None else lookup.table.double().cpu()
    rows = tokens.double().cpu() if table is None else table[tokens.cpu()]
    if rows.shape[-1] != look.width:
        raise PartedError(f"rows of {rows.shape[-1]} numbers are looked up, and the stream has {look.width}")
    if first.numel() != rows.numel():
        raise PartedError("the stream has more positions than there are tokens")
    x = first.double().reshape(batch * length, -1)
    for stream in (x.unflatten(0, (batch, length)), x.unflatten(0, (length, batch)).transpose(0, 1)):
        moved, given = stream - stream.mean(0), rows - rows.mean(0)
        factor = float((moved * given).sum() / given.square().sum())
        added = (stream - factor * rows).mean(0)
        if float((stream - factor * rows - added).abs().amax()) <= look.limit * float(stream.abs().amax()):
            return table, factor, added
    raise PartedError("what enters the first layer is not the tokens' rows and something for each position")


def _holds(rows: Tensor, tokens: Tensor) -> bool:
    return any(rows.shape == t.shape and torch.equal(rows, t) for t in (tokens, tokens.mT, tokens.flatten()))


def _output(look: Look) -> tuple[Map | None, Tensor]:
    """Return the map to the vocabulary, and the hidden states that it is given."""
    last = look.seen.products[-1]
    if last.when in look.sums:
        return None, look.result
    for norm in look.norms:  # whatever is done to what the map gives
        if norm.made.numel() == last.left.numel() and norm.made.shape[-1] == last.left.shape[-1]:
            factor = float(last.left.double().norm() / norm.made.norm())
            if look.same(factor * norm.made, last.left):
                return _scaled(look, last, factor), norm.made
    if look.same(biased(look.seen, last.when), look.result):
        return _scaled(look, last, 1.0), last.left
    return None, look.result


def _scaled(look: Look, last: Product, factor: float) -> Map:
    """Return the map to the vocabulary; T5 divides what it is given by sqrt(d_model) where it is tied."""
    what = "the map to the vocabulary"
    if min(abs(factor - 1), abs(factor * look.width**0.5 - 1)) > 1e-5:
        raise NumberError(f"what {what} is given is multiplied by {factor:.6g}")
    own = look.map_of(last, range(last.output.shape[-1]), biased(look.seen, last.when), what)
    return Map(own.weight * factor, own.bias)


def _closing(look: Look, layers: list[Layer], end: Tensor) -> NormRole | None:
    """Return the norm behind the last layer, whose output is the end of the stack."""
    last = next((n for n in reversed(look.norms) if look.same(n.made, end)), None)
    if last is not None:
        found = _norm(look, last)
        is_its_own = layers[0].placement == "post" and found.when == layers[-1].norm.when
        return None if is_its_own else found
    if layers[0].placement == "post":
        return None
    raise PartedError("no norm closes the pre-LN stack")
