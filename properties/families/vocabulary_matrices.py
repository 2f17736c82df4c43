"""Which parameters are matrices of the vocabulary by the width: what `parameters.tied` counts."""

from __future__ import annotations

from torch import nn


def shares_with_the_target(module: nn.Module, shape: tuple[int, int]) -> bool:
    """Whether there are two tables of the vocabulary and no other matrix of it: the output is one of them."""
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding) and m.weight.shape == shape}
    linear = {id(m.weight) for m in module.modules() if isinstance(m, nn.Linear) and m.weight.shape == shape}
    return len(tables) == 2 and linear <= tables


def counts_wrongly(module: nn.Module) -> str:
    """Say what a method tells of the number of parameters that is neither it nor it less some embedding tables."""
    whole = sum(p.numel() for p in module.parameters())
    tables = {id(p): p.numel() for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    allowed = {whole}
    for size in list(tables.values())[:10]:
        allowed |= {told - size for told in allowed}
    for name in ("num_parameters", "get_num_params", "num_params", "count_parameters", "count_params"):
        try:
            told = getattr(module, name)()
        except Exception:
            continue
        if type(told) is int and told not in allowed:
            return f"{name}() says {told:,} of {whole:,}"
    return ""


def matrices(module: nn.Module, shape: tuple[int, int]) -> int:
    """Return how many different parameters have a shape."""
    return len({id(p) for p in module.parameters() if tuple(p.shape) == shape})


def factorised(module: nn.Module, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the shape of the one table of a vocabulary that is narrower or wider than the model; else what is given.

    Args:
        module: to look at.
        shape: rows of the vocabulary, and the model's width.
    """
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == shape[0]]
    widths = {table.shape[1] for table in tables}
    return (shape[0], widths.pop()) if len(widths) == 1 else shape


def matrices_but_further_tables(module: nn.Module, shape: tuple[int, int]) -> int:
    """Return how many parameters have a shape, all embedding tables counted as one where there are several.

    Token types, or embeddings of every layer, may have as many rows as the vocabulary: which of them the output shares
    is not known, and that it has no matrix of its own is.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding) and m.weight.shape == shape}
    others = {id(p) for p in module.parameters() if tuple(p.shape) == shape} - tables
    return len(others) + bool(tables)
