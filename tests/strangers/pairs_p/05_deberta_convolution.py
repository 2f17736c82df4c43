"""DeBERTa-v2 in small: disentangled attention, and the n-gram convolution behind the first layer."""

import torch
import torch.nn as nn

from veriformer.properties import Subject

SPAN = 4


class DisentangledSelfAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.width = heads, hidden // heads
        self.query_proj = nn.Linear(hidden, hidden)
        self.key_proj = nn.Linear(hidden, hidden)
        self.value_proj = nn.Linear(hidden, hidden)
        self.pos_key_proj = nn.Linear(hidden, hidden, bias=False)
        self.pos_query_proj = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, hidden)

    def split(self, x):
        return x.view(*x.shape[:-1], self.heads, self.width).transpose(-3, -2)

    def forward(self, x, rel_embeddings, allowed):
        b, t, d = x.shape
        q, k, v = self.split(self.query_proj(x)), self.split(self.key_proj(x)), self.split(self.value_proj(x))
        pos_k, pos_q = self.split(self.pos_key_proj(rel_embeddings)), self.split(self.pos_query_proj(rel_embeddings))
        place = torch.arange(t, device=x.device)
        delta = (place[:, None] - place[None, :]).clamp(-SPAN, SPAN - 1) + SPAN  # delta[i, j] of query i, key j
        index = delta.expand(b, self.heads, t, t)
        c2p = (q @ pos_k.transpose(-1, -2)).gather(-1, index)
        p2c = (k @ pos_q.transpose(-1, -2)).gather(-1, delta.t().expand(b, self.heads, t, t)).transpose(-1, -2)
        scores = (q @ k.transpose(-1, -2) + c2p + p2c) * self.width**-0.5
        probs = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return self.out((probs @ v).transpose(1, 2).reshape(b, t, d))


class ConvLayer(nn.Module):
    def __init__(self, hidden, blank):
        super().__init__()
        self.conv = nn.Conv1d(hidden, hidden, 3, padding=1)
        self.LayerNorm = nn.LayerNorm(hidden)
        self.blank = blank

    def forward(self, hidden_states, residual_states, input_mask):
        keep = input_mask.unsqueeze(-1).to(hidden_states.dtype)
        if self.blank:
            hidden_states = hidden_states * keep
        out = self.conv(hidden_states.transpose(1, 2)).transpose(1, 2) * keep
        return self.LayerNorm(residual_states + torch.tanh(out)) * keep


class Layer(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.attention = DisentangledSelfAttention(hidden, heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.intermediate, self.output = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x, rel_embeddings, allowed):
        x = self.norm_1(x + self.attention(x, rel_embeddings, allowed))
        return self.norm_2(x + self.output(nn.functional.gelu(self.intermediate(x))))


class DebertaV2Encoder(nn.Module):
    def __init__(self, c, blank):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.embedding_norm = nn.LayerNorm(c.d_model)
        self.rel_embeddings = nn.Parameter(torch.randn(2 * SPAN, c.d_model))
        self.layer = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.conv = ConvLayer(c.d_model, blank)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask = attention_mask.bool()
        embedded = self.embedding_norm(self.word_embeddings(input_ids))
        own = torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
        allowed = (mask[:, None, :] & mask[:, :, None]) | own
        hidden = embedded
        for i, layer in enumerate(self.layer):
            hidden = layer(hidden, self.rel_embeddings, allowed)
            if i == 0:
                hidden = self.conv(embedded, hidden, mask)
        return hidden


def subject(name, blank):
    return Subject(
        kind="encoder",
        name=name,
        build=lambda c: DebertaV2Encoder(c, blank),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False},
    )


right = subject("deberta with convolution", True)
wrong = subject("deberta with convolution, unblanked", False)

WHAT = "The convolution over the embeddings gets padded positions as they are; only what comes out of it is blanked."
CAUSE = (
    "ConvLayer masks its output but not its input: real tokens next to the padding take the embedding of the padding token into "
    "their convolution, so content and amount of padding change real outputs."
)
