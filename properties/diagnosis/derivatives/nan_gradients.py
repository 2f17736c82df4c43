"""Where a gradient becomes NaN though the output is none: the line whose backward gives the first."""

from __future__ import annotations

import re
import warnings

import torch
from torch import Tensor

from veriformer.properties.diagnosis.derivatives.differentiating import Sizes, setting
from veriformer.properties.diagnosis.derivatives.graph_cuts import Cut, is_of_the_subject
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.subject import Subject

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_FUNCTION = re.compile(r"Function '(\w+?)(?:Backward)?\d*' returned nan values")


def nan_opinion(case: Case, problem: Violation) -> str | None:
    """Explain a gradient that became NaN, for an empty row of the mask or for inputs of some scale."""
    if "gradient" not in problem.headline or "NaN" not in problem.headline:
        return None
    empty = "attend to no key" in problem.headline
    sizes = Sizes(batch=2, queries=4, keys=6, mask="empty" if empty else "")
    made = setting(case, sizes)
    scale = float(case.choices.get("scale", 1.0))
    with torch.no_grad():
        for name in list(made.leaves)[: made.inputs]:
            made.leaves[name].mul_(scale)
    found = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # before anomaly mode, which warns of itself
        with torch.autograd.detect_anomaly(check_nan=True):
            output = made.run()
            fine = output[_rows(case.subject, output)] if empty else output
            try:
                torch.autograd.grad(fine.square().sum(), list(made.leaves.values()), allow_unused=True)
            except RuntimeError as raised:
                found = _FUNCTION.search(str(raised))
    frames = [f for w in told for f in _FRAME.findall(str(w.message)) if is_of_the_subject(f[0])]
    if found is None or not frames:
        return None
    file, line, function = frames[-1]
    where = str(Cut(found[1], file, int(line), function))
    if empty:
        what = "what is put in its place afterwards mends the output, not the gradient"
        return f"the backward of {found[1].lower()} at {where} gives NaN for a row that has no key: {what}"
    return f"the backward of {found[1].lower()} at {where} gives the first NaN, for inputs of scale {scale:g}"


def _rows(subject: Subject, output: Tensor) -> Tensor:
    """Return what is not the output of an empty row: see `Sizes`."""
    kept = torch.ones(output.shape, dtype=torch.bool, device=output.device)
    if subject.kind == "attention":
        kept[:, :, 1] = False
    else:
        kept[1] = False
    return kept
