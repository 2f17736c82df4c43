"""What the sublayers of a model take, and what their sums add it to: whether the norm stands before or behind them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, followed
from veriformer.properties.anatomy.feed_forward import between_linear_maps, map_behind
from veriformer.properties.anatomy.norms import ends_of, kind_between, norm_calls, taken_before
from veriformer.properties.anatomy.residual import is_added, residual_sums, turned_rows
from veriformer.properties.anatomy.sources import Head, same_tokens
from veriformer.properties.anatomy.traced import Product, Traced


@dataclass(frozen=True)
class Placed:
    """One sublayer.

    Attributes:
        place: path of the module that computes its last map.
        norm: "pre" where it takes the stream through a norm, "post" where it takes the stream as it is; "" elsewhere.
    """

    place: str
    norm: str


def sublayers(seen: Traced, width: int) -> list[Placed]:
    """Return the sublayers of a forward whose sums are recognised, in order."""
    found: list[Placed] = seen.once(("sublayers", width), lambda: _sublayers(seen, width))
    return found


def _sublayers(seen: Traced, width: int) -> list[Placed]:
    sums = {s.product: s for s in residual_sums(seen, width)}
    taken = dict(_taken(seen))
    found: list[Placed] = []
    for product, one in sums.items():
        if product not in taken:
            continue
        streams = streams_before(seen, product, one.when)
        place = _place(seen, taken[product], streams)
        if place == "post" and _is_normed_embedding(seen, taken[product]):
            place = ""  # the first layer needs no norm of its own there
        found.append(Placed(one.place, place))
    return found


def biased(seen: Traced, product: int) -> Tensor:
    """Return what a map gave, `seen.values[product]`, with the bias that is added next, where one is."""
    output = seen.values[product].output
    for value in seen.values[product + 1 : product + 3]:
        if value.name == "add" and value.output.numel() == output.numel():
            rest = (value.output.double().reshape(output.shape) - output.double()).flatten(0, -2)
            if float((rest - rest[:1]).abs().amax()) <= seen.limit * float(value.output.abs().amax()):
                return value.output
    return output


def streams_before(seen: Traced, product: int, total: int) -> list[Tensor]:
    """Return what a sum, `seen.values[total]`, adds a map's output to: its tokens in either order of their axes."""
    summed = seen.values[total].output
    branch = biased(seen, product).double().reshape(-1)
    return [(summed.double().reshape(-1) - b).reshape(summed.shape) for b in (branch, *turned_rows(branch, summed))]


def _is_normed_embedding(seen: Traced, taken: Tensor) -> bool:
    """Whether tokens are what a norm gave before any linear map."""
    first = min((p.when for p in seen.products), default=0)
    return any(n.when <= first and same_tokens(n.made, taken, seen.batch, seen.limit) for n in norm_calls(seen))


def _place(seen: Traced, taken: Tensor, streams: list[Tensor]) -> str:
    if any(same_tokens(taken, stream, seen.batch, seen.limit) for stream in streams):
        return "post"
    before = [n.given for n in norm_calls(seen) if same_tokens(n.made, taken, seen.batch, seen.limit)]
    is_behind = any(same_tokens(x, stream, seen.batch, seen.limit) for x in before for stream in streams)
    return "pre" if is_behind else ""


def _taken(seen: Traced) -> Iterator[tuple[int, Tensor]]:
    """Yield the last map of each sublayer, by the number of its output, and what its first map takes."""
    products = {p.when: p for p in seen.products}
    for between in between_linear_maps(seen):
        first = map_behind(products, seen, between.first.when)
        if first is not None:
            yield between.when, first.left
    for attention in followed(seen):
        query = next((map_behind(products, seen, h.when) for h in attention.query_from if h is not None), None)
        out = projection_of(seen, attention)
        if query is not None and out is not None:
            yield out.when, query.left


