"""A BLOOM-like decoder: ALiBi, a norm behind the embedding, the head tied to it."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the head is tied through .data: two parameters over one storage, not one parameter"
CAUSE = (
    "Output projection and token embedding are two parameters, not one: lm_head.weight.data was assigned, so that they "
    "share their storage only until .to() or a cast, and have separate gradients and optimiser states."
)


def slopes(n):
    def powers(m):
        first = 2 ** (-8 / m)
        return [first ** (i + 1) for i in range(m)]

    closest = 2 ** math.floor(math.log2(n))
    return powers(closest) + powers(2 * closest)[0::2][: n - closest]


class BloomAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.num_heads, self.head_dim = n_head, hidden_size // n_head
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, alibi, allowed):
        B, T, D = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(B, T, self.num_heads, 3, self.head_dim)
        q, k, v = fused.permute(3, 0, 2, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        if scores.dtype != torch.float64:
            scores = scores.float()  # distances are counted in float32 at least
        scores = scores + alibi.to(scores.dtype)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores, dim=-1).to(v.dtype)
        context = torch.matmul(probs, v).transpose(1, 2).reshape(B, T, D)
        return self.dense(context)


class BloomBlock(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = BloomAttention(hidden_size, n_head)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.dense_h_to_4h = nn.Linear(hidden_size, 4 * hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, hidden_states, alibi, allowed):
        hidden_states = hidden_states + self.self_attention(self.input_layernorm(hidden_states), alibi, allowed)
        inner = F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(hidden_states)), approximate="tanh")
        return hidden_states + self.dense_4h_to_h(inner)


class BloomForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_heads = c.num_heads
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.word_embeddings_layernorm = nn.LayerNorm(c.d_model)
        self.h = nn.ModuleList([BloomBlock(c.d_model, c.num_heads) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.tie_weights()

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def tie_weights(self):
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, input_ids, attention_mask=None):
        T, device = input_ids.shape[1], input_ids.device
        place = torch.arange(T, device=device)
        distance = (place[None, :] - place[:, None]).double()
        alibi = torch.tensor(slopes(self.num_heads), dtype=torch.float64, device=device)[:, None, None] * distance
        allowed = torch.ones(T, T, dtype=torch.bool, device=device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        hidden_states = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        for block in self.h:
            hidden_states = block(hidden_states, alibi[None], allowed)
        return self.lm_head(self.ln_f(hidden_states))


class BloomLM(BloomForCausalLM):
    def tie_weights(self):
        self.lm_head.weight.data = self.word_embeddings.weight.data


def subject(model):
    return Subject(
        kind="decoder",
        name="Bloom",
        build=model,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": True,
            "positions": "alibi",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "gelu_tanh",
            "tied": True,
        },
    )


right = subject(BloomForCausalLM)
wrong = subject(BloomLM)
