"""OPT in the manner of fairseq: a decoder with incremental state, positions that count real tokens."""

from typing import Dict, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


class LearnedPositionalEmbedding(nn.Embedding):
    """Positions count the real tokens and begin at 2; the ids 0 and 1 belonged to padding once."""

    offset = 2

    def __init__(self, num_embeddings: int, embedding_dim: int):
        super().__init__(num_embeddings + self.offset, embedding_dim)
        self.num_embeddings_real = num_embeddings

    def forward(self, mask: Tensor, past_length: int = 0):
        if mask.size(1) > self.num_embeddings_real:
            raise ValueError(f"{mask.size(1)} positions, the table has {self.num_embeddings_real}")
        positions = torch.cumsum(mask.long(), dim=1) * mask.long() - 1
        return super().forward(positions[:, past_length:] + self.offset)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor, state: Optional[Dict[str, Tensor]] = None):
        """key_padding_mask: True is padding, of all keys there are, those of the state among them."""
        bsz, tgt_len, embed_dim = x.size()

        def heads(states):
            return states.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x) * self.scaling), heads(self.k_proj(x)), heads(self.v_proj(x))
        if state is not None:
            if "prev_key" in state:
                k = torch.cat([state["prev_key"], k], dim=2)
                v = torch.cat([state["prev_value"], v], dim=2)
            state["prev_key"], state["prev_value"] = k, v
        src_len = k.size(2)
        future = torch.ones(tgt_len, src_len, dtype=torch.bool, device=x.device).triu(src_len - tgt_len + 1)
        blocked = future[None, None] | key_padding_mask[:, None, None, :]
        attn_weights = torch.matmul(q, k.transpose(-1, -2)).masked_fill(blocked, torch.finfo(q.dtype).min)
        wide = attn_weights if attn_weights.dtype == torch.float64 else attn_weights.float()
        attn_probs = F.softmax(wide, dim=-1).masked_fill(blocked, 0.0).type_as(v)
        attn_probs = F.dropout(attn_probs, p=self.dropout, training=self.training)
        attn = torch.matmul(attn_probs, v).transpose(1, 2).reshape(bsz, tgt_len, embed_dim)
        return self.out_proj(attn)


class TransformerDecoderLayer(nn.Module):
    def __init__(self, embed_dim, ffn_dim, num_heads, dropout):
        super().__init__()
        self.dropout = dropout
        self.self_attn = MultiheadAttention(embed_dim, num_heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1 = nn.Linear(embed_dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, key_padding_mask, state=None):
        residual = x
        x = self.self_attn(self.self_attn_layer_norm(x), key_padding_mask, state)
        x = residual + F.dropout(x, p=self.dropout, training=self.training)
        residual = x
        x = self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))
        return residual + F.dropout(x, p=self.dropout, training=self.training)


class TransformerDecoder(nn.Module):
    def __init__(self, vocab_size, embed_dim, ffn_dim, num_heads, num_layers, max_positions, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.embed_tokens = nn.Embedding(vocab_size, embed_dim)
        self.embed_positions = LearnedPositionalEmbedding(max_positions, embed_dim)
        self.layers = nn.ModuleList(
            [TransformerDecoderLayer(embed_dim, ffn_dim, num_heads, dropout) for _ in range(num_layers)]
        )
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.apply(self.init_params)

    @staticmethod
    def init_params(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def new_state(self):
        return {"layers": [{} for _ in self.layers], "real": None}

    def forward(self, prev_output_tokens, mask=None, incremental_state=None):
        """mask: of these tokens alone, True where they are real."""
        if mask is None:
            mask = torch.ones_like(prev_output_tokens, dtype=torch.bool)
        past_length = 0
        if incremental_state is not None:
            if incremental_state["real"] is not None:
                past_length = incremental_state["real"].size(1)
                mask = torch.cat([incremental_state["real"], mask], dim=1)
            incremental_state["real"] = mask
        x = self.embed_tokens(prev_output_tokens) + self.embed_positions(mask, past_length)
        x = F.dropout(x, p=self.dropout, training=self.training)
        for i, layer in enumerate(self.layers):
            x = layer(x, ~mask, None if incremental_state is None else incremental_state["layers"][i])
        return F.linear(self.layer_norm(x), self.embed_tokens.weight)

    def reorder_incremental_state(self, incremental_state, new_order: Tensor):
        """What beam search calls when its hypotheses have changed places."""
        for layer in incremental_state["layers"]:
            for name in layer:
                layer[name] = layer[name].index_select(0, new_order)
        incremental_state["real"] = incremental_state["real"].index_select(0, new_order)


def incremental(model, chunks, attention_mask=None, reorder=None):
    state, outputs, start = model.new_state(), [], 0
    for chunk in chunks:
        end = start + chunk.size(1)
        mask = None if attention_mask is None else attention_mask[:, start:end]
        outputs.append(model(chunk, mask, state))
        if start == 0 and reorder is not None:
            model.reorder_incremental_state(state, reorder)
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        start = end
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    state = model.new_state() if use_cache else None
    last = tokens
    for _ in range(steps):
        last = model(last if use_cache else tokens, None, state)[:, -1:].argmax(dim=-1)
        tokens = torch.cat([tokens, last], dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    name="OPT",
    build=lambda c: TransformerDecoder(
        c.vocab_size, c.d_model, c.d_ff, c.num_heads, c.num_layers, c.max_len, dropout=c.dropout
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=incremental,
    generate=generate,
    declares={
        "causal": True,
        "positions": "learned",
        "position_offset": 2,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "embedding_scale": False,
        "init": "other",
        "padding_side": "both",
        "reorders_mask": True,
        "beyond_max_len": "error",
        "memory": "quadratic",
    },
)