def norms_in_code(seen: Traced, width: int) -> list[tuple[str, str]]:
    """Return the norms that no module is, each as the path of the sublayer before which it stands, and its kind.

    What a sublayer takes is held to the stream that it is added to (pre-LN), and to the sum before (post-LN); what is
    given out, or taken by the map that gives it, to the last sum.
    """
    found: list[tuple[str, str]] = seen.once(("norms in code", width), lambda: _norms_in_code(seen, width))
    return found


def _norms_in_code(seen: Traced, width: int) -> list[tuple[str, str]]:
    sums, places = {s.product: s for s in residual_sums(seen, width)}, {p.when: p.place for p in seen.products}
    taken, found, totals = dict(_taken(seen)), [], list[Tensor]()
    for product, one in sums.items():
        if product in taken and taken[product].shape[-1] == width:
            given = [*streams_before(seen, product, one.when)[:1], *totals[-1:]]
            is_call = any(same_tokens(n.made, taken[product], seen.batch, seen.limit) for n in norm_calls(seen))
            kinds = [] if is_call else [kind_between(x, taken[product], seen.limit) for x in given]
            found += [(places[product], kind) for kind in kinds if kind][:1]
        totals.append(seen.values[one.when].output)
    if ends := ends_of(seen, width):
        stream, given_out, place = ends
        is_call = any(same_tokens(n.made, given_out, seen.batch, seen.limit) for n in norm_calls(seen))
        if not is_call and (kind := kind_between(stream, given_out, seen.limit)):
            found.append((place or "the output", kind))
    return found


def without_stream(seen: Traced, width: int) -> list[tuple[str, str]]:
    """Return the sublayers that hand on what they made alone, where others of the model add it to the stream.

    Each as its path, and that of one of the same name in another layer, or of the sublayer before where those of the
    name do so in all layers. Where no sublayer adds, nothing is found: a model may have no residual connections, or
    sums of a form that is not known.
    """
    added = {s.product for s in residual_sums(seen, width)}
    places = {p.when: p.place for p in seen.products}
    alike: dict[str, list[int]] = {}
    for when, _ in _taken(seen):
        alike.setdefault(re.sub(r"\d+", "*", places[when]), []).append(when)
    return [
        (places[when], places[other])
        for group in alike.values()
        for other in [w for w in group if w in added][:1] or _sum_before(seen, group, added, width)
        for when in group
        if when not in added and places[when] != places[other] and _goes_on_alone(seen, when)
    ]


def _sum_before(seen: Traced, group: list[int], added: set[int], width: int) -> list[int]:
    """Return the last sublayer that adds to the stream before the second of a name of which none does.

    A map between two parts of a model (from an encoder to its decoder, say) is there once, and another width's is none
    of the stream.
    """
    if len(group) < 2 or any(seen.values[when].output.shape[-1] != width for when in group):
        return []
    return sorted(when for when in added if min(group) < when < max(group))[-1:]


def older_streams(seen: Traced, width: int) -> list[tuple[str, str]]:
    """Return the sublayers whose sum adds to what the sum before had added to, though they take what that gave.

    Each as its path, and that of the sublayer before. Sublayers side by side take one stream, to which both are added.
    """
    sums, places = {s.product: s for s in residual_sums(seen, width)}, {p.when: p.place for p in seen.products}
    taken, norms = dict(_taken(seen)), norm_calls(seen)

    def is_one(x: Tensor, y: Tensor) -> bool:
        return same_tokens(x, y, seen.batch, seen.limit)

    found = []
    for before, here in pairwise(product for product in sums if product in taken):
        total = seen.values[sums[before].when].output
        gives = [total, *(n.made for n in norms if is_one(n.given, total))]
        if any(is_one(taken[here], x) for x in gives):
            now, past = (streams_before(seen, p, sums[p].when) for p in (here, before))
            if any(is_one(x, y) for x in now for y in past) and not any(is_one(x, y) for x in now for y in gives):
                found.append((places[here], places[before]))
    return found


