"""vit-pytorch: the stacks of its vision transformers, on embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call, call_with_mask
from veriformer.properties.subject.subject import Subject


def build_vit(config: Any, module: str = "vit", **options: Any) -> nn.Module:
    """Return the stack of a vision transformer of vit-pytorch."""
    import importlib

    transformer = importlib.import_module(f"vit_pytorch.{module}").Transformer
    return transformer(
        dim=config.d_model,
        depth=config.num_layers,
        heads=config.num_heads,
        dim_head=config.d_head,
        mlp_dim=config.d_ff,
        **options,
    )


_EMBEDDED = {"causal": False, "positions": "none"}
SHIPPED = {
    "vit": Subject(kind="encoder", inputs="embeddings", name="vit-pytorch ViT", build=build_vit, forward=call,
                   declares=_EMBEDDED),
    "simple-vit": Subject(kind="encoder", inputs="embeddings", name="vit-pytorch SimpleViT",
                          build=partial(build_vit, module="simple_vit"), forward=call, declares=_EMBEDDED),
    "na-vit": Subject(kind="encoder", inputs="embeddings", name="vit-pytorch NaViT",
                      build=partial(build_vit, module="na_vit"), forward=call_with_mask, mask_forms=("padding",),
                      declares=_EMBEDDED),
}  # fmt: skip
