"""On a GPU an index beyond a table ends the process: only what `Workbench.trying` moves to the CPU may be called so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from veriformer.properties import check
from veriformer.properties.adapters.recognising import shipped
from veriformer.properties.bench.workbench import Workbench


@pytest.mark.parametrize("name", ["decoder-learned", "encoder-decoder", "classifier-cls"])
def test_no_index_beyond_a_table_reaches_a_model_but_where_that_is_tried(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beyond: list[str] = []
    tried: list[Any] = []
    embedding, trying = torch.nn.functional.embedding, Workbench.trying

    def watched(ids: torch.Tensor, table: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return embedding(ids, table, *args, **kwargs)
        except IndexError:
            if not tried:
                beyond.append(f"{int(ids.max())} of {len(table)}")
            raise

    @contextmanager
    def noted(self: Workbench, built: Any) -> Iterator[Any]:
        with trying(self, built) as copy:
            tried.append(built)
            yield copy
            tried.pop()

    monkeypatch.setattr(torch.nn.functional, "embedding", watched)
    monkeypatch.setattr(Workbench, "trying", noted)
    check(shipped("reference")[name], profile="quick")
    assert not beyond
