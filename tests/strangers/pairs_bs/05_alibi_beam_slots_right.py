"""fairseq-like ALiBi decoder with preallocated key-value slots and beam search reordering."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class Slots:
    """Keys and values of one layer: [beams, max_len, heads, width], filled up to `length`."""

    def __init__(self, beams, max_len, heads, width, like: Tensor):
        self.k = like.new_zeros(beams, max_len, heads, width)
        self.v = like.new_zeros(beams, max_len, heads, width)
        self.length = 0

    def append(self, k: Tensor, v: Tensor):
        end = self.length + k.size(1)
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]

    def reorder(self, new_order: Tensor):
        for buffer in (self.k, self.v):
            buffer.copy_(buffer.index_select(0, new_order))


class AlibiAttention(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()
        self.heads, self.width = heads, embed_dim // heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x, slots=None):
        q, k, v = (part.unflatten(-1, (self.heads, self.width)) for part in self.in_proj(x).chunk(3, dim=-1))
        before = 0
        if slots is not None:
            before = slots.length
            k, v = slots.append(k, v)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / self.width**0.5
        distance = (
            torch.arange(before, before + x.size(1), device=x.device)[:, None]
            - torch.arange(k.size(1), device=x.device)[None, :]
        )
        scores = scores - self.slopes.to(x.dtype)[:, None, None] * distance
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1)
        return self.out_proj(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim):
        super().__init__()
        self.self_attn = AlibiAttention(embed_dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, slots=None):
        x = self.self_attn_layer_norm(x + self.self_attn(x, slots))
        return self.final_layer_norm(x + self.fc2(torch.relu(self.fc1(x))))


class AlibiDecoder(nn.Module):
    def __init__(self, vocab_size, embed_dim, heads, layers, ffn_dim):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, embed_dim)
        self.layers = nn.ModuleList([DecoderLayer(embed_dim, heads, ffn_dim) for _ in range(layers)])
        self.output_projection = nn.Linear(embed_dim, vocab_size, bias=False)

    def new_state(self, beams, max_len):
        return [
            Slots(beams, max_len, layer.self_attn.heads, layer.self_attn.width, self.embed_tokens.weight.detach())
            for layer in self.layers
        ]

    def forward(self, tokens, incremental_state=None):
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, None if incremental_state is None else incremental_state[i])
        return self.output_projection(x)


@torch.no_grad()
def decode(model, chunks, reorder=None):
    state = model.new_state(chunks[0].size(0), sum(chunk.size(1) for chunk in chunks))
    outputs = []
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, state))
        if i == 0 and reorder is not None:
            for slots in state:
                slots.reorder(reorder)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="ALiBi decoder",
    build=lambda c: AlibiDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    cache=lambda model, chunks, reorder=None: decode(model, chunks, reorder),
    domain={"num_heads": [1, 2, 4]},
    declares={
        "causal": True,
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "tied": False,
    },
)
