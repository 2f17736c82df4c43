WHAT = "Cross-attention keeps the projected memory on the module and projects anew only if batch or length differ, so decoding a second source of the same shape attends to the first one's memory (line 27)."
"""Encoder-decoder in the manner of fairseq; decoding keeps the projected memory, which does not change between steps."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, dim, heads, static_kv=False):
        super().__init__()
        self.heads, self.static_kv = heads, static_kv
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def _split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _project(self, x):
        return self._split(self.k_proj(x)), self._split(self.v_proj(x))

    def _keys_values(self, source, state):
        if state is None:
            return self._project(source)
        if self.static_kv:
            if getattr(self, "_static", None) is None or self._static[0].shape[::2] != source.shape[:2]:
                self._static = self._project(source)
            return self._static
        k, v = self._project(source)
        if "k" in state:
            k, v = torch.cat((state["k"], k), 2), torch.cat((state["v"], v), 2)
        state["k"], state["v"] = k, v
        return k, v

    def forward(self, x, source, visible=None, state=None):
        q = self._split(self.q_proj(x))
        k, v = self._keys_values(source, state)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        context = torch.einsum("bhts,bhsk->bhtk", scores.softmax(-1), v)
        return self.out_proj(context.transpose(1, 2).flatten(2))


class FFN(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.ffn = MultiheadAttention(c.d_model, c.num_heads), FFN(c.d_model, c.d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, visible):
        x = self.norm1(x + self.self_attn(x, x, visible))
        return self.norm2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = MultiheadAttention(c.d_model, c.num_heads)
        self.encoder_attn = MultiheadAttention(c.d_model, c.num_heads, static_kv=True)
        self.ffn = FFN(c.d_model, c.d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.d_model) for _ in range(3))

    def forward(self, y, memory, causal, memory_visible, state=None):
        own, other = (None, None) if state is None else state
        y = self.norm1(y + self.self_attn(y, y, causal, own))
        y = self.norm2(y + self.encoder_attn(y, memory, memory_visible, other))
        return self.norm3(y + self.ffn(y))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source_embed, self.target_embed = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.source_pos, self.target_pos = nn.Embedding(c.max_len, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.encoder = nn.ModuleList([EncoderLayer(c) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(c) for _ in range(c.num_layers)])
        self.generator = nn.Linear(c.d_model, c.vocab_size)

    def encode(self, source, visible=None):
        x = self.source_embed(source) + self.source_pos(torch.arange(source.shape[1], device=source.device))
        for layer in self.encoder:
            x = layer(x, visible)
        return x

    def decode(self, target, memory, visible=None, states=None, past=0):
        t = target.shape[1]
        y = self.target_embed(target) + self.target_pos(torch.arange(past, past + t, device=target.device))
        causal = torch.ones(t, past + t, dtype=torch.bool, device=target.device).tril(past)
        for i, layer in enumerate(self.decoder):
            y = layer(y, memory, causal, visible, None if states is None else states[i])
        return self.generator(y)

    def forward(self, source, target, source_mask=None):
        visible = None if source_mask is None else source_mask[:, None, None, :]
        return self.decode(target, self.encode(source, visible), visible)


def incremental(model, source, chunks):
    memory = model.encode(source)
    states = [({}, {}) for _ in model.decoder]
    outputs, past = [], 0
    for chunk in chunks:
        outputs.append(model.decode(chunk, memory, None, states, past))
        past += chunk.shape[1]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="seq2seq with incremental state",
    build=Seq2Seq,
    forward=lambda model, source, target, source_mask=None: model(source, target, source_mask),
    cache=incremental,
    declares={
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
    },
)
