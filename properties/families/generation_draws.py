"""Whether tokens are drawn from what generation says that it draws from; part of `decoding.sampling`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case

_MOST = 4096
_NUMBERS = 4_000_000
"""Probabilities of all draws together: as many as a laptop holds twice."""

_LARGE = 2_000_000
"""Parameters of a model that is called on fewer samples."""

_CHANCE = 1e-9
"""Probability with which right draws fail: one run in a thousand million."""

_FITS = 1e-3
_LEAST = 5.0
"""Draws that a token must be expected to have for the statistic; rarer ones are taken together."""


def tokens_are_drawn(case: Case, built: Built, top_k: int | None) -> None:
    """Require that many samples of one prompt get tokens as often as the returned probabilities say (Pearson's chi^2).

    A temperature, where one is taken, makes them uneven. What chooses the same token always, greedily, draws nothing.
    """
    subject = case.subject
    takes = inspect.signature(subject.sampling).parameters if subject.sampling is not None else {}
    size = sum(p.numel() for p in built.module.parameters()) if isinstance(built.module, nn.Module) else 0
    most = min(_MOST, _NUMBERS // max(built.config.vocab_size, 1)) // (1 if size < _LARGE else 16)
    if most < 200 or top_k == 1:
        return
    prompt = case.tokens(1, 3)
    given: dict[str, Any] = {} if top_k is None else {"top_k": top_k}
    if "temperature" in takes:
        with torch.no_grad():
            logits = case.call(built, prompt)[0, -1].detach().double()
        given["temperature"] = max(1e-2, round(float(logits.std()) / 1.5, 3))
    try:
        runs = [case.ask("sampling", prompt.expand(n, -1), 1, built=built, **given) for n in (most, 8)]
    except SubjectError:
        return  # so large a batch, or such a temperature, it does not take
    counts, said = case.apply(drawn_tokens, runs[0])
    if said is None or (int((counts > 0).sum()) < 2 and not bool(_again(runs[1]) != counts.argmax())):
        return
    chance = case.apply(chance_of, counts, said)
    case.require(
        chance > _CHANCE,
        f"{most} samples of one prompt do not draw tokens by the probabilities that are returned",
        got=", ".join(f"token {i}: {int(counts[i])} times" for i in counts.topk(2).indices.tolist()),
        expected=", ".join(f"{float(most * said[i]):.4g} times" for i in counts.topk(2).indices.tolist()),
        cause=lambda: draws_cause(counts, said, _whole(case, built, prompt, given), given.get("temperature", 1.0)),
    )


def _again(run: tuple[Tensor, Tensor]) -> Tensor:
    return run[0][0, -1]


def as_weights(drawn: Tensor) -> Tensor:
    """Return what tokens are drawn from, `[..., V]`, normalised or not: of logits (some are negative) the softmax."""
    wide = drawn.detach().double()
    return wide.softmax(-1) if bool((wide < 0).any()) else wide


def drawn_tokens(run: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return how often each token was drawn, `[V]`, and its probability, `[V]`; None where samples differ in it."""
    text, drawn = run
    said = as_weights(drawn)[:, 0].cpu()
    size = max(int(text.max()) + 1, said.shape[-1])
    counts = torch.bincount(text[:, -1].cpu(), minlength=size)
    is_one = said.shape[-1] == size and float((said - said[:1]).abs().max()) < 1e-4
    return counts, said[0] / said[0].sum() if is_one else None


def chance_of(counts: Tensor, said: Tensor) -> Tensor:
    """Return the probability of draws as uneven as these, or more so; 0 where a token of probability 0 was drawn.

    Args:
        counts: `[V]`, how often each token was drawn.
        said: `[V]`, its probability.
    """
    if bool((counts[said <= 0] > 0).any()):
        return torch.tensor(0.0)
    expected = said * counts.sum()
    often = expected >= _LEAST
    seen = torch.cat([counts[often].double(), counts[~often].sum()[None].double()])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    if float(wanted[-1]) < _LEAST:  # too few even together: with the rarest of the others
        seen, wanted = _joined(seen, wanted)
    if len(wanted) < 2:
        return torch.tensor(1.0)
    statistic = ((seen - wanted).square() / wanted).sum()
    half = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(half, statistic / 2)


def _joined(seen: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    if len(wanted) < 2:
        return seen, wanted
    at = int(wanted[:-1].argmin())
    kept = [i for i in range(len(wanted) - 1) if i != at]
    return (
        torch.cat([seen[kept], (seen[at] + seen[-1])[None]]),
        torch.cat([wanted[kept], (wanted[at] + wanted[-1])[None]]),
    )


def _whole(case: Case, built: Built, prompt: Tensor, given: dict[str, Any]) -> Tensor:
    """Return the probabilities `[V]` of all tokens at the temperature, before anything is cut."""
    with off_the_record(case), torch.no_grad():
        logits = case.call(built, prompt)[0, -1].detach().double().cpu()
    return (logits / given.get("temperature", 1.0)).softmax(-1)


def draws_cause(counts: Tensor, said: Tensor, whole: Tensor, temperature: float) -> str | None:
    """Name the rule by which tokens are drawn, where it is one that is known.

    Args:
        counts: `[V]`, how often each token was drawn.
        said: `[V]`, its probability as it is returned.
        whole: `[V]`, its probability before anything is cut.
        temperature: that it was drawn at.
    """
    if int((counts > 0).sum()) == 1:
        return "all samples of a batch get one and the same draw"
    among = said > 0
    if len(whole) == len(said) and not bool(among.all()):
        kept = torch.where(among, whole, 0.0)
        for place, words in ((-1, "last"), (0, "first")):
            rest = kept.clone()
            rest[place] += 1 - float(kept.sum())
            if float(chance_of(counts, rest)) > _FITS:
                return (
                    f"the probability of all tokens that are cut goes to the {words} id: a number up to 1 is looked up "
                    "in sums of what is kept, which end below 1"
                )
    if outside := int(counts[said <= 0].sum()):
        told = f"{outside} of {int(counts.sum())} draws are of tokens whose returned probability is 0"
        ranked = torch.where(torch.arange(len(said)) < int(among.sum()), said.sort(descending=True).values, 0.0)
        if float(chance_of(counts, ranked)) > _FITS:
            return f"{told}: the place of a token among the best is given for its number, which is not looked up"
        if len(whole) == len(said) and float(chance_of(counts, whole)) > _FITS:
            return f"{told}: tokens are drawn before the distribution is cut (top k, top p)"
        return f"{told}: they are drawn from another distribution than is returned"
    plain = torch.where(among, said**temperature, 0.0)
    if abs(temperature - 1) > 1e-2 and float(chance_of(counts, plain / plain.sum())) > _FITS:
        return (
            "tokens are drawn at temperature 1 whatever is given, while the returned probabilities follow it: noise "
            "that is added to the logits is divided by it too, say"
        )
    rules: list[tuple[str, Callable[[], Tensor]]] = [
        ("every token is as likely as any other", lambda: torch.ones_like(said)),
        ("every token of a probability above 0 is as likely as any other", lambda: among.double()),
        (
            "the place of a token among the best is given for its number, which is not looked up",
            lambda: said.sort(descending=True).values,
        ),
        ("the least likely tokens are drawn most", lambda: torch.where(among, 1 / said.clamp(min=1e-300), 0.0)),
        (
            "argmax of p / u, with u uniform, where u must be exponential: likely tokens are drawn too often",
            lambda: _race(said),
        ),
    ]
    rules += [(words, lambda power=power: said**power) for words, power in (  # type: ignore[misc]
        ("of the squares of the probabilities: a softmax of log probabilities twice as large", 2.0),
        ("of the roots of the probabilities", 0.5),
    )]  # fmt: skip
    rules += [(words, lambda by=by: said.roll(by)) for words, by in (  # type: ignore[misc]
        ("tokens are one too far: the number of the next is returned", 1),
        ("tokens are one too small: the number of the one before is returned", -1),
    )]  # fmt: skip
    for words, rule in rules:
        weights = rule()
        if float(chance_of(counts, weights / weights.sum())) > _FITS:
            return f"draws are those of another rule: {words}"
    return None


def _race(said: Tensor) -> Tensor:
    """Return how likely each is the argmax of p / u, u uniform: the integral of p_i prod_(j != i) (1 - p_j t)."""
    time = torch.linspace(0, 1 / float(said.max()), 4001, dtype=torch.float64)
    left = (1 - said[:, None] * time).clamp(min=1e-12).log()
    others = (left.sum(0) - left).exp()
    return torch.trapezoid(said[:, None] * others, time, dim=-1)
