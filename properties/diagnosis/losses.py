"""By which formula a loss is wrong, or for which labels, lengths or vocabularies."""

from __future__ import annotations

from veriformer.properties.bench.measured import judged_dtypes, takes_ignored_labels
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.losses import loss_oracle
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.formulas.losses.sizes import wrong_labels, wrong_sizes
from veriformer.properties.formulas.losses.values import loss_cause


def formula_of_loss(case: Case, built: Built) -> str | None:
    """Name the wrong formula that gives the subject's numbers on inputs that tell the usual slips apart."""
    fact, device = case.subject.fact, case.bench.device
    with off_the_record(case):
        return loss_cause(
            lambda logits, labels: case.call(built, logits.to(device), labels.to(device)).reshape(()),
            built.config.vocab_size,
            built.dtype,
            eps=float(fact("label_smoothing", 0.0)),
            ignore=int(fact("ignore_index", -100)),
            z_loss=float(fact("z_loss", 0.0)),
            shift=int(bool(fact("shifts_labels"))),
            hides=takes_ignored_labels(case.bench, built),
        )


def where_a_loss_is_wrong(case: Case, built: Built) -> str | None:
    """Say for which labels, or at which sizes, a loss is not the declared one."""
    fact, device = case.subject.fact, case.bench.device
    shift = int(bool(fact("shifts_labels")))
    eps, z = (float(fact(name, 0.0)) for name in ("label_smoothing", "z_loss"))
    with off_the_record(case):
        for measure in (wrong_labels, wrong_sizes):
            told = measure(
                lambda logits, labels: case.call(built, logits.to(device), labels.to(device)).reshape(()),
                built.config.vocab_size,
                built.dtype,
                formula=lambda logits, labels: loss_oracle(
                    logits[:, : logits.shape[1] - shift], labels[:, shift:], eps, int(fact("ignore_index", -100)), z
                ),
                shift=shift,
            )
            if told:
                return told
    return None


def loss_opinion(case: Case, problem: Violation) -> str | None:
    """Explain a gradient by a loss that is wrong itself."""
    built = case.bench.pool.get(case.config(), judged_dtypes(case.bench)[-1])
    told = formula_of_loss(case, built) or where_a_loss_is_wrong(case, built)
    return f"the loss itself is wrong: {told.removeprefix('the loss is wrong ')}" if told else None
