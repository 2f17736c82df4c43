"""Why a norm is not that of the formula: the usual slips, and the variance that its answers imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import judged_dtypes
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.norms import divisor_cause, lanes_cause, wrong_widths
from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.norms import eps_cause, norm_cause, one_pass_cause
from veriformer.properties.formulas.variances import variance_cause, variance_factor
from veriformer.properties.probes.norms import LARGE, NormModel, is_centred

_HALF = (torch.float16, torch.bfloat16)
_TOKENS = 16


def definition_cause(case: Case, built: Built, model: NormModel, x: Tensor, bound: float) -> str | None:
    """Try the usual slips on this case and on small tokens: the one whose formula gives the answers is the cause."""
    if told := lanes_cause(case) or divisor_cause(case):
        return told
    with off_the_record(case):
        call = case.caller(built)
        read = (model.gain, model.bias, float(model.eps), model.centred)
        for constants in (read, *_constants(built, model)):
            if told := norm_cause(call, x, *constants, bound):
                return told
        if model.centred and (told := one_pass_cause(call, x, *read[:3], model, bound)):
            return told
        if told := used_variance(case):
            return told
        small = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[-1]), dtype=torch.float64).to(x)
        told = eps_cause(call, small, *read) if built.dtype not in _HALF else None
    return told or used_factor(case)


def _constants(built: Built, model: NormModel) -> list[tuple[Tensor, Tensor, float, bool]]:
    """Return gain, bias and eps as they stand in the module, which a formula that is far off does not show."""
    if not isinstance(built.module, torch.nn.Module):
        return []
    fits = {n: p.detach().double() for n, p in built.module.named_parameters() if p.shape == model.gain.shape}
    biases = [p for n, p in fits.items() if "bias" in n or "beta" in n or "shift" in n]
    gains = [p for n, p in fits.items() if not any(p is bias for bias in biases)] or [torch.ones_like(model.gain)]
    bias = biases[0] if biases else torch.zeros_like(model.bias)
    own = getattr(built.module, "eps", getattr(built.module, "epsilon", None))
    return [(gains[0], bias, float(eps), model.centred) for eps in ((own,) if isinstance(own, float) else (1e-5, 1e-6))]


def used_variance(case: Case) -> str | None:
    """Name the variance that the answers imply, where it is one that is known.

    Args:
        case: of the violation; gains are ones and biases zeros where the norm is as built.
    """
    if told := lanes_cause(case) or divisor_cause(case):
        return told
    with off_the_record(case):
        told = _told(case, variance_cause)
        # of two shards of one size several slips weigh what lies between by the same number: of three and more each
        return (told and "shards" in told and _told(case, variance_cause, times=3)) or told


def used_factor(case: Case) -> str | None:
    """Say at which widths a norm is wrong; where it is so at all of them, which of mean and variance is off.

    Args:
        case: of the violation.
    """
    if told := wrong_widths(case):
        return told
    with off_the_record(case):
        return _told(case, variance_factor)


def _told(case: Case, measure: Callable[[Tensor, Tensor, bool], str | None], *, times: int = 1) -> str | None:
    """Measure the norm as built, at the drawn width or at so many times as wide; None where it refuses that."""
    dtype = judged_dtypes(case.bench)[-1]
    if case.subject.build is None or dtype in _HALF:
        return None
    config, one_head = case.config(), {"num_heads": 1, "num_key_value_heads": 1} if times > 1 else {}
    try:
        built = case.bench.pool.fresh(replace(config, d_model=times * config.d_model, **one_head), dtype, raw=True)
    except SubjectError:
        return None
    generator = torch.Generator().manual_seed(_TOKENS)
    x = torch.randn(1, _TOKENS, built.config.d_model, generator=generator, dtype=torch.float64)
    x = (LARGE * (x + 1)).to(case.bench.device, dtype)
    with torch.no_grad():
        y = case.call(built, x)
        if float((case.call(built, x[:, :1]) - y[:, :1]).abs().max()) > 1e-4:  # other tokens have a part in it
            return None
        return measure(x[0].double(), y[0].detach().double(), is_centred(case, built))
