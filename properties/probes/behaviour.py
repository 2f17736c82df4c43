"""Probes of behaviour: padding, rotary pairs, the shift of labels, repetition, and samples that meet."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import agrees_with_itself, is_deterministic_in_training, judged_dtypes
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.engine.stream import SEQUENCES, Stream, sides
from veriformer.properties.probes.findings import Finding, Question, a_case, a_stream
from veriformer.properties.subject.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.subject.paths import GRAD_MODES, Path


def padding_sides(bench: Workbench) -> Iterator[Finding]:
    """Pad a sequence on each side: it is supported where the outputs at real positions stay what they were."""
    subject = bench.subject
    if subject.kind not in SEQUENCES or not subject.takes_mask("padding"):
        return
    if "target" not in sides(subject, masked=True) or subject.kind == "encoder_decoder":
        return
    stream = a_stream(bench)
    supported = [side for side in ("right", "left") if _pads(bench, stream, side)]
    if supported == ["right", "left"]:
        yield Finding("padding_side", "both", "padding on either side leaves the outputs as they were")
    elif supported == ["left"]:
        seen = "padding on the left leaves the outputs as they were, on the right it does not"
        asks = Question("padding.left", f"{seen}: a defect, or by design?", "padding_side='left'")
        yield Finding("padding_side", "left", seen, asks=asks)
    elif not supported:
        how = "padding on neither side leaves the outputs as they were"
        yield Finding("padding", "changes outputs", how, is_fact=False, told=False)


def _pads(bench: Workbench, stream: Stream, side: str) -> bool:
    """Return whether padding on a side leaves real outputs as they were: short and long, in every gradient mode."""
    limit = 4 * max(stream.case.tolerance(stream.built), 1e-5)  # positions are made in float32
    for length, pads in ((4, 2), (1, 3)):
        x = stream.draw(1, length)
        filler = stream.draw(1, pads)
        parts = [x, filler] if side == "right" else [filler, x]
        real = slice(0, length) if side == "right" else slice(pads, None)
        mask = torch.zeros(1, length + pads, dtype=torch.bool, device=bench.device)
        mask[:, real] = True
        for mode in GRAD_MODES:
            alone = stream(x, mask[:, real], path=Path(mode=mode)).clone()
            padded = stream(torch.cat(parts, dim=1), mask, path=Path(mode=mode)).clone()
            got = padded[:, real] if stream.per_position else padded
            if not worst_difference(got, alone, size_of(alone)).error <= limit:
                return False
    return True


def layout_of_pairs(bench: Workbench) -> Iterator[Finding]:
    """Rotate a single channel to position 1: the channel that it leaks into is its partner."""
    if bench.subject.kind != "rotary":
        return
    case = a_case(bench)
    built = case.built(dtype=judged_dtypes(bench)[0])
    width, heads = built.config.d_head, built.config.num_heads
    x = torch.eye(width, dtype=built.dtype, device=bench.device)[None, None].expand(1, heads, -1, -1)
    position = torch.ones(width, dtype=torch.long, device=bench.device)
    with torch.no_grad():
        turned = case.call(built, x.contiguous(), position)[0, 0]
    off = (turned - torch.diag(torch.diagonal(turned))).abs()
    partner = {c: int(row.argmax()) for c, row in enumerate(off) if float(row.max()) > 1e-6}
    rotated = len(partner)
    if not rotated:
        return
    layouts = {
        "interleaved": {c: c ^ 1 for c in partner},
        "halves": {c: (c + rotated // 2) % rotated for c in partner},
    }
    matching = [name for name, pairs in layouts.items() if pairs == partner]
    if len(matching) == 1:
        yield Finding("layout", matching[0], "a single channel, rotated, leaks into its partner", told=width > 2)
    if rotated < width:
        yield Finding("rotary_dim", rotated, f"{width - rotated} of {width} channels pass through")


def shift_of_labels(bench: Workbench) -> Iterator[Finding]:
    """Foretell the label 0, 1 or 2 tokens ahead: the smallest loss shows by how many the labels are moved."""
    if bench.subject.kind != "loss":
        return
    case = a_case(bench)
    built = case.built(dtype=judged_dtypes(bench)[0])
    vocabulary, length = built.config.vocab_size, 6
    labels = torch.arange(length, device=bench.device)[None] % vocabulary
    losses = []
    for ahead in range(3):
        logits = 20.0 * torch.nn.functional.one_hot((labels + ahead) % vocabulary, vocabulary).to(built.dtype)
        losses.append(float(case.call(built, logits, labels).detach()))
    smallest = min(range(3), key=lambda ahead: losses[ahead])
    if smallest < 2 and losses[smallest] < 1 < min(x for i, x in enumerate(losses) if i != smallest):
        words = "logits that foretell the next label have the smallest loss"
        own = "logits that foretell the label at their own place have the smallest loss"
        yield Finding("shifts_labels", smallest == 1, words if smallest == 1 else own)


def repeats_itself(bench: Workbench) -> Iterator[Finding]:
    """Call twice, in eval mode and in train mode."""
    if not has_ordinary_inputs(bench.subject.kind):
        return
    case = a_case(bench)
    built = case.built(dtype=judged_dtypes(bench)[0])
    inputs = ordinary(bench.subject, built.config, torch.Generator().manual_seed(1), built.dtype)
    tensors = [x.to(bench.device) for x in inputs.tensors]
    same = agrees_with_itself(bench, built, *tensors, *inputs.extras)
    yield Finding("deterministic", same, "two equal calls in eval mode " + ("agree" if same else "differ"), False)
    if isinstance(built.module, torch.nn.Module):
        training = is_deterministic_in_training(bench, built)
        yield Finding(
            "deterministic in train mode", training, "two equal calls " + ("agree" if training else "differ"), False
        )


def batch_is_coupled(bench: Workbench) -> Iterator[Finding]:
    """Exchange one sample of a batch: the outputs of the others must stay."""
    if bench.subject.kind not in SEQUENCES:
        return
    stream = a_stream(bench)
    x = stream.draw(3, 5)
    changed = x.clone()
    changed[2] = stream.other(x)[2]
    with torch.no_grad():
        before, after = stream(x)[:2], stream(changed)[:2]
    coupled = worst_difference(after, before, size_of(before)).error > stream.case.tolerance(stream.built)
    manner = "changes" if coupled else "does not change"
    yield Finding("batch_coupled", coupled, f"another sample {manner} the outputs of the others", is_fact=False)


def groups_of_heads(bench: Workbench) -> Iterator[Finding]:
    """Try four query heads on two key-value heads."""
    subject = bench.subject
    if subject.kind != "attention" or subject.fact("grouped_queries") is not None:
        return
    case = a_case(bench)
    built = case.built(dtype=torch.float32)
    if isinstance(built.module, torch.nn.Module) and next(built.module.parameters(), None) is not None:
        return  # of one number of heads
    query, key = case.normal(2, 4, 3, 8, dtype=torch.float32), case.normal(2, 2, 5, 8, dtype=torch.float32)
    try:
        takes = case.call(built, query, key, key).shape == query.shape
    except SubjectError:
        return
    if takes:
        yield Finding("grouped_queries", True, "four query heads on two key-value heads are taken", told=False)
