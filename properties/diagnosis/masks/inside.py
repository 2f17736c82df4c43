"""The masks of the attentions inside a whole model: what they should hide, and how they differ from that."""

from __future__ import annotations

import torch
from torch import Tensor

from veriformer.properties.anatomy.attention import Attention, attentions, followed
from veriformer.properties.anatomy.flow import Flow, flow_aside
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation

_FEW = 3  # distances that are told one by one


def mask_opinion(case: Case, problem: Violation) -> str | None:
    """Name what is wrong with the first mask that hides something and not what it should: a leak seen from inside."""
    del problem
    flowing = flow_aside(case)
    for attention in followed(flowing.seen):
        allowed = allowed_in(flowing, attention)
        if allowed is None or not bool(attention.hidden.any()):
            continue
        if not bool((~attention.hidden & ~allowed).any()):
            continue
        told = mask_cause(attention.hidden, allowed, attention.place or "the model")
        return None if told and "the causal mask in" in told else told  # the map of influence shows that, and its line
    return None


def allowed_in(flowing: Flow, attention: Attention) -> Tensor | None:
    """Return `[T, S]`: what may be seen in an attention; None where it is over something else than the sequences."""
    subject = flowing.case.subject
    _, queries, keys = attention.hidden.shape
    if (queries, keys) == (flowing.length, flowing.length):
        if not subject.fact("causal"):  # what a two-sided window hides is declared in no one way
            return None if subject.declares.get("window") else torch.ones(queries, keys, dtype=torch.bool)
        reaches = (subject.declares.get("window") or 0) < flowing.length
        window = subject.fact("window") if reaches else None  # a longer one hides nothing here, and is not verified
        return causal_region(flowing.length, window, subject.fact("prefix"), subject.fact("sink_tokens", 0))
    if flowing.other and queries in (flowing.length, flowing.other) and keys == flowing.other:
        return torch.ones(queries, keys, dtype=torch.bool)
    return None


def mask_cause(hidden: Tensor, allowed: Tensor, place: str) -> str | None:
    """Say how the mask of an attention differs, where all its heads do so alike."""
    if not bool((hidden == hidden[:1]).all()):
        wrong = [str(h) for h in range(len(hidden)) if not torch.equal(hidden[h], ~allowed)]
        return f"the mask of head {', '.join(wrong)} in {place} is another one than that of the others"
    own, length = hidden[0], hidden.shape[-1]
    if not bool(own.any()):
        return f"no mask hides anything in {place}"
    if own.shape[0] != own.shape[1]:
        return _over_another(own, allowed, place)
    if torch.equal(own, torch.ones_like(own).triu(1)):
        return f"a causal mask hides the later keys in {place}"
    rest = own & ~torch.eye(length, dtype=torch.bool)
    if torch.equal(rest, ~allowed) and int((own & ~rest).sum()) >= length - 1:
        return f"queries do not see themselves in {place}"
    for shift in (-2, -1, 1, 2):
        if torch.equal(own, torch.ones_like(own).triu(1 + shift)):
            way = "later" if shift > 0 else "earlier"
            return f"the causal mask in {place} begins {abs(shift)} {way} than behind the query itself"
    for window in range(1, length):
        if torch.equal(own, ~causal_region(length, window)):
            return f"in {place} queries see the last {window} keys alone, themselves among them"
    return _diagonals(own, allowed, place) or _rows(own, allowed, place)


def _rows(own: Tensor, allowed: Tensor, place: str) -> str | None:
    """Say which queries alone see keys that they must not, or which keys alone are seen by queries that must not."""
    more = ~own & ~allowed
    if bool((own & allowed).any()) or not bool(more.any()):
        return None
    later = more == torch.ones_like(more).triu(1) & ~allowed
    rows = [int(t) for t in more.any(1).nonzero().flatten()]
    if len(rows) * 2 < len(own) and all(bool(later[t].all()) for t in rows):
        return f"in {place} {_run('query', 'queries', rows)} every later key too, all others the past alone"
    columns = [int(s) for s in more.any(0).nonzero().flatten()]
    if len(columns) * 2 < len(own):
        return f"in {place} {_run('key', 'keys', columns, 'is seen', 'are seen')} by earlier queries too, no other is"
    return None


def _run(one: str, many: str, places: list[int], verb: str = "sees", verbs: str = "see") -> str:
    if len(places) == 1:
        return f"{one} {places[0]} {verb}"
    return f"{many} {', '.join(map(str, places))} {verbs}"


def all_masks_are_right(case: Case) -> bool:
    """Whether every attention of a model could be followed, and hides just what the declared mask hides."""
    flowing = flow_aside(case)
    known = attentions(flowing.seen)
    if not known or len(known) != len(followed(flowing.seen)):
        return False
    pairs = [(a.hidden, allowed_in(flowing, a)) for a in known]
    return all(allowed is not None and bool((hidden == ~allowed).all()) for hidden, allowed in pairs)


def hidden_from_some(case: Case) -> str | None:
    """Name what is wrong with a mask over another sequence that hides more from some queries than from others."""
    flowing = flow_aside(case)
    for attention in followed(flowing.seen):
        allowed = allowed_in(flowing, attention)
        if allowed is None or allowed.shape[0] == allowed.shape[1] or not bool((attention.hidden & allowed).any()):
            continue
        if bool((attention.hidden != attention.hidden[:, :1]).any()):
            return mask_cause(attention.hidden, allowed, attention.place or "the model")
    return None


def _over_another(own: Tensor, allowed: Tensor, place: str) -> str | None:
    """Say what a mask hides of another sequence, `[T, S]`."""
    queries, keys = own.shape
    for shift, end in ((0, "first"), (keys - queries, "last")):
        if torch.equal(own, torch.ones_like(own).triu(1 + shift)):
            return (
                f"a causal mask, aligned to the {end} key, hides the other sequence in {place}: query t sees it up to "
                f"position t{f' + {shift}' if shift else ''} alone"
            )
    wrong = own & allowed
    if bool(wrong.any()) and bool((wrong == wrong[:1]).all()):
        return f"in {place} no query sees {_run('key', 'keys', wrong[0].nonzero().flatten().tolist(), '', '').strip()}"
    return None


def _diagonals(own: Tensor, allowed: Tensor, place: str) -> str | None:
    """Say which distances are hidden, or seen, against the declared mask `[T, T]`, where that is all that differs."""
    told = []
    for which, words in ((own & allowed, "do not see"), (~own & ~allowed, "see")):
        whole = [d for d in range(1 - len(own), len(own)) if len(line := which.diagonal(d)) and bool(line.all())]
        if sum(len(which.diagonal(d)) for d in whole) != int(which.sum()) or len(whole) > _FEW:
            return None
        keys = [f"{abs(d)} {'ahead' if d > 0 else 'before'}" if d else "themselves" for d in whole]
        told += [f"queries {words} the key {' and '.join(keys)}"] * bool(keys)
    return f"in {place} {'; '.join(told)}" if told else None
