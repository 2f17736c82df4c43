"""Options of the configurations of Hugging Face transformers that change what is computed, as models of their own.

A model type as released reaches one branch of its code; releases break in the others. To add one, add a row.
What always raises has no row, and a page in reports/gallery/findings/ (FlauBERT with `pre_norm`; Reformer as a decoder,
whose reversible layers give gradients in train mode alone, where a length must fit its chunks and axial positions, and
which raises with a mask unless it does: no length of a check but one would be left).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SLIDING = ["sliding_attention"] * 2
_MIXED = ["full_attention", "sliding_attention"]
_THETA = {"rope_theta": 10000.0}


@dataclass(frozen=True)
class Variant:
    """A model type with other options.

    Attributes:
        model_type: as the library knows it.
        options: of the configuration, which win over the small sizes.
        task: what it is made into, where that is another than what the type is mostly used for.
        facts: what its documentation says of these options.
        sizes: that it is limited to.
        cache: "static" for the cache of a fixed size; else the one that the model makes itself.
    """

    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cache: str = ""


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, **_THETA, **more}}


VARIANTS: Mapping[str, Variant] = {
    # how positions enter
    "falcon-alibi": Variant("falcon", {"alibi": True}),
    "falcon-alibi-eager": Variant("falcon", {"alibi": True, "attn_implementation": "eager"}),
    "esm-rotary": Variant("esm", {"position_embedding_type": "rotary"}),
    "granitemoehybrid-rope": Variant("granitemoehybrid", {"position_embedding_type": "rope"}),
    "zamba2-rope": Variant("zamba2", {"use_mem_rope": True}),
    "deberta-relative": Variant(
        "deberta", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
    ),
    "deberta-v2-relative": Variant(
        "deberta-v2",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 4, "share_att_key": True,
         "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    ),
    "llama-linear": Variant("llama", _rope("linear", factor=2.0)),
    "llama-dynamic": Variant("llama", _rope("dynamic", factor=2.0, original_max_position_embeddings=8)),
    "llama-yarn": Variant(
        "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16),
        facts={"attention_scale": (0.1 * math.log(4) + 1) ** 2 / 8**0.5},  # its paper's temperature
        sizes={"num_heads": (4,)},
    ),
    "llama-llama3": Variant(
        "llama",
        _rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    # what a query sees
    "bert-causal": Variant("bert", task="decoder"),
    "roberta-causal": Variant("roberta", task="decoder"),
    "roformer-causal": Variant("roformer", task="decoder"),
    "big_bird-causal": Variant(
        "big_bird", {"attention_type": "original_full"}, task="decoder", facts={"sparse": False}
    ),
    "bart-causal": Variant("bart", task="decoder"),
    "pegasus-causal": Variant("pegasus", task="decoder"),
    "xlm-causal": Variant("xlm", {"causal": True}, facts={"causal": True}),
    "gemma3_text-bidirectional": Variant(
        "gemma3_text", {"use_bidirectional_attention": True}, facts={"causal": False, "sparse": True}
    ),
    "qwen2-sliding": Variant("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": _MIXED}),
    "phi3-sliding": Variant("phi3", {"sliding_window": 5}),
    "mixtral-sliding": Variant("mixtral", {"sliding_window": 5}),
    "gemma3_text-sliding": Variant("gemma3_text", {"layer_types": _SLIDING}),
    "gpt_oss-sliding": Variant("gpt_oss", {"layer_types": _SLIDING}),
    "gpt_neo-local": Variant(
        "gpt_neo", {"attention_types": [[["local"], 2]], "attention_layers": ["local"] * 2}, facts={"window": 5}
    ),
    "llama4_text-chunked": Variant("llama4_text", {"layer_types": ["chunked_attention"] * 2}, facts={"sparse": True}),
    "longt5-global": Variant(
        "longt5", {"encoder_attention_type": "transient-global"},
        facts={"padding_side": "right"},  # its global tokens are sums over blocks, counted from the start of a row
    ),
    # how keys and values are kept
    "llama-static-cache": Variant("llama", cache="static"),
    "mistral-static-cache": Variant("mistral", cache="static"),
    "gemma3_text-static-cache": Variant("gemma3_text", cache="static"),
    "gemma3n_text-shared-kv": Variant(
        "gemma3n_text", {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        sizes={"num_layers": (4,)},
    ),
    "gpt_bigcode-multi-head": Variant("gpt_bigcode", {"multi_query": False}),
    # how a layer is put together
    "falcon-eager": Variant("falcon", {"attn_implementation": "eager"}),
    "falcon-sequential": Variant("falcon", {"parallel_attn": False, "bias": True}),
    "falcon-new-decoder": Variant("falcon", {"new_decoder_architecture": True}),
    "gpt_neox-sequential": Variant("gpt_neox", {"use_parallel_residual": False}),
    "stablelm-parallel": Variant("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "phi-query-key-norm": Variant("phi", {"qk_layernorm": True}, facts={"query_key_norm": True}),
    "cohere-query-key-norm": Variant("cohere", {"use_qk_norm": True}, facts={"query_key_norm": True}),
    "opt-post-norm": Variant("opt", {"do_layer_norm_before": False}),
    "bloom-post-norm-residual": Variant(
        "bloom", {"apply_residual_connection_post_layernorm": True}, facts={"norm_placement": "post"}
    ),
    "gpt2-upcast": Variant("gpt2", {"reorder_and_upcast_attn": True}),
    "mamba2-limited-steps": Variant("mamba2", {"time_step_limit": (0.1, 1.0)}),
}  # fmt: skip
"""Name after `hf:` to what it is."""
