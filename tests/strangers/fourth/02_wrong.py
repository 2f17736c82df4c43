"""LLaMA as a Hugging Face model has it, with a dynamic cache."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class LlamaConfig:
    def __init__(
        self,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=None,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attention_dropout=0.0,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.attention_dropout = attention_dropout


class DynamicCache:
    def __init__(self):
        self.key_cache = []
        self.value_cache = []

    def get_seq_length(self):
        return self.key_cache[0].shape[-2] if self.key_cache else 0

    def update(self, key_states, value_states, layer_idx):
        if len(self.key_cache) <= layer_idx:
            self.key_cache.append(key_states)
            self.value_cache.append(value_states)
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key_states], dim=-2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], value_states], dim=-2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]

    def reorder_cache(self, beam_idx):
        for layer_idx in range(len(self.key_cache)):
            self.key_cache[layer_idx] = self.key_cache[layer_idx].index_select(0, beam_idx)
            self.value_cache[layer_idx] = self.value_cache[layer_idx].index_select(0, beam_idx)


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        if input_dtype != torch.float64:
            hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def rotary_tables(position_ids, dim, base, dtype):
    inv_freq = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=position_ids.device) / dim)
    freqs = position_ids[:, None].to(torch.float64) * inv_freq[None, :]
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos().to(dtype), emb.sin().to(dtype)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def repeat_kv(hidden_states, n_rep):
    """From (batch, num_key_value_heads, seqlen, head_dim) to (batch, num_attention_heads, seqlen, head_dim)."""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, None, :, :, :].expand(batch, n_rep, num_key_value_heads, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class LlamaAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, hidden_states, allowed, position_embeddings, past_key_value=None):
        bsz, q_len, _ = hidden_states.size()
        query = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_value is not None:
            key, value = past_key_value.update(key, value, self.layer_idx)
        key = repeat_kv(key, self.num_key_value_groups)
        value = repeat_kv(value, self.num_key_value_groups)

        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        weights = nn.functional.softmax(scores, dim=-1, dtype=wide).masked_fill(~allowed, 0.0).to(query.dtype)
        output = torch.matmul(self.dropout(weights), value)
        return self.o_proj(output.transpose(1, 2).reshape(bsz, q_len, -1))


class LlamaMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, allowed, position_embeddings, past_key_value=None):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states = residual + self.self_attn(hidden_states, allowed, position_embeddings, past_key_value)
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        return residual + self.mlp(hidden_states)


class LlamaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=0.02)

    def forward(self, input_ids=None, attention_mask=None, past_key_values=None, inputs_embeds=None, labels=None):
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        q_len = hidden_states.shape[1]
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        position_ids = torch.arange(past, past + q_len, device=hidden_states.device)
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        position_embeddings = rotary_tables(position_ids, head_dim, self.config.rope_theta, hidden_states.dtype)

        key_positions = torch.arange(past + q_len, device=hidden_states.device)
        allowed = (key_positions[None, :] <= position_ids[:, None])[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()

        for layer in self.layers:
            hidden_states = layer(hidden_states, allowed, position_embeddings, past_key_values)
        logits = self.lm_head(self.norm(hidden_states))
        if labels is None:
            return logits
        shift_logits = logits[:, :-1].reshape(-1, self.config.vocab_size)
        return nn.functional.cross_entropy(shift_logits, labels[:, 1:].reshape(-1)), logits

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens, use_cache=True):
        cache = DynamicCache() if use_cache else None
        step_ids = input_ids
        for _ in range(max_new_tokens):
            logits = self(step_ids if use_cache else input_ids, past_key_values=cache)
            step_ids = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, step_ids], dim=-1)
        return input_ids


def decode(model, chunks, attention_mask=None, reorder=None):
    cache, outputs, end = DynamicCache(), [], 0
    for i, chunk in enumerate(chunks):
        end += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :end]
        outputs.append(model(chunk, attention_mask=mask, past_key_values=cache))
        if i == 0 and reorder is not None:
            cache.reorder_cache(reorder)
            attention_mask = None if attention_mask is None else attention_mask[reorder]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="LLaMA",
    build=lambda c: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            intermediate_size=c.d_ff,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_key_value_heads,
            attention_dropout=c.dropout,
        )
    ),
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    embed=lambda model, embeddings, attention_mask=None: model(None, attention_mask, inputs_embeds=embeddings),
    cache=decode,
    generate=lambda model, tokens, steps, use_cache: model.generate(tokens, steps, use_cache),
    loss=lambda model, tokens, labels: model(tokens, labels=labels)[0],
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "tied": False,
        "embedding_scale": False,
        "init": "other",
        "structure": "textbook",
        "padding_side": "both",
        "beyond_max_len": "works",
        "shifts_labels": True,
        "empty_loss": "nan",
        "memory": "quadratic",
    },
)
