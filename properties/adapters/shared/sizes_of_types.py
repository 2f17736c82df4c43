"""What single model types of Hugging Face transformers need besides small sizes: theirs hang together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from veriformer.properties.subject.sizes import DrawnConfig

WINDOW = 5
"""What windows become: the longest of the small lengths that are drawn, 2 to 9, pass it by several tokens."""

BOTH = ("sliding_attention", "full_attention")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

OF_TYPE: Mapping[str, Callable[[DrawnConfig], dict[str, Any]]] = {
    "mamba2": lambda c: {"head_dim": 2 * c.d_model // c.num_heads},
    "reformer": lambda c: {
        "axial_pos_embds_dim": (c.d_model // 2,) * 2,
        "axial_pos_shape": (8, c.max_len // 8),
        "max_position_embeddings": c.max_len,
        "hash_seed": 0,  # else two equal calls differ, by its documentation
        "num_buckets": 4,  # else the length of the first call decides
    },
    "bamba": lambda c: {"attn_layer_indices": [1]},
    "granitemoehybrid": lambda c: {"layer_types": ["mamba", "attention"]},
    "zamba2": lambda c: {"attention_hidden_size": 2 * c.d_model, "attention_head_dim": 2 * c.d_head},
    "diffllama": lambda c: {"attention_dropout": 0.0},
    "xmod": lambda c: {"default_language": "en_XX"},
    "dots1": lambda c: {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": lambda c: {"num_experts_per_tok": 2},
    "esm": lambda c: {"pad_token_id": c.vocab_size, "mask_token_id": c.vocab_size + 3},
    "falcon_h1": lambda c: {"mamba_d_head": 2 * c.d_model // c.num_heads},
    "jamba": lambda c: {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": lambda c: {"block_types": ("recurrent", "attention")},
    "led": lambda c: {"attention_window": [8] * c.num_layers},
    "longformer": lambda c: {"attention_window": [8] * c.num_layers},
    "longcat_flash": lambda c: {"qk_head_dim": 2 * c.d_head, "num_key_value_heads": c.num_heads},
    "mimo_v2_flash": lambda c: {
        "num_key_value_heads": c.num_heads // 2,  # its sliding layers have twice as many
        "rope_parameters": {kind: {**_ROPE, "partial_rotary_factor": 0.5} for kind in BOTH},  # a third of 16 is none
    },
    "esmc": lambda c: {"num_key_value_heads": c.num_heads},
    "mobilebert": lambda c: {"intra_bottleneck_size": c.d_model, "true_hidden_size": c.d_model},
    "lfm2": lambda c: {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": lambda c: {"layer_types": ["conv", "full_attention"]},
    "xlstm": lambda c: {
        "qk_dim_factor": 64 / c.d_model,
        "v_dim_factor": 64 / c.d_model,
    },  # as its cache
    "prophetnet": lambda c: {"num_buckets": 4, "relative_max_distance": 8},  # the last bucket begins at distance 4
    "mpnet": lambda c: {"relative_attention_num_buckets": 32},  # it has 32 whatever is configured
    "zamba": lambda c: {
        "attention_hidden_size": 2 * c.d_model,
        "attention_head_dim": 2 * c.d_head,
        "layers_block_type": ["hybrid"] * c.num_layers,  # its parts are shared: it refuses to have one such layer
    },
    "funnel": lambda c: {
        "block_sizes": [c.num_layers],
        "block_repeats": [1],
    },  # pooling refuses two tokens
    "cohere_compass_text": lambda c: {
        "layer_types": list(BOTH),
        "rope_parameters": {kind: dict(_ROPE) for kind in BOTH},
    },
    "deepseek_v4": lambda c: {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3}},
    "dots3_note_text": lambda c: {
        "layer_types": ["sliding_attention", "indexed_attention"],
        "head_dim": 2 * c.d_head,
        "swa_head_dim": 2 * c.d_head,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_v_head_dim": c.d_head,
        "swa_qk_nope_head_dim": c.d_head,
        "swa_qk_rope_head_dim": c.d_head,
        "swa_num_attention_heads": c.num_heads,
        "swa_num_key_value_heads": c.num_heads,
    },
    "qwen4_exp_text": lambda c: {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": c.num_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": c.d_head,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
}
"""What single models need besides, since their sizes hang together in a way of their own."""
