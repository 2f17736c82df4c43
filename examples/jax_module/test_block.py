"""What says most of a block; the whole catalogue takes some minutes, since JAX compiles for every length."""

import pytest
from block import block

from veriformer.properties import check

PROPERTIES = [
    "causality.no-future-influence",
    "causality.no-future-gradient",
    "batch.permutation",
    "gradients.gradcheck",
]


@pytest.mark.parametrize("prop", PROPERTIES)
def test_block(prop: str) -> None:
    check(block, only=[prop], profile="quick").raise_for_violations()
