"""OPT: learned positions that are counted over real tokens, and a cache for beam search."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

OFFSET = 2


class State:
    """What decoding carries from one chunk to the next."""

    def __init__(self, layers, batch, device):
        self.keys, self.values = [None] * layers, [None] * layers
        self.mask = torch.ones(batch, 0, dtype=torch.bool, device=device)
        self.seen = torch.zeros(batch, 1, dtype=torch.long, device=device)  # real tokens so far

    def reorder(self, index):
        self.keys = [k.index_select(0, index) for k in self.keys]
        self.values = [v.index_select(0, index) for v in self.values]
        self.mask = self.mask.index_select(0, index)
        self.seen = self.seen.index_select(0, index)


class OPTLayer(nn.Module):
    def __init__(self, embed_dim, heads, ffn_dim):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, allowed, state, i):
        h = self.self_attn_layer_norm(x)
        q, k, v = self.split(self.q_proj(h)), self.split(self.k_proj(h)), self.split(self.v_proj(h))
        if state.keys[i] is not None:
            k, v = torch.cat((state.keys[i], k), 2), torch.cat((state.values[i], v), 2)
        state.keys[i], state.values[i] = k, v
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        probs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        x = x + self.out_proj((probs @ v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class OPT(nn.Module):
    def __init__(self, vocab, embed_dim, heads, layers, ffn_dim, max_len):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, embed_dim)
        self.embed_positions = nn.Embedding(max_len + OFFSET, embed_dim)
        self.layers = nn.ModuleList([OPTLayer(embed_dim, heads, ffn_dim) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, tokens, attention_mask=None, state=None):
        batch, length = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        if state is None:
            state = State(len(self.layers), batch, tokens.device)
        counted = state.seen + attention_mask.long().cumsum(1)
        positions = torch.where(attention_mask, counted, 0) - 1
        state.seen = counted[:, -1:]
        past = state.mask.shape[1]
        state.mask = torch.cat((state.mask, attention_mask), 1)
        rows = torch.arange(past, past + length, device=tokens.device)[:, None]
        causal = torch.arange(past + length, device=tokens.device)[None, :] <= rows
        allowed = causal & state.mask[:, None, None, :]
        x = self.embed_tokens(tokens) + self.embed_positions(positions + OFFSET)
        for i, layer in enumerate(self.layers):
            x = layer(x, allowed, state, i)
        return F.linear(self.final_layer_norm(x), self.embed_tokens.weight)


def cached(model, chunks, attention_mask=None, reorder=None):
    state = State(len(model.layers), chunks[0].shape[0], chunks[0].device)
    outputs, start = [], 0
    for n, chunk in enumerate(chunks):
        if n == 1 and reorder is not None:
            state.reorder(reorder)
        stop = start + chunk.shape[1]
        outputs.append(model(chunk, None if attention_mask is None else attention_mask[:, start:stop].bool(), state))
        start = stop
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="OPT",
    build=lambda c: OPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    declares={
        "causal": True,
        "positions": "learned",
        "position_offset": OFFSET,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "tied": True,
        "padding_side": "both",
    },
)
