"""Calls of torch as source."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.counterexamples.writing import written


def test_a_power_of_a_negative_number_keeps_its_sign() -> None:
    exponents = torch.arange(4)

    def express(value: Any) -> str:
        return "exponents" if value is exponents else repr(value)

    source = written(Tensor.__rpow__, (exponents, -1.0), {}, express)
    assert torch.equal(eval(source, {"exponents": exponents}), (-1.0) ** exponents)
