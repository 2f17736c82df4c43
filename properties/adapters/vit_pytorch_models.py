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
    **{
        name: Subject(kind="encoder", inputs="embeddings", name=f"vit-pytorch {label}",
                      build=partial(build_vit, module=module, **options), forward=call,
                      declares={**_EMBEDDED, **facts})
        for name, label, module, options, facts in (
            ("flash-vit", "SimpleFlashAttnViT", "simple_flash_attn_vit", {"use_flash": True}, {}),
            ("flash-vit-off", "SimpleFlashAttnViT (not flash)", "simple_flash_attn_vit", {"use_flash": False}, {}),
            ("qk-norm-vit", "SimpleViT (query-key norm)", "simple_vit_with_qk_norm", {}, {"query_key_norm": True}),
            ("deep-vit", "DeepViT", "deepvit", {}, {}),
            ("small-dataset-vit", "ViT for small datasets", "vit_for_small_dataset", {}, {}),
            ("parallel-vit", "Parallel ViT", "parallel_vit", {}, {}),
            ("value-residual-vit", "SimpleViT (value residual)", "simple_vit_with_value_residual", {}, {}),
        )
    },
}  # fmt: skip
