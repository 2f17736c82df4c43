WHAT = "the incremental state of cross-attention has one name for all layers: from the second layer on cached decoding uses keys and values of the first (line 68)"
"""BART as in fairseq: post-norm, learned positions that begin at 2, one shared embedding, incremental state for decoding."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

OFFSET = 2


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, mask=None, state=None, name="", static_kv=False):
        q = self.split(self.q_proj(query)) * self.head_dim**-0.5
        if static_kv and state is not None and name in state:
            k, v = state[name]
        else:
            k, v = self.split(self.k_proj(key)), self.split(self.v_proj(key))
            if state is not None:
                if not static_kv and name in state:
                    k = torch.cat([state[name][0], k], dim=2)
                    v = torch.cat([state[name][1], v], dim=2)
                state[name] = (k, v)
        weights = torch.matmul(q, k.transpose(2, 3))
        if mask is not None:
            weights = weights.masked_fill(~mask, torch.finfo(weights.dtype).min)
        attn = torch.matmul(F.softmax(weights, dim=-1), v)
        return self.out_proj(attn.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = MultiheadAttention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, mask):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, ffn, index):
        super().__init__()
        self.index = index
        self.self_attn, self.self_attn_layer_norm = MultiheadAttention(dim, heads), nn.LayerNorm(dim)
        self.encoder_attn, self.encoder_attn_layer_norm = MultiheadAttention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def key(self, module):
        return f"{module}.{self.index}.attn_state"

    def forward(self, x, encoder_out, encoder_mask, self_mask, state=None):
        y = self.self_attn(x, x, self_mask, state=state, name=self.key("self"))
        x = self.self_attn_layer_norm(x + y)
        y = self.encoder_attn(
            x, encoder_out, encoder_mask, state=state, name="encoder_decoder.attn_state", static_kv=True
        )
        x = self.encoder_attn_layer_norm(x + y)
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class BART(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder_positions = nn.Embedding(c.max_len + OFFSET, c.d_model)
        self.decoder_positions = nn.Embedding(c.max_len + OFFSET, c.d_model)
        self.encoder_layernorm_embedding = nn.LayerNorm(c.d_model)
        self.decoder_layernorm_embedding = nn.LayerNorm(c.d_model)
        self.encoder = nn.ModuleList([EncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList(
            [DecoderLayer(c.d_model, c.num_heads, c.d_ff, i) for i in range(c.num_layers)]
        )

    def embed(self, tokens, table, norm, start=0):
        positions = torch.arange(start, start + tokens.size(1), device=tokens.device) + OFFSET
        return norm(self.shared(tokens) + table(positions))

    def encode(self, source, source_mask=None):
        mask = None if source_mask is None else source_mask[:, None, None, :]
        x = self.embed(source, self.encoder_positions, self.encoder_layernorm_embedding)
        for layer in self.encoder:
            x = layer(x, mask)
        return x, mask

    def decode(self, target, encoder_out, encoder_mask, target_mask=None, state=None, start=0):
        length = target.size(1)
        mask = torch.ones(length, start + length, dtype=torch.bool, device=target.device).tril(start)[None, None]
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        x = self.embed(target, self.decoder_positions, self.decoder_layernorm_embedding, start)
        for layer in self.decoder:
            x = layer(x, encoder_out, encoder_mask, mask, state)
        return F.linear(x, self.shared.weight)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, *self.encode(source, source_mask), target_mask)


def incremental(model, source, chunks):
    encoder_out, encoder_mask = model.encode(source)
    state, outputs, start = {}, [], 0
    for chunk in chunks:
        outputs.append(model.decode(chunk, encoder_out, encoder_mask, state=state, start=start))
        start += chunk.size(1)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="BART",
    build=BART,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=incremental,
    declares={
        "positions": "learned",
        "position_offset": OFFSET,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "tied": True,
        "padding_side": "right",
        "bias": True,
    },
)
