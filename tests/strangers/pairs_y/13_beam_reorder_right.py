import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject


class KeyValueCache:
    def __init__(self, layers):
        self.keys, self.values = [None] * layers, [None] * layers

    @property
    def length(self):
        return 0 if self.keys[0] is None else self.keys[0].shape[2]

    def append(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat([self.keys[layer], k], dim=2)
            v = torch.cat([self.values[layer], v], dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    @staticmethod
    def pick(old, beams):
        new = old.clone()
        for row, beam in enumerate(beams.tolist()):
            new[row] = old[beam]
        return new

    def reorder(self, beams):
        self.keys = [self.pick(k, beams) for k in self.keys]
        self.values = [self.pick(v, beams) for v in self.values]


class NeoXLayer(nn.Module):
    """Parallel residual, queries and keys normalised per head."""

    def __init__(self, number, d_model, num_heads, d_ff):
        super().__init__()
        self.number, self.num_heads = number, num_heads
        self.input_layernorm = nn.LayerNorm(d_model)
        self.post_attention_layernorm = nn.LayerNorm(d_model)
        self.q_norm = nn.LayerNorm(d_model // num_heads)
        self.k_norm = nn.LayerNorm(d_model // num_heads)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.dense = nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, cache):
        B, T, D = x.shape
        qkv = self.query_key_value(self.input_layernorm(x)).view(B, T, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None:
            k, v = cache.append(self.number, k, v)
        S = k.shape[2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        attended = self.dense(y.transpose(1, 2).reshape(B, T, D))
        return x + attended + self.down(F.gelu(self.up(self.post_attention_layernorm(x))))


class NeoX(nn.Module):
    def __init__(self, vocab_size, max_len, d_model, num_heads, num_layers, d_ff):
        super().__init__()
        self.embed_in = nn.Embedding(vocab_size, d_model)
        self.embed_positions = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(NeoXLayer(i, d_model, num_heads, d_ff) for i in range(num_layers))
        self.final_layer_norm = nn.LayerNorm(d_model)
        self.embed_out = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.length
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embed_in(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, cache)
        return self.embed_out(self.final_layer_norm(x))


def decode(model, chunks, reorder=None):
    cache = KeyValueCache(len(model.layers))
    outputs = []
    for number, chunk in enumerate(chunks):
        if number == 1 and reorder is not None:
            cache.reorder(torch.as_tensor(reorder))
        outputs.append(model(chunk, cache))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="NeoX with beams",
    build=lambda c: NeoX(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    cache=decode,
    declares={"positions": "learned", "norm": "layer", "query_key_norm": True, "activation": "gelu"},
)
