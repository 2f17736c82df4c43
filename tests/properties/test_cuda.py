"""Where a GPU is: the whole catalogue on the reference and on torch.nn, every kernel, and the dtypes of the GPU."""

from __future__ import annotations

import pytest
import torch

from veriformer.properties import check
from veriformer.properties.adapters.recognising import shipped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no CUDA device here")

SUBJECTS = [(group, name) for group in ("reference", "torch") for name in shipped(group)]


@pytest.mark.parametrize(("group", "name"), SUBJECTS, ids=lambda value: str(value))
def test_shipped_subjects_hold_on_the_gpu(group: str, name: str) -> None:
    report = check(shipped(group)[name], profile="quick", device="cuda")
    outcomes = {r.id: (r.outcome, r.reason) for r in report.results}
    wrong = {i: o for i, o in outcomes.items() if o[0] not in ("PASS", "NOT_APPLICABLE", "DEVIATION")}
    assert not wrong


def test_every_kernel_is_walked() -> None:
    report = check(shipped("torch")["scaled_dot_product_attention"], device="cuda", only=["attention"])
    walked = {word for r in report.results for path in r.paths for word in path.split()}
    assert {"backend=math", "backend=flash", "backend=efficient", "backend=cudnn"} <= walked