def past_their_norm(seen: Traced) -> list[tuple[str, str]]:
    """Return the sublayers whose first map takes what a norm takes, and not what one gives, beside that norm's path.

    In a parallel layer the norm stands before both halves: one of them may be handed the stream as it is.
    """
    norms, places = norm_calls(seen), {p.when: p.place for p in seen.products}
    found = []
    for when, taken in _taken(seen):
        alike = [n for n in norms if same_tokens(n.given, taken, seen.batch, seen.limit)]
        if alike and not any(same_tokens(n.made, taken, seen.batch, seen.limit) for n in norms):
            found.append((places[when], alike[0].place))
    return found


def _goes_on_alone(seen: Traced, product: int) -> bool:
    """Whether a norm, or a linear map, takes what a map gave and nothing besides.

    What a norm makes of it may be added to the stream: the norm stands behind the sublayer there, and before the sum.
    """
    made, place = biased(seen, product), next(p.place for p in seen.products if p.when == product)
    later = [p.left for p in seen.products if p.when > product]
    later += [n.given for n in norm_calls(seen) if n.when > product]
    behind = [n for n in norm_calls(seen) if same_tokens(n.given, made, seen.batch, seen.limit)]
    if behind and any(is_added(seen, n.made, product, n.when, place) for n in behind):
        return False
    given = [n.made for n in behind] or [made]
    return any(same_tokens(x, one, seen.batch, seen.limit) for x in later for one in given)


def projection_of(seen: Traced, attention: Attention) -> Product | None:
    """Return the map that takes what the heads of an attention gave, one behind another."""
    merged = (attention.weights @ attention.value).transpose(1, 2).flatten(2)
    later = (p for p in seen.products if p.when >= attention.when)
    return next((p for p in later if same_tokens(p.left, merged, seen.batch, seen.limit)), None)


def scrambled_merges(seen: Traced) -> list[str]:
    """Return the attentions whose heads `[B, H, T, E]` are read as `[B, T, H E]` as they lie in memory, by path.

    The axes of heads and positions are to change places first: else a token gets channels of others.
    """
    odd = []
    for attention in followed(seen):
        out = attention.weights @ attention.value
        if out.shape[1] < 2 or projection_of(seen, attention) is not None:
            continue
        width = out.shape[1] * out.shape[3]
        scrambled = out.reshape(-1, width)
        size = seen.limit * float(out.abs().amax())
        for later in seen.products:
            rows = later.left
            fits = later.when > attention.when and rows.numel() == out.numel() and rows.shape[-1] == width
            if fits and float((rows.cpu().double().reshape(-1, width) - scrambled).abs().amax()) <= size:
                odd.append(attention.place)
                break
    return odd


def unlike_keys_and_values(seen: Traced) -> list[str]:
    """Return the attentions whose keys are made of other tokens than their values, by path."""
    products = {p.when: p for p in seen.products}

    def makers(heads: list[Head | None]) -> list[Tensor]:
        found = (map_behind(products, seen, h.when) for h in heads if h is not None)
        return next((taken_before(p.left, seen.products, seen.limit) for p in found if p is not None), [])

    odd = []
    for attention in followed(seen):
        keys, values = makers(attention.key_from), makers(attention.value_from)
        alike = (same_tokens(k, v, seen.batch, seen.limit) for k in keys for v in values)
        if keys and values and not any(alike):
            odd.append(attention.place)
    return odd


def not_normalised(seen: Traced) -> list[str]:
    """Return the attentions whose queries, or keys, are what their projection gave, at most turned and scaled."""
    return [
        a.place
        for a in followed(seen)
        if all(h is not None for h in a.query_from) or all(h is not None for h in a.key_from)
    ]


def dealt_in_turns(seen: Traced) -> list[str]:
    """Return the attentions whose groups of keys are dealt to the heads in turns (0 1 0 1), not in blocks (0 0 1 1)."""
    odd = []
    for attention in followed(seen):
        starts = [(h.when, h.start) for h in attention.key_from if h is not None]
        order = sorted(set(starts))
        ranks = [order.index(s) for s in starts]
        if len(ranks) == len(attention.key_from) and 1 < len(order) < len(ranks) and ranks != sorted(ranks):
            odd.append(attention.place)
    return odd
