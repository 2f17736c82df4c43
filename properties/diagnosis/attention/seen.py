"""Which keys an attention really sees, against those that its masks allow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from veriformer.properties.diagnosis.attention.weights import Read

_NOTHING = 1e-30  # a visible key may have a small weight, a hidden one has none


def seen(read: Read) -> str | None:
    """Say which keys are seen that are not to be, or are not seen; None if all that is allowed is seen, and no more."""
    own, right = read.own, read.right
    rows = read.allow.any(-1)
    shown = own.abs() > read.slack
    extra, missing = (shown & ~read.allow)[rows], ((own.abs() < _NOTHING) & (right > 1e3 * read.slack))[rows]
    if not bool(extra.any()) and not bool(missing.any()):
        return None
    of = _as_if(read, own)
    if of:
        return of
    if bool(extra.any()) and not bool(missing.any()):
        told = _hidden_scores(read)
        if told:
            return told
    if bool(missing.any()) and not bool(extra.any()):
        return _missing(read, shown)
    if bool(extra.any()) and bool(missing.any()):
        return f"{_extra(read, shown)}, and {_missing(read, shown)}"
    return _extra(read, shown)


def _as_if(read: Read, own: Tensor) -> str | None:
    """Name the other mask under which the weights are right: if one alone fits."""
    found = [words for words, allow in _other_masks(read) if _fits(read, own, allow)]
    return found[0] if len(found) == 1 else None


def _fits(read: Read, own: Tensor, allow: Tensor) -> bool:
    allow = allow.expand(read.scores.shape)
    if torch.equal(allow, read.allow):
        return False
    rows = allow.any(-1) & read.allow.any(-1)
    wanted = read.scores.masked_fill(~allow, -torch.inf).softmax(-1)
    return bool(rows.any()) and read.agrees(own[rows], wanted[rows])


def _other_masks(read: Read) -> Iterator[tuple[str, Tensor]]:
    batch, heads, queries, keys = read.scores.shape
    everything = torch.ones_like(read.allow)
    end = everything.tril(keys - queries)
    if read.mask is None:
        yield "the causal mask is not applied", everything
    else:
        mask = read.mask.expand(read.scores.shape)
        flagged = read.is_causal
        if flagged:
            yield "the mask is forgotten, causality alone is applied", end
            yield "causality is forgotten, the mask alone is applied", mask
            yield (
                "a key is hidden only if both the mask and causality hide it: they are to be combined by AND",
                mask | end,
            )
        yield "neither the mask nor causality is applied" if flagged else "the mask is not applied", everything
        combine = end if flagged else everything
        yield "the mask is inverted: hidden keys are seen and visible ones are not", ~mask & combine
        if queries == keys:
            yield "the mask is transposed: it is read as [S, T]", mask.transpose(-2, -1) & combine
        yield "the mask of the first query is used for all queries", mask[:, :, :1].expand_as(mask) & combine
        for step, words in ((1, "later"), (-1, "earlier")):
            yield (
                f"the mask is shifted: a key is hidden by the entry of the key one {words}",
                mask.roll(-step, -1) & combine,
            )
        if batch == queries > 1:
            rows = mask[:1, :, :, :].clone()
            rows[0] = mask[:, 0, 0][None].expand_as(rows[0])
            yield (
                "the mask [B, S] is read as [T, S] where B = T: query t of every sample gets the mask of sample t",
                rows.expand_as(mask) & combine,
            )
        if batch > 1:
            yield "the mask of the first sample is used for all samples", mask[:1].expand_as(mask) & combine
            yield "a sample's mask is that of another sample: their order is reversed", mask.flip(0) & combine
        if batch > 1 and heads > 1:
            rows = mask[:, 0]
            tiled = torch.stack(
                [torch.stack([rows[(b * heads + h) % batch] for h in range(heads)]) for b in range(batch)]
            )
            yield (
                "heads are masked by the mask of another sample: it is tiled over heads (repeat) where each sample's "
                "is to be repeated for its heads (repeat_interleave)",
                tiled & combine,
            )
    yield from _folded(read)
    if read.is_causal:
        others = everything if read.mask is None else read.mask.expand(read.scores.shape)
        if queries != keys:
            yield (
                "the causal mask is aligned to the top left (the first key), not to the last key",
                everything.tril() & others,
            )
        for step, words in ((1, "each query sees one key ahead"), (-1, "a query does not see its own key")):
            yield f"the causal mask is off by one: {words}", everything.tril(keys - queries + step) & others
        yield (
            "the causal mask is transposed: the past is hidden, the future is seen",
            everything.triu(keys - queries) & others,
        )
        for block in range(2, keys - 1):
            place = torch.arange(keys) % block
            local = place[None] <= torch.arange(queries)[:, None] + keys - queries
            told = f"keys are taken in blocks of {block}, and the causal mask of a block is made from the place in it"
            yield f"{told}: without the block's offset", everything & local & others
        for block in range(2, queries // 2 + 1):
            starts = torch.arange(queries) // block * block
            first = everything.clone()
            last = everything.clone()
            for t in range(queries):
                sizes = min(block, queries - int(starts[t]))
                first[:, :, t] = torch.arange(keys) <= starts[t] + keys - queries
                last[:, :, t] = torch.arange(keys) <= t - starts[t] + keys - sizes
            told = f"queries are taken in blocks of {block}, and the causal mask of a block is"
            yield f"{told} that of its first query", first & others
            yield f"{told} that of the last {block} queries of all: without the block's offset", last & others
            local = everything.clone()
            for t in range(queries):
                local[:, :, t] = torch.arange(keys) <= t - starts[t]
            yield f"{told} made from the place in the block: without the block's offset", local & others


def _folded(read: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield masks whose rows lie in another order than those of queries whose heads are folded into the time axis."""
    _, heads, queries, _ = read.scores.shape
    each = heads // read.weights.shape[4]
    if each < 2 or queries < 2:
        return
    of, at = torch.arange(heads)[:, None] % each, torch.arange(queries)[None]
    told = "where heads that share keys are folded into the queries' axis, queries lie"
    for words, row in (
        (f"{told} head by head and the rows of the mask query by query", (of * queries + at) // each),
        (f"{told} query by query and the rows of the mask head by head", (at * each + of) % queries),
    ):
        rows = read.allow.gather(2, row[None, :, :, None].expand(read.allow.shape))
        yield f"{words}: a query gets the mask of another", rows


def _hidden_scores(read: Read) -> str | None:
    """Say which score hidden keys have in place of -inf: what their weights are beside those of visible keys."""
    own = read.own
    found, raised = [], []
    for row in read.allow.any(-1).nonzero().tolist():
        b, h, t = row
        allow, weights, scores = read.allow[b, h, t], own[b, h, t], read.scores[b, h, t]
        hidden = (~allow & (weights > read.slack)).nonzero().flatten().tolist()
        visible = (allow & (weights > read.slack)).nonzero().flatten().tolist()
        if not visible:
            continue
        level = float((weights[visible].log() - scores[visible]).mean())
        if float((weights[visible].log() - scores[visible] - level).abs().max()) > 1e-5:
            return None  # visible keys are not weighed right either
        for s in hidden:
            found.append(float(weights[s].log()) - level)
            raised.append(found[-1] - float(scores[s]))
    if not found:
        return None
    if max(map(abs, raised)) < 1e-4:
        return _extra(read, own.abs() > read.slack)
    if max(found) - min(found) < 1e-4:
        number = sum(found) / len(found)
        number = 0.0 if abs(number) < 1e-6 else number
        if (cap := read.soft_cap) and abs(number + cap) < 1e-4:
            return f"the soft cap comes behind the mask: it makes -{cap:g} of -inf, and hidden keys keep a weight"
        return f"masked scores are set to {number:.4g} instead of -inf: hidden keys keep a weight"
    if max(raised) - min(raised) < 1e-4:
        number = sum(raised) / len(raised)
        if abs(number + 1) < 1e-6:
            return "the mask is added to the scores as 0 and 1, not as -inf and 0: hidden keys keep a weight"
        return f"to the scores of hidden keys {number:.4g} is added instead of -inf: they keep a weight"
    scaled = [r for r in raised if r < 0]
    return "a hidden key keeps a weight that depends on its score" if len(scaled) == len(raised) else None


def _rows(numbers: list[int]) -> str:
    runs = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [n for _, n in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}")
    return ", ".join(runs)


def _begins_again(seen: Tensor, block: int) -> bool:
    """Whether the queries of every later block see what those of the first see, and these do not all see the same."""
    first = seen[:, :, :block]
    again = [seen[:, :, at : at + block] for at in range(block, seen.shape[2], block)]
    is_one = bool((first == first[:, :, :1]).all())
    return not is_one and all(torch.equal(rows, first[:, :, : rows.shape[2]]) for rows in again)


def _missing(read: Read, shown: Tensor) -> str | None:
    gone = read.allow & (read.own.abs() < _NOTHING) & (read.right > 1e3 * read.slack)
    where = gone.nonzero().tolist()
    rows, keys = sorted({t for _, _, t, _ in where}), sorted({s for _, _, _, s in where})
    who = _who(rows, read.scores.shape[2])
    if (block := rows[0]) > 1 and _begins_again(shown & read.allow, block):
        return (
            f"query {block} sees what query 0 sees, and so on: in every block of {block} queries they are counted from "
            "0, so that the causal mask begins anew"
        )
    if not any(bool((shown & read.allow)[b, h, t, s + 1 :].any()) for b, h, t, s in where):
        most = int(gone.sum(-1).max())
        many = "the last key that may be seen" if most == 1 else f"up to {most} of the last keys that may be seen"
        gets = "gets" if most == 1 else "get"
        told = f"{many} (of keys {_rows(keys)}) {gets} no weight from {who}: the keys end too early"
        queries, first = read.scores.shape[2], keys[0]
        behind = bool((gone == read.allow & (torch.arange(gone.shape[-1]) >= first)).all())
        if behind and queries > first and queries == gone.shape[-1]:
            told += (
                f"; no query sees a key from {first} on, not even those that stand there: a block of queries skips the "
                "tiles that its first query does not reach, where its last one does"
            )
        elif behind and queries <= first and not bool(read.allow.all()):
            told += (
                f"; no query sees a key from {first} on, and no key before is lost: what lies behind the {queries} "
                "queries is skipped as if query i stood at key i (top-left), where the mask lets it see up to key "
                "i + S - T"
            )
        return told
    return f"keys {_rows(keys)} get no weight from {who}, though nothing hides them"


def _extra(read: Read, shown: Tensor) -> str | None:
    where = (shown & ~read.allow).nonzero().tolist()
    rows, keys = sorted({t for _, _, t, _ in where}), sorted({s for _, _, _, s in where})
    ahead = read.is_causal and read.mask is None
    step = max(s - t for _, _, t, s in where) - (read.scores.shape[3] - read.scores.shape[2])
    far = f", up to {step} ahead" if ahead else ""
    return f"{_who(rows, read.scores.shape[2])} sees keys that are hidden from it (of keys {_rows(keys)}{far})"


def _who(rows: list[int], of: int) -> str:
    """Return which queries: `query 1`, `each of queries 2 to 4`, `every query`."""
    if len(rows) == of:
        return "every query"
    return f"query {rows[0]}" if len(rows) == 1 else f"each of queries {_rows(rows)}"
