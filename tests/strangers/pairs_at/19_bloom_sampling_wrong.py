WHAT = 'The k-th best logit of the first sample is the threshold for the whole batch (`logits < best[0, -1]` for `best[:, -1:]`), so that other samples are drawn from more or fewer than top_k tokens, or, where none reaches it, from all alike.'
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_two(closest) + power_of_two(2 * closest)[0::2][: n - closest]


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, n_head, inner):
        super().__init__()
        self.n_head = n_head
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h = nn.Linear(hidden_size, inner)
        self.dense_4h_to_h = nn.Linear(inner, hidden_size)

    def forward(self, x, alibi, allowed):
        B, T, D = x.shape
        fused = self.query_key_value(self.input_layernorm(x)).view(B, T, self.n_head, 3, -1)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + alibi
        probs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        x = x + self.dense((probs @ v).transpose(1, 2).reshape(B, T, D))
        h = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)), approximate="tanh")
        return x + self.dense_4h_to_h(h)


class Bloom(nn.Module):
    def __init__(self, vocab_size, hidden_size, n_head, n_layer, inner):
        super().__init__()
        self.n_head = n_head
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(hidden_size)
        self.h = nn.ModuleList([BloomBlock(hidden_size, n_head, inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden_size)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        x = self.word_embeddings_layernorm(self.word_embeddings(tokens))
        position = torch.arange(T, device=tokens.device)
        slopes = torch.tensor(get_slopes(self.n_head), dtype=x.dtype, device=x.device)
        alibi = slopes[:, None, None] * (position[None, :] - position[:, None])
        allowed = (position[None, :] <= position[:, None])[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, allowed)
        return F.linear(self.ln_f(x), self.word_embeddings.weight)


def next_token_probs(logits, temperature, top_k):
    logits = logits / temperature
    if top_k is not None:
        best, _ = torch.topk(logits, min(top_k, logits.shape[-1]))
        logits = logits.masked_fill(logits < best[0, -1], torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1)


@torch.no_grad()
def sample(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        probs = next_token_probs(model(tokens)[:, -1], temperature, top_k)
        drawn_from.append(probs)
        tokens = torch.cat((tokens, torch.multinomial(probs, num_samples=1)), dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="BLOOM with sampling",
    build=lambda c: Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    sampling=sample,
    declares={
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": True,
        "output_bias": False,
    },
)
