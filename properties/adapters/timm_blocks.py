"""timm: the attention and the blocks of its vision transformers, on embeddings `[B, T, D]`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from veriformer.properties.adapters.shared.plain_calls import call
from veriformer.properties.adapters.shared.torchvision_stand_in import name_operators
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def _vision_transformer() -> Any:
    name_operators()
    from timm.models import vision_transformer

    return vision_transformer


def build_attention(config: Any, **options: Any) -> nn.Module:
    """Return the attention of a vision transformer."""
    _vision_transformer()
    from timm import layers

    fused, name = options.pop("fused", True), options.pop("layer", "Attention")
    options = {option: value(config) if callable(value) else value for option, value in options.items()}
    if options.pop("norm", False):
        options["norm_layer"] = nn.LayerNorm
    attention = getattr(layers, name)(
        config.d_model, config.num_heads, attn_drop=config.dropout, proj_drop=config.dropout, **options
    )
    if attention.fused_attn is not True:
        raise RuntimeError(f"timm's {name} does not attend by F.scaled_dot_product_attention from the start")
    attention.fused_attn = fused
    return attention


def build_block(config: Any, block: str = "Block", **options: Any) -> nn.Module:
    """Return one block of a vision transformer."""
    found = _vision_transformer()
    sizes = {"mlp_ratio": config.d_ff / config.d_model, "proj_drop": config.dropout, "attn_drop": config.dropout}
    return getattr(found, block)(config.d_model, config.num_heads, **sizes, **options)


def build_stack(config: Any, name: str) -> nn.Module:
    """Return the blocks of a released vision transformer of the drawn sizes, with its final norm."""
    _vision_transformer()
    import timm

    model = timm.create_model(
        name, embed_dim=config.d_model, depth=config.num_layers, num_heads=config.num_heads, img_size=32, patch_size=16,
        proj_drop_rate=config.dropout, attn_drop_rate=config.dropout, num_classes=0,
    )  # fmt: skip
    return nn.Sequential(*model.blocks, model.norm)


def attend(model: Any, x: Any, attention_mask: Any = None) -> Any:
    """Call attention or a block; a mask `[B, T]` or pairwise is given as one a head, True = may attend."""
    if attention_mask is None:
        return model(x)
    if attention_mask.shape == x.shape[:2]:
        return model(x, attn_mask=attention_mask[:, None, None, :])
    return model(x, attn_mask=attention_mask[:, None] if attention_mask.ndim == 3 else attention_mask)


def attend_causally(model: Any, x: Any) -> Any:
    """Call attention or a block with its own causal flag."""
    return model(x, is_causal=True)


def projections(model: Any) -> Any:
    """Return writable views of the projections and their biases."""
    width = model.qkv.in_features
    parts = {"o": model.proj.weight}
    for number, name in enumerate("qkv"):
        rows = slice(number * width, (number + 1) * width)
        parts[name] = model.qkv.weight[rows]
        if model.qkv.bias is not None:
            parts[f"{name}_bias"] = model.qkv.bias[rows]
    if model.proj.bias is not None:
        parts["o_bias"] = model.proj.bias
    return parts


_PLAIN = {"causal": False, "positions": "none"}


def _attention(label: str, causal: bool = False, domain: Any = None, **options: Any) -> Subject:
    plain = not causal and not options.get("qk_norm") and "layer" not in options
    return Subject(
        kind="self_attention", name=f"timm {options.get('layer', 'Attention')} ({label})",
        build=partial(build_attention, **options),
        forward=attend_causally if causal else attend, mask_forms=() if causal else ("padding", "pairwise"),
        projections=projections if plain else None, domain=domain or {},
        declares={**_PLAIN, "causal": causal, "query_key_norm": bool(options.get("qk_norm"))},
    )  # fmt: skip


def _block(label: str, block: str = "Block", masks: bool = True, **options: Any) -> Subject:
    return Subject(
        kind="layer", name=f"timm {block} ({label})", build=partial(build_block, block=block, **options),
        forward=attend if masks else call, mask_forms=("padding",) if masks else (), declares=_PLAIN,
    )  # fmt: skip


def _stack(name: str) -> Subject:
    return Subject(
        kind="encoder", name=f"timm {name}", inputs="embeddings", build=partial(build_stack, name=name), forward=call,
        domain={"num_layers": (2, 3)}, declares=_PLAIN,
    )  # fmt: skip


_STACKS = (
    "vit_tiny_patch16_224", "deit_small_patch16_224", "vit_small_patch14_dinov2", "deit3_small_patch16_224",
    "vit_base_patch16_siglip_224", "vit_base_patch16_clip_224", "vit_small_patch16_dinov3",
)  # fmt: skip
SHIPPED: Mapping[str, Subject] = {
    "attention": _attention("plain"),
    "attention-bias": _attention("bias", qkv_bias=True),
    "attention-qk-norm": _attention("query-key norm", qk_norm=True, norm=True),
    "attention-causal": _attention("is_causal", causal=True),
    "attention-unfused": _attention("unfused", fused=False),
    "attention-unfused-causal": _attention("unfused, is_causal", causal=True, fused=False),
    "attention-gated-grouped": _attention(
        "gated, grouped heads, query-key norm",
        layer="AttentionRope",
        gated=True,
        qkv_fused=False,
        qk_norm=True,
        norm=True,
        num_kv_heads=lambda c: c.num_key_value_heads,
        domain={"d_model": (8, 16), "num_heads": (2, 4), "num_key_value_heads": (2,)},
    ),
    "attention-differential": _attention("plain", layer="DiffAttention"),
    "block": _block("plain", qkv_bias=True),
    "block-layerscale": _block("layer scale", init_values=0.1),
    "block-qk-norm": _block("query-key norm", qk_norm=True),
    "block-post-norm": _block("post-norm", "ResPostBlock"),
    "block-parallel": _block("parallel", "ParallelThingsBlock"),
    "block-parallel-scaling": _block("parallel scaling", "ParallelScalingBlock"),
    **{name: _stack(name) for name in _STACKS},
}


def recognise(thing: Any, kind: str | None = None) -> Subject | None:
    """Recognise instances of timm's attention and blocks."""
    module = type(thing).__module__
    if not module.startswith("timm.") or not (hasattr(thing, "attn") or hasattr(thing, "qkv")):
        return None
    attention = getattr(thing, "attn", thing)
    qkv = getattr(attention, "qkv", None)
    if qkv is None:
        return None
    sizes = DrawnConfig(d_model=qkv.in_features, num_heads=attention.num_heads, num_key_value_heads=attention.num_heads)
    return Subject(kind=kind or ("self_attention" if attention is thing else "layer"), name=type(thing).__name__,
                   module=thing, config=sizes, forward=attend, mask_forms=("padding",), declares=_PLAIN)  # fmt: skip
