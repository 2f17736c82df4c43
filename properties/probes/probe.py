"""Facts that a subject did not declare, found out by calling it; reported, and used in place of a declaration.

To add a probe, write a generator of findings in a file of this room and name it in `PROBES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from veriformer.properties.anatomy.describing import Part, described
from veriformer.properties.anatomy.flow import flow
from veriformer.properties.bench.guards import SubjectTimeoutError
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.violations import BudgetSpent, NotSpokenOfError
from veriformer.properties.probes.behaviour import (
    batch_is_coupled,
    groups_of_heads,
    layout_of_pairs,
    padding_sides,
    repeats_itself,
    shift_of_labels,
)
from veriformer.properties.probes.doubts.class_tokens import class_token
from veriformer.properties.probes.doubts.one_length import lone_length
from veriformer.properties.probes.doubts.said_in_code import ends_of_texts, smaller_starts
from veriformer.properties.probes.findings import Finding, Probe, Question, a_case
from veriformer.properties.probes.influence import observed_scales, order_matters, what_reaches_what
from veriformer.properties.probes.sizes.limits import longest_sequence, shortest_sequence
from veriformer.properties.probes.slopes import slopes_of_the_bias
from veriformer.properties.probes.structure import kind_of_norm, place_of_norm, tied_embeddings, where_positions_enter

PROBES: Sequence[Probe] = (
    longest_sequence,
    shortest_sequence,
    what_reaches_what,
    where_positions_enter,
    order_matters,
    observed_scales,
    place_of_norm,
    lone_length,
    smaller_starts,
    ends_of_texts,
    class_token,
    kind_of_norm,
    tied_embeddings,
    padding_sides,
    layout_of_pairs,
    slopes_of_the_bias,
    shift_of_labels,
    repeats_itself,
    batch_is_coupled,
    groups_of_heads,
)
"""Every probe, in the order of a report. A fact that an earlier one found is not looked for again."""

FOR_IDENTIFICATION = (repeats_itself, batch_is_coupled)
"""Probes that find no facts: properties judge these things themselves."""


TAKEN_APART = ("self_attention", "layer", "encoder", "decoder", "encoder_decoder", "classifier")
"""Kinds of subject that are taken apart."""


def identify(bench: Workbench) -> list[Finding]:
    """Return all that can be seen of a subject, declared or not."""
    found: dict[str, Finding] = {}
    for look in PROBES:
        for finding in _seen(look, bench):
            found.setdefault(finding.name, finding)
    found.pop("observed_scale", None)  # says whether the next one could be seen
    return list(found.values())


def taken_apart(bench: Workbench) -> list[Part]:
    """Return the parts inside a model that are recognised by the numbers that flow through it, in order.

    None where it is no torch module over a sequence, or does not go along.
    """
    if bench.subject.kind not in TAKEN_APART:
        return []
    try:
        with torch.random.fork_rng(devices=[]):
            return described(flow(a_case(bench)))
    except (Exception, BudgetSpent, NotSpokenOfError, SubjectTimeoutError):
        return []


@dataclass(frozen=True)
class Seen:
    """What a subject does not declare and shows.

    Attributes:
        facts: that stand in for declarations.
        notes: one sentence each, for the report.
        questions: what only the author knows, by the id of the property that the answer decides about.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    questions: dict[str, Question] = field(default_factory=dict)


def probe(bench: Workbench) -> Seen:
    """Find out what a subject does not declare."""
    seen = Seen()
    for look in PROBES:
        if look in FOR_IDENTIFICATION:
            continue
        for finding in _seen(look, bench):
            known = bench.subject.fact(finding.name)
            if known is not None or (finding.is_fact and finding.name in seen.facts):
                continue  # what is declared is judged by properties
            if finding.is_fact:
                seen.facts[finding.name] = finding.value
            if finding.told:
                seen.notes.append(finding.note)
            if finding.asks:
                seen.questions.setdefault(finding.asks.decides, finding.asks)
    return seen


def _seen(look: Probe, bench: Workbench) -> list[Finding]:
    """Return what a probe sees; nothing, where the subject does not go along: properties will show why."""
    try:
        with torch.random.fork_rng(devices=[]):
            return list(look(bench))
    except Exception:  # whatever a subject's own hooks, gradients or copies raise: what is not seen is not known
        return []
