"""Losses of language models: the formula, the shift, what is not counted, smoothing, accumulation."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import takes_ignored_labels
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.losses import loss_oracle
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.diagnosis.losses import formula_of_loss, where_a_loss_is_wrong
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.loss_rows import every_chunk_counts
from veriformer.properties.formulas.losses.accumulation import accumulation_cause
from veriformer.properties.formulas.losses.values import terms_beside
from veriformer.properties.subject.subject import Subject

_KIND = ("loss",)


def _draw(case: Case, scale: float = 1.0, ignored: bool = True) -> tuple[Built, Tensor, Tensor]:
    """Return a model, logits `[B, T, V]` and labels `[B, T]`, some of them ignored but never all."""
    built = case.built()
    batch, length = case.integer("B", 1, 3), case.integer("T", 3, 7)
    vocabulary = built.config.vocab_size
    logits = case.normal(batch, length, vocabulary, dtype=built.dtype, scale=scale)
    labels = torch.randint(0, vocabulary, (batch, length), generator=case.generator)
    if ignored and takes_ignored_labels(case.bench, built):
        share = case.choice("ignored", (0.0, 0.3, 0.7))
        hidden = torch.rand(labels.shape, generator=case.generator) < share
        hidden[0, 1] = False  # something is left, wherever the labels are moved
        labels = labels.masked_fill(hidden, _ignore(case.subject))
    return built, logits, labels.to(case.bench.device)


def _ignore(subject: Subject) -> int:
    return int(subject.fact("ignore_index", -100))


def _expected(case: Case, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss in float64, position by position."""
    subject = case.subject
    if subject.fact("shifts_labels"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    smoothing, z_loss = (float(subject.fact(name, 0.0)) for name in ("label_smoothing", "z_loss"))
    return loss_oracle(logits, labels, smoothing, _ignore(subject), z_loss)


def _bound(logits: Tensor) -> float:
    """Return the rounding of a log-softmax: units in the last place of the largest logit, two a term of its sum."""
    largest = float(logits.detach().abs().max())
    return epsilon(logits.dtype) * (4 * largest + 2 * logits.shape[-1] + 4 * math.log(logits.shape[-1]))


@holds(
    "loss.definition",
    statement="The loss is the mean of -log p(label) over the counted positions; the others have no part in it.",
    formula="L = -1/n sum_t [y_t counted] ((1 - eps) log p_t(y_t) + eps/K sum_k log p_t(k)); dL/dx_t = 0 elsewhere",
    source="Vaswani et al. 2017, 5.4; documented bugs LS04, LS13.",
    kinds=_KIND,
    catches=("LS01", "LS03", "LS04", "LS06", "LS13"),
)
def the_loss_is_the_mean_log_likelihood(case: Case) -> None:
    """Against a loop in float64. A position that is not counted gets a gradient of exactly zero, one that is counted
    another: a mean over all positions, or a label of the padding that is scored, shows in either. Then for up to 1000
    tokens and vocabularies of up to 50,000, in one call and by its closed form.
    """
    built, logits, labels = _draw(case, case.choice("scale", (1.0, 10.0)))
    given, kept = logits.clone().requires_grad_(), labels.clone()
    loss = case.call(built, given, labels)
    expected = _expected(case, logits, labels)
    case.close(
        loss.detach().double().reshape(()),
        expected,
        "the loss is not the mean of the negative log likelihoods",
        bound=_bound(logits),
        cause=lambda: (
            _cause(case, built) if torch.equal(labels, kept) else "the call changes the labels that it is given"
        ),
    )
    (gradient,) = torch.autograd.grad(loss.sum(), given)
    counted = labels != _ignore(case.subject)
    if case.subject.fact("shifts_labels"):
        counted = torch.cat([counted[:, 1:], torch.zeros_like(counted[:, :1])], dim=1)
    silent = gradient[~counted]
    if silent.numel():
        case.exact(silent, torch.zeros_like(silent), "a position that is not counted has a gradient",
                   cause=lambda: formula_of_loss(case, built))  # fmt: skip
    sure = logits.double().softmax(-1).amax(-1) > 0.999  # there the gradient may round to zero
    case.require(
        (gradient[counted & ~sure].abs().sum(-1) > 0).all(),
        "a position that is counted has no gradient",
        got="0",
        expected="another number",
    )
    every_chunk_counts(case, built, partial(_cause, case, built))
    case.witness()


def _cause(case: Case, built: Built) -> str | None:
    return formula_of_loss(case, built) or _undeclared_terms(case, built) or where_a_loss_is_wrong(case, built)


def _undeclared_terms(case: Case, built: Built) -> str | None:
    """Name what is beside the likelihood in a loss of which nothing says so: it may be meant."""
    fact, device, vocabulary = case.subject.fact, case.bench.device, built.config.vocab_size
    declared = {"label_smoothing": 0.0, "z_loss": 0.0, "ignore_index": -100, "shifts_labels": False}
    by_name = {name: fact(name) for name in declared if fact(name) is not None}
    with off_the_record(case):
        found = terms_beside(
            lambda logits, labels: case.call(built, logits.to(device), labels.to(device)).reshape(()),
            vocabulary,
            built.dtype,
            ignored=[_ignore(case.subject), *(range(vocabulary) if fact("ignore_index") is None else ())],
            shifts=(0, 1) if fact("shifts_labels") is None else (int(fact("shifts_labels")),),
        )
    if found is None:
        return None
    words = (
        f"there is label smoothing of {found[0]:g}",
        f"{found[1]:g} times the square of log Z is added",
        f"label {found[2]} is not counted",
        "the labels are moved by one",
    )
    own = dict(zip(declared, (*found[:3], bool(found[3])), strict=True))
    other = {name: told for name, told in zip(declared, words, strict=True) if own[name] != (declared | by_name)[name]}
    told = [f"{t}, where {by_name[n]!r} is declared" if n in by_name else t for n, t in other.items()]
    meant = ", ".join(f"declare {name}={own[name]!r}" for name in other if name not in by_name)
    return (" and ".join(told) + f" ({meant} if that is meant)" * bool(meant)) or None


@holds(
    "loss.shift",
    statement="Logits that foretell exactly the labels' next token have almost no loss; one step off, a large one.",
    formula="x_t peaked at y_{t+1} (y_t where the labels are given shifted): L ~ 0; at any other offset L >> 0",
    source="documented bug LS01: labels shifted twice.",
    kinds=_KIND,
    unless=needs_fact("shifts_labels"),
    catches=("LS01",),
)
def labels_are_shifted_exactly_once(case: Case) -> None:
    """Successive labels differ, so that one alignment alone foretells them. `shifts_labels` says whether the loss moves
    the labels itself or gets them moved.
    """
    built = case.built()
    vocabulary, length = built.config.vocab_size, case.integer("T", 4, 8)
    first = case.integer("first", 0, vocabulary - 1)
    labels = (first + torch.arange(length))[None].to(case.bench.device) % vocabulary
    peak = 20.0
    losses = []
    for offset in range(3):
        foretold = (labels + offset) % vocabulary
        logits = torch.zeros(1, length, vocabulary, dtype=built.dtype, device=labels.device)
        logits.scatter_(-1, foretold[..., None], peak)
        losses.append(case.call(built, logits, labels).detach().double().reshape(()))
    right = 1 if case.subject.fact("shifts_labels") else 0
    smallest = min(range(3), key=lambda offset: float(losses[offset]))
    others = torch.stack([losses[offset] for offset in range(3) if offset != right])
    case.require(
        losses[right] < others.min() - 1,
        f"logits that foretell the token {right} ahead do not have the smallest loss",
        got=f"losses {', '.join(f'{x:.3g}' for x in losses)} for tokens 0, 1 and 2 ahead",
        expected=f"the smallest for {right}",
        cause=lambda: f"the labels are moved by {smallest}, where {right} is declared",
    )
    case.witness()


@holds(
    "loss.label-smoothing",
    statement="The gradient shows the smoothed target: 1 - eps + eps/K at the label, eps/K elsewhere.",
    formula="dL/dx_t = (softmax(x_t) - q_t) / n, q = (1 - eps) onehot(y) + eps / K",
    source="Szegedy et al. 2016, section 7; documented bugs LS03, LS06.",
    kinds=_KIND,
    level="extended",
    unless=(needs_fact("label_smoothing"), excludes_fact("z_loss")),
    catches=("LS03", "LS06", "LS07"),
)
def the_smoothed_target_shows_in_the_gradient(case: Case) -> None:
    """Reads the target off the gradient; positions that are not counted have no target, and do not count in n."""
    built, logits, labels = _draw(case)
    eps, vocabulary = float(case.subject.fact("label_smoothing")), logits.shape[-1]
    given = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(case.call(built, given, labels).sum(), given)
    if case.subject.fact("shifts_labels"):
        case.require(~gradient[:, -1].any(), "the last position has a gradient though nothing follows it")
        logits, labels, gradient = logits[:, :-1], labels[:, 1:], gradient[:, :-1]
    counted = labels != _ignore(case.subject)
    target = logits.double().softmax(-1) - gradient.double() * int(counted.sum())
    expected = torch.full_like(target, eps / vocabulary)
    expected.scatter_add_(-1, labels.clamp(min=0)[..., None], torch.full_like(target[..., :1], 1 - eps))
    bound = (_bound(logits) + 4 * epsilon(logits.dtype)) * max(1, int(counted.sum()))
    case.close(target[counted], expected[counted], "the target in the gradient is not the smoothed one", bound=bound,
               cause=lambda: formula_of_loss(case, built))  # fmt: skip
    case.witness()


@holds(
    "loss.accumulation",
    statement="Micro-batches of unequal numbers of counted tokens give the loss and gradient of the whole batch.",
    formula="accumulate((x_1, y_1), ..., (x_m, y_m)) = L(x, y)",
    source="documented bug LS12; the gradient accumulation defect of several trainers, 2024.",
    kinds=_KIND,
    level="extended",
    unless=needs_part("accumulate"),
    catches=("LS12",),
)
def micro_batches_add_up(case: Case) -> None:
    """A mean of means weighs a token by the micro-batch it fell into; a sum divided by the total count does not."""
    built, logits, labels = _draw(case)
    if not takes_ignored_labels(case.bench, built):
        case.does_not_apply("it takes no labels that are not counted, so every micro-batch counts as many")
    extra = torch.full_like(labels[:1], _ignore(case.subject))
    extra[0, 1] = 1  # a micro-batch with a single counted label
    logits = torch.cat([logits, case.normal(*logits[:1].shape, dtype=built.dtype)])
    labels = torch.cat([labels, extra])
    whole, parts = (logits.clone().requires_grad_() for _ in range(2))
    expected = case.call(built, whole, labels)
    got = case.ask("accumulate", [(parts[i : i + 1], labels[i : i + 1]) for i in range(len(labels))], built=built)
    bound = 4 * _bound(logits)
    case.close(got.detach().double(), expected.detach().double(),
               "micro-batches give another loss than the whole batch", bound=bound,
               cause=lambda: _parts_cause(case, built))  # fmt: skip
    theirs = torch.autograd.grad(got.sum(), parts)[0]
    case.close(theirs, torch.autograd.grad(expected.sum(), whole)[0],
               "micro-batches give another gradient than the whole batch", bound=bound)  # fmt: skip
    case.witness()


def _parts_cause(case: Case, built: Built) -> str | None:
    """Put micro-batches of 2, 5 and 4 counted labels together, and see which formula gives the subject's number.

    They have 5, 8 and 7 labels in all; where it refuses that, 8 each.
    """
    return _parts_of(case, built, (5, 8, 7)) or _parts_of(case, built, (8, 8, 8))


def _parts_of(case: Case, built: Built, sizes: tuple[int, ...]) -> str | None:
    vocabulary, ignore, device = built.config.vocab_size, _ignore(case.subject), case.bench.device
    shift = int(bool(case.subject.fact("shifts_labels")))
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(3, 8, vocabulary, generator=generator, dtype=torch.float64).to(device, built.dtype)
    labels = torch.randint(0, vocabulary, (3, 8), generator=generator)
    for row, left in enumerate((2, 5, 4)):
        labels[row, left + shift :] = ignore
    pairs = [(logits[i : i + 1, :n], labels[i : i + 1, :n].to(device)) for i, n in enumerate(sizes)]
    with off_the_record(case):
        try:
            got = float(case.ask("accumulate", pairs, built=built))
        except SubjectError:
            return None
        means = [float(case.call(built, *pair)) for pair in pairs]
    counted = labels != ignore
    return accumulation_cause(
        got,
        means,
        counted[:, shift:].sum(1).tolist(),
        counted.sum(1).tolist(),
        sizes,
        16 * _bound(logits) * max(1.0, abs(got)),
    )


@holds(
    "loss.range",
    statement="The loss is finite and not negative, for the largest logits and for a batch without labels.",
    formula="0 <= L < inf; likewise its gradient",
    source="-log p >= 0; documented bugs LS07, OP02: divisions by a count of zero.",
    kinds=_KIND,
    catches=("LS07",),
)
def the_loss_is_finite_and_not_negative(case: Case) -> None:
    """Logits up to a quarter of the dtype's largest number, wrong by as much. A batch in which nothing is counted has
    the loss that the subject declares (`empty_loss`); one that says nothing may give 0 or, as torch does, 0/0.
    """
    built, logits, labels = _draw(case)
    largest = min(1e4, torch.finfo(built.dtype).max / (4 * logits.shape[-1]))  # label smoothing sums V of them
    scale = case.choice("scale", (1.0, min(1e3, largest / 2), largest))
    empty = case.flag("empty")
    wanted = case.subject.fact("empty_loss")
    given = ((logits / logits.abs().max()) * scale).requires_grad_()
    if empty and not takes_ignored_labels(case.bench, built):
        case.reject("it takes no labels that are not counted")
    if empty:
        labels = torch.full_like(labels, _ignore(case.subject))
    try:
        loss = case.call(built, given, labels)
    except SubjectError:
        if empty and wanted == "error":
            case.witness()
            return
        raise
    if empty and wanted is None and bool(loss.isnan()):
        case.witness()
        return
    if not (empty and wanted == "nan"):
        case.finite(loss, "the loss is NaN or infinite" + (" where nothing is to be predicted" if empty else ""))
        case.require(
            (loss.detach() >= -_bound(given)).all(),
            "the loss is negative",
            got=f"{float(loss.detach()):.4g}",
            expected=">= 0",
        )
        (gradient,) = torch.autograd.grad(loss.sum(), given)
        case.finite(gradient, "the gradient of the loss is NaN or infinite")
    else:
        case.require(
            loss.isnan().all(), "the loss of nothing is declared NaN and is not", got=f"{float(loss.detach()):.4g}"
        )
    case.witness()
