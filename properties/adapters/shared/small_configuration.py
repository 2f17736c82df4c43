"""From any configuration class of Hugging Face transformers to a small configuration of it.

Libraries name the same size in a hundred ways. One table of name patterns gives each size a small value; lists with one
entry a layer are cut so that every kind of layer stays; configurations inside configurations are shrunk too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from veriformer.properties.adapters.shared.sizes_of_types import BOTH, OF_TYPE, WINDOW
from veriformer.properties.subject.sizes import DrawnConfig

SPECIAL_TOKENS = 4
"""Rows of the vocabulary beyond the drawn one: ids of padding, begin, end and mask, which are never drawn."""

Rule = Callable[[DrawnConfig], Any]

_RULES: tuple[tuple[str, Rule], ...] = (
    # experts and routing before sizes: their names contain those
    (
        r"num_experts_per_tok num_experts_per_token moe_k moe_topk top_k_experts moe_top_k "
        r"num_selected_experts expert_top_k ffn_top_k",
        lambda c: 2,
    ),
    (r"topk_group topk_groups", lambda c: 1),
    (r"n_group num_expert_group\w* expert_group_num n_groups num_groups", lambda c: 2),
    (r"mamba_n_groups", lambda c: 1),
    (
        r"num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts experts_num "
        r"n_experts",
        lambda c: 4,
    ),
    (
        r"n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts",
        lambda c: 1,
    ),
    (
        r"first_k_dense_replace moe_layer_start_index num_dense_layers first_dense_layers "
        r"num_nextn_predict_layers num_dense_layer mtp_num_layers num_kv_shared_layers",
        lambda c: 0,
    ),
    (r"expert_capacity", lambda c: 64),
    # heads
    (r"index_n_heads", lambda c: 16),  # of few heads all scores of a key are often cut to zero: a choice among equals
    (
        r"num_key_value_heads num_kv_heads n_head_kv kv_heads num_attention_groups "
        r"num_global_key_value_heads swa_num_key_value_heads num_query_groups",
        lambda c: c.num_key_value_heads,
    ),
    (
        r"n_heads? num_heads h nhead attention_heads num_qk_heads num_v_heads rnn_heads num_attention_head "
        r"\w*attention_heads linear_num_\w*heads lightning_nh num_attn_heads \w+_num_heads "
        r"n_q_head mamba_n_heads n_mamba_heads lightning_nkv",
        lambda c: c.num_heads,
    ),
    (
        r"head_dim d_kv kv_channels attention_head_size dim_head d_head qk_nope_head_dim qk_rope_head_dim "
        r"v_head_dim head_size attention_head_dim index_head_dim \w*head_dim rotary_dim rope_dim "
        r"key_length value_length attention_key_dim lightning_head_dim",
        lambda c: c.d_head,
    ),
    (
        r"kv_lora_rank q_lora_rank o_lora_rank lora_rank \w+_lora_rank low_rank_dim lora_dim",
        lambda c: 16,
    ),
    # layers
    (
        r"num_layers num_hidden_layers n_layers? depth layers encoder_layers decoder_layers "
        r"num_decoder_layers num_encoder_layers \w*num_hidden_layers \w*_num_layers",
        lambda c: c.num_layers,
    ),
    # widths
    (
        r"d_ff \w*ffn_dim \w*intermediate_size\w* n_inner d_inner ffn_hidden_size \w*ffn_hidden_size "
        r"dim_ff mlp_dim hidden_dim intermediate_dim ffn_dim\w* mlp_hidden_size \w*intermediate_dim "
        r"feed_forward_size moe_intermediate_size",
        lambda c: c.d_ff,
    ),
    (
        r"hidden_size d_model n_embd embed_dim dim emb_dim embedding_size embedding_dim "
        r"word_embed_proj_dim \w*hidden_size d_embed model_dim encoder_width lru_width projection_dim "
        r"attention_hidden_size input_embedding_size dim_model token_embedding_size",
        lambda c: c.d_model,
    ),
    # vocabulary and lengths
    (r"\w*vocab_size\w* n_token n_words vocabulary_size", lambda c: c.vocab_size + SPECIAL_TOKENS),
    (
        r"max_position_embeddings n_positions max_len n_ctx max_seq_len context_length max_sequence_length "
        r"max_source_positions max_target_positions seq_length max_encoder_position_embeddings "
        r"\w*max_position_embeddings prompt_length max_seq_length max_relative_positions",
        lambda c: c.max_len + c.vocab_size + SPECIAL_TOKENS,
    ),
    # state-space and recurrent parts
    (r"state_size ssm_state_size mamba_d_state \w*d_state", lambda c: 4),
    (r"time_step_rank mamba_dt_rank dt_rank", lambda c: 4),
    (r"chunk_size mamba_chunk_size", lambda c: 8),
    (r"mamba_d_head mamba_headdim", lambda c: 2 * c.d_model // c.num_heads),
    (r"mamba_d_ssm", lambda c: 2 * c.d_model),
    # windows, blocks, landmarks and buckets: smaller than the lengths of a check, or no check sees them at work
    (
        r"sliding_window sliding_window_size window_size attention_window_size keep_window_size",
        lambda c: WINDOW,
    ),
    (r"local_attention", lambda c: 2 * (WINDOW // 2)),  # both sides together
    (r"local_radius local_attn_chunk_length lsh_attn_chunk_length attention_chunk_size", lambda c: WINDOW - 1),
    (r"index_topk", lambda c: WINDOW),
    (r"index_topk_blocks num_random_blocks index_local_blocks num_mem_blocks", lambda c: 1),
    (r"block_size global_block_size index_block_size", lambda c: 4),
    (r"attention_window", lambda c: 8),
    (r"num_global_tokens num_latents", lambda c: 3),
    (r"hidden_size_per_layer_input laurel_rank", lambda c: 8),
    (r"conv_kernel_size", lambda c: 3),  # odd: it reads as many tokens before as behind
    (r"relative_attention_num_buckets", lambda c: 8),
    (r"relative_attention_max_distance", lambda c: 16),
    # dropout
    (r"\w*dropout\w* \w*_pdrop \w*_drop dropout_rate", lambda c: c.dropout),
    (r"\w*layerdrop router_jitter_noise \w*jitter\w* drop_path_rate", lambda c: 0.0),
)
"""Names of a size, as patterns separated by spaces, and what it becomes; the first row that names it counts."""


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3, "cls_token_id": 1,
           "sep_token_id": 2, "decoder_start_token_id": 0, "sos_token_id": 1, "unk_token_id": 3,
           "image_token_id": 3, "audio_token_id": 3, "video_token_id": 3}  # fmt: skip
_UNSET = ("head_dim", "num_key_value_heads", "vocab_size")
"""Sizes that some configurations leave open, and whose models do not work then."""

_KEPT = {"model_type", "transformers_version", "torch_dtype", "dtype", "architectures", "id2label", "label2id"}


def small_configuration(config_class: type, sizes: DrawnConfig, **more: Any) -> Any:
    """Return a small configuration: every size that has a known name is set, everything else stays as released.

    Args:
        config_class: a `PreTrainedConfig`.
        sizes: what the sizes become; dropouts become `sizes.dropout`.
        more: values by name, which win.

    Raises:
        Exception: whatever the class raises where such sizes do not fit together.
    """
    released = config_class()
    values: dict[str, Any] = {}
    for name, value in released.to_dict().items():
        if name in _KEPT or name.startswith("_"):
            continue
        inner = vars(released).get(name)
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            values[name] = small_configuration(type(inner), sizes)
        elif name in _TOKENS and value is not None:
            values[name] = sizes.vocab_size + _TOKENS[name]
        elif value is None and name in _UNSET:
            values[name] = _small(name, sizes.vocab_size, sizes)
        elif (found := _small(name, value, sizes)) is not None:
            values[name] = found
    layers = _number_of_layers(released)
    if _has_unused_window(values, released):
        values["layer_types"] = [BOTH[i % 2] for i in range(sizes.num_layers)]
    for name, value in released.to_dict().items():
        if name in values and name == "layer_types":
            continue
        if isinstance(value, list) and layers and len(value) == layers and layers > sizes.num_layers:
            kinds = _every_kind(value, sizes.num_layers)
            values[name] = [kind if (small := _small(name, kind, sizes)) is None else small for kind in kinds]
        elif name not in values and isinstance(value, list) and value and name.endswith("_layers"):
            kept = [i for i in value if isinstance(i, int) and i < sizes.num_layers]
            values[name] = kept if all(isinstance(i, int) for i in value) else value
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = sizes.num_heads  # latent attention: every head has keys of its own
    values |= OF_TYPE.get(released.model_type, lambda c: {})(sizes)
    values |= {name: value for name, value in more.items() if value is not None}
    return config_class(**values)


def _has_unused_window(values: Mapping[str, Any], released: Any) -> bool:
    """Whether layers may have the window of a configuration, and none has it as released."""
    kinds = set(getattr(released, "layer_types", None) or ())
    may = getattr(released, "use_sliding_window", True) and bool(values.get("sliding_window"))
    return may and kinds == {"full_attention"}


def _small(name: str, value: Any, sizes: DrawnConfig) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    for names, rule in _RULES:
        if any(re.fullmatch(pattern, name) for pattern in names.split()):
            small = rule(sizes)
            if isinstance(value, int) and isinstance(small, int) and value < small:
                return None if value <= 1 else small  # one key-value head stays one, no layer stays none
            return int(small) if isinstance(value, int) and float(small).is_integer() else small
    return None


def _number_of_layers(released: Any) -> int:
    for name in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        value = vars(released).get(name)
        if isinstance(value, int):
            return value
    return 0


def _every_kind(values: list[Any], length: int) -> list[Any]:
    """Cut a list of one entry a layer to `length`, keeping one entry of each kind as far as they fit.

    >>> _every_kind(["linear", "linear", "linear", "full"], 2)
    ['linear', 'full']
    """
    kinds: list[Any] = []
    for value in values:
        if value not in kinds:
            kinds.append(value)
    chosen = kinds[-length:] if len(kinds) > length else kinds
    return [chosen[i % len(chosen)] for i in range(length)]
