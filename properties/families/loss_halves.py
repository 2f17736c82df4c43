"""Losses of half-precision logits: sums over many tokens, and a large vocabulary, are wider than what is stored."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.losses import loss_of_rows
from veriformer.properties.definitions.rounding import epsilon, name_of, rounding_bound
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.families.loss_rows import that_count

_HALVES = (torch.bfloat16, torch.float16)
_TOKENS, _ROW = 2305, 4099
"""A sum in bfloat16 stops growing at 256 equal terms, one in float16 at 2048."""


@holds(
    "loss.half-precision",
    statement="In half precision the loss, and its gradient, are what the logits as they are stored make them.",
    formula="|L_u - L| <= 3 u (mean |terms| + L) + n u_32; |dL_u/dx - (p - y)/n| <= what p, stored once, errs by",
    source="A sum in bfloat16 stops growing at 256 equal terms, one in float16 at 2048 (Higham 2002, 4.2).",
    kinds=("loss",),
    level="extended",
    unless=(excludes_fact("half_precision", False), excludes_fact("label_smoothing"), excludes_fact("z_loss")),
    requires=("loss.definition",),
    asks=("half_precision", False),
)
def sums_do_not_stick(case: Case) -> None:
    """For many tokens, and for a large vocabulary, in bfloat16 and in float16: whoever sums in the dtype of the logits
    loses what comes late. A loss that refuses half precision by raising is right too.
    """
    dtype = getattr(torch, case.choice("half", tuple(name_of(half) for half in _HALVES)))
    is_long = case.choice("long", (True, False))
    if case.bench.settings.dtypes:
        case.does_not_apply("another dtype is asked for")
    tokens = _TOKENS if is_long else 5
    small = case.built(dtype=torch.float32)
    try:
        built = case.bench.pool.get(small.config, dtype) if is_long else case.built_at(dtype, vocab_size=_ROW)
    except SubjectError:
        built = None
    if built is None:
        case.reject("it is not built in that dtype, or for that vocabulary")
        return
    shift, size = int(bool(case.subject.fact("shifts_labels"))), built.config.vocab_size
    logits = case.normal(1, tokens + shift, size, dtype=dtype)
    labels = that_count(case, torch.randint(0, size, (1, tokens + shift), generator=case.generator))
    _compare(case, built, logits, labels.to(logits.device), tokens)
    case.witness()


def _compare(case: Case, built: Built, logits: Tensor, labels: Tensor, tokens: int) -> None:
    """Compare one loss `-mean log p` and its gradient `(p - y) / n`.

    With z the log-sum-exp, x the logit of the label: z, x and their difference are rounded where they are stored, by u
    each, three times at most; so is the mean. In the gradient p = exp(log p) errs by u of |log p|, |z| and the largest
    logit, and by a few u, and is stored once; what underflows errs by the least number. Sums run in float32.
    """
    size, shift, dtype = built.config.vocab_size, labels.shape[1] - tokens, logits.dtype
    leaf = logits.clone().requires_grad_()
    try:
        loss = case.call(built, leaf, labels)
        (got,) = torch.autograd.grad(loss.sum(), leaf)
    except (SubjectError, RuntimeError):  # it refuses the dtype, or says that it has no such gradient
        return
    kept, targets = logits[:, :tokens], labels[:, shift:]
    expected, slope = loss_of_rows(kept, targets, 0.0, int(case.subject.fact("ignore_index", -100)), 0.0)
    unit, summing = epsilon(dtype) / 2, rounding_bound(torch.float32, max(tokens, size), operations=2)
    wide = kept.double()
    log_z = wide.logsumexp(-1, keepdim=True)
    taken = wide.gather(-1, targets[..., None])
    terms = log_z.abs() + taken.abs() + (log_z - taken)
    log_p = wide - log_z
    p = log_p.exp()
    relative = unit * (2 * log_p.abs() + 2 * log_z.abs() + 2 * wide.abs().amax(-1, keepdim=True) + 6) + summing
    hit = torch.zeros_like(p).scatter_(-1, targets[..., None], 1.0)
    least = float(torch.finfo(dtype).smallest_normal) * epsilon(dtype)
    bound = (p * relative + 4 * unit * hit) / tokens + 2 * least
    # where a maximum is not detached what a row errs by remains at it
    largest = wide == wide.amax(-1, keepdim=True)
    bound = bound + largest * bound.sum(-1, keepdim=True)
    of_loss = float((3 * unit + summing) * (terms.mean() + expected))
    value, slopes = loss.detach().double().reshape(()), got[:, :tokens].double()
    if dtype in _HALVES and not _within(((value, expected, of_loss), (slopes, slope, bound))):
        # a loss that is wrong in float32 as well is no question of precision
        _compare(case, case.bench.pool.get(built.config, torch.float32), logits.float(), labels, tokens)
    of = f"in {str(dtype).removeprefix('torch.')} for {tokens} tokens of a vocabulary of {size} the"
    asks = ("half_precision", False) if dtype in _HALVES else None
    case.close(
        value, expected, f"{of} loss is not the mean of the negative log likelihoods", bound=of_loss, asks=asks,
        cause=lambda: _stuck(case, built, shift),
    )  # fmt: skip
    case.close(slopes, slope, f"{of} gradient of the loss is wrong", bound=bound, asks=asks)


def _within(pairs: Iterable[tuple[Tensor, Tensor, Tensor | float]]) -> bool:
    return all(bool(((got - expected).abs() <= bound).all()) for got, expected, bound in pairs)


def _stuck(case: Case, built: Built, shift: int) -> str | None:
    """See whether twice as many tokens of one and the same loss halve the mean: then their sum ends at some number."""
    size, means = built.config.vocab_size, []
    if size > _TOKENS:
        return None
    with off_the_record(case):
        for tokens in (16, _TOKENS, 2 * _TOKENS):
            logits = torch.zeros(1, tokens + shift, size, dtype=built.dtype, device=case.bench.device)
            labels: Tensor = torch.ones(1, tokens + shift, dtype=torch.long, device=case.bench.device)
            means.append(float(case.call(built, logits, labels).detach()))
    if not 0 < means[1] < 0.95 * means[0] or means[2] > 0.6 * means[1]:
        return None
    terms = _TOKENS * means[1] / means[0]
    return f"the sum over tokens stops growing at {terms:.0f} equal terms: it is kept in the dtype of the logits"
