"""Documented conventions of model families in Hugging Face transformers, by model type; each with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_UNSCALED = {"attention_scale": "1"}  # T5 leaves it to the initialisation, Granite to a multiplier of its configuration

FACTS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "t5",
            "mt5",
            "umt5",
            "switch_transformers",
            "gpt_neo",
            "granite",
            "granite_swa",
            "granitemoe",
            "granitemoe_swa",
            "granitemoehybrid",
            "granitemoeshared",
            "gemma3n_text",
            "gemma4_text",
        ),
        _UNSCALED,
    ),
    **{
        key: {"attention_scale": 256 ** (-0.5)} for key in ("gemma2", "vaultgemma")
    },  # query_pre_attn_scalar, by default
    # its attention is over the stream and the embeddings side by side, in heads of twice the width: `head_dim / 2`
    **{key: {"attention_scale": "1/sqrt(d_head/2)"} for key in ("zamba", "zamba2")},
    "flint": {"sink": True},
    # YaRN multiplies both by 0.1 log(factor) + 1, and its default factor is 32; SIZES leaves heads of 8 channels
    "gpt_oss": {"sink": True, "attention_scale": (0.1 * math.log(32) + 1) ** 2 / 8**0.5},
    # layers with a window have a sink; values are multiplied by attention_value_scale
    "mimo_v2_flash": {"sink": True, "structure": "other"},
    "minimax": {"norm_placement": "post"},  # the residual is what the norm gave (its configuration weighs both)
    # positions (or fixed blocks) are counted from the start of a row, and no position_ids can say otherwise
    **{
        key: {"padding_side": "right"}
        for key in (
            "bart",
            "blenderbot",
            "blenderbot-small",
            "fsmt",
            "m2m_100",
            "marian",
            "mbart",
            "mvp",
            "nllb-moe",
            "pegasus",
            "plbart",
            "prophetnet",
            "seamless_m4t",
            "seamless_m4t_v2",
            "trocr",
        )
    },
    **{key: {"structure": "other"} for key in ("esmc", "minicpm3")},  # residual sums are weighed
    **{key: {"structure": "other"} for key in ("cohere", "cohere2")},  # logit_scale multiplies what the last map gives
    # keys are chosen by an indexer, by blocks or by windows to both sides, as each of their papers has it
    **{key: {"sparse": True} for key in ("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "qwen4_exp_text")},
    **{key: {"sparse": True} for key in ("big_bird", "longformer", "reformer")},
    **{key: {"sparse": True, "padding_side": "right"} for key in ("bigbird_pegasus", "led", "pegasus_x")},
    "llama4_text": {"sparse": True},  # layers that see their own chunk of the sequence alone
    **{key: {"sparse": True} for key in ("modernbert", "ultrabert")},
    **{key: {"sparse": True} for key in ("doge", "minimax_m3_vl_text")},
    **{key: {"sparse": True, "sink": True} for key in ("deepseek_v4", "hy_v4")},
    "neomme": {"sparse": True, "structure": "other"},
    "longt5": {"sparse": True, **_UNSCALED},
    "cpmant": {"causal": False},  # marks the whole input as context, which sees itself both ways
    "hrm_text": {"shared_layers": True},  # hierarchical reasoning: the same layers are applied again and again
}
"""Model type to facts. What is not here is probed."""

SIZES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "neomme": {"num_heads": (2,)},  # its two rotary axes need a quarter of the head to be a multiple of four
    "mimo_v2_flash": {"num_heads": (2,)},
    "gpt_oss": {"num_heads": (4,)},  # its scale is a fact, and goes with the width of a head
    "codegen": {"num_heads": (4,)},  # its heads are split over four parts of the released TPU layout
}
"""Model type to sizes that it is limited to."""

POSITIONS_HANDED_ON = frozenset({"whisper"})
"""Model types whose causal model hands `position_ids` on to its decoder, and does not name them in its signature."""

ENCODERS = frozenset({"cpmant", "xlnet"})
"""Model types registered for language modelling whose stack is called as an encoder."""

WITHOUT_MASK = frozenset({
    "cpmant",  # its attention_mask is a placeholder; padding is told by the token 0
    "rwkv",  # warns that it is unused
})  # fmt: skip
"""Model types that take `attention_mask` and do not read it, by their documentation."""

OTHER_INPUTS = frozenset({
    "fuyu",  # images
    "gemma4_assistant", "gemma4_unified_assistant",  # draft models: states of the model they draft for
    "perceiver",  # arrays of floats: text needs a preprocessor beside it
    "encoder-decoder",  # put together from two other models
})  # fmt: skip
"""Model types that are registered for text and need something else."""

IN_ORDER = frozenset({"xlstm"})  # its cache has no reorder_cache, and its model takes no mask
"""Model types whose cache goes on with the samples that it has."""

NOT_BY_EMBEDDINGS = frozenset({
    "gemma4_text",  # raises without input_ids: its layers embed the tokens again
    "deepseek_v4",  # its first layers choose experts by a hash of the token ids
})  # fmt: skip
"""Model types for which `inputs_embeds` alone is documented not to be an entry."""


def window_of(config: Any) -> dict[str, int]:
    """Return the window that all attentions of a causal configuration have, as a fact; none where one sees everything.

    `sliding_window` is documented to be the number of keys that a query sees, its own among them.
    """
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",)) - {"linear_attention"}
    window = getattr(config, "sliding_window", None)
    return {"window": window} if kinds == {"sliding_attention"} and isinstance(window, int) and window > 0 else {}


def declared_facts(model_type: str) -> dict[str, Any]:
    """Return what is declared of a model type."""
    return dict(FACTS.get(model_type, {}))
