"""What says most of a block; the whole catalogue takes a minute or two, since JAX compiles for every length."""

from block import block

from veriformer.properties import check

PROPERTIES = [
    "causality.no-future-influence",
    "batch.permutation",
    "gradients.gradcheck",
]


def test_block() -> None:
    check(block, only=PROPERTIES, profile="quick").raise_for_violations()
