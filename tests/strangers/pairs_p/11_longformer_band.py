"""Longformer's local attention: keys in a band around each query, gathered by unfold, no T x T matrix anywhere."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

ONE_SIDE = 2


def band(x, fill=0.0):
    """[B, T, ...] -> [B, T, ..., 2 w + 1]: what stands at t - w .. t + w, `fill` beyond both ends."""
    padded = F.pad(x.transpose(1, -1), (ONE_SIDE, ONE_SIDE), value=fill).transpose(1, -1)
    return padded.unfold(1, 2 * ONE_SIDE + 1, 1)


def inside_both(places, length):
    return (places >= 0) & (places < length)


def inside_front(places, length):
    return places >= 0


class LongformerSelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, inside):
        super().__init__()
        self.num_heads, self.head_dim, self.inside = num_heads, embed_dim // num_heads, inside
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states, real):
        b, t, d = hidden_states.shape
        heads = b, t, self.num_heads, self.head_dim
        q = self.query(hidden_states).view(heads)
        k, v = band(self.key(hidden_states)), band(self.value(hidden_states))  # [B, T, D, 2w+1]
        k, v = (z.reshape(*heads, 2 * ONE_SIDE + 1) for z in (k, v))
        scores = torch.einsum("bthd,bthdj->bthj", q, k) * self.head_dim**-0.5
        steps = torch.arange(-ONE_SIDE, ONE_SIDE + 1, device=q.device)
        places = torch.arange(t, device=q.device)[:, None] + steps
        visible = self.inside(places, t) & (band(real.float(), 1.0) > 0.5)
        visible = visible | (steps == 0)
        scores = scores.masked_fill(~visible[:, :, None], torch.finfo(scores.dtype).min)
        return self.out(torch.einsum("bthj,bthdj->bthd", scores.softmax(-1), v).reshape(b, t, d))


class LongformerLayer(nn.Module):
    def __init__(self, c, inside):
        super().__init__()
        self.attention = LongformerSelfAttention(c.d_model, c.num_heads, inside)
        self.attention_norm, self.output_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.intermediate, self.output = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, real):
        x = self.attention_norm(x + self.attention(x, real))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class Longformer(nn.Module):
    def __init__(self, c, inside):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.layer = nn.ModuleList([LongformerLayer(c, inside) for _ in range(c.num_layers)])

    def forward(self, input_ids, attention_mask=None):
        if input_ids.shape[1] > self.position_embeddings.num_embeddings:
            raise ValueError("sequence too long")
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        position_ids = (real.long().cumsum(-1) - 1).clamp(min=0)
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        for layer in self.layer:
            x = layer(x, real)
        return x


def subject(name, inside):
    return Subject(
        kind="encoder",
        name=name,
        build=lambda c: Longformer(c, inside),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "sparse": True},
    )


right = subject("longformer", inside_both)
wrong = subject("longformer, front only", inside_front)

WHAT = "Of the places of the band that lie outside of the sequence only those before its beginning are hidden, not those behind its end."
CAUSE = (
    "The last w queries attend to zero keys and zero values that F.pad put behind the sequence: they take a share of the softmax, "
    "so the outputs at the end shrink and differ from what they are when masked padding follows."
)
