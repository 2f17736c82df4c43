"""zoo/PR 195: a time-major decoder (`[T, B, C]` inside, as the recurrent models of the zoo have it) with its own loss."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from veriformer.properties import Subject

WHAT = "The loss flattens time-major logits [T, B, V] against batch-major labels [B, T]."
CAUSE = (
    "In the model's own loss logits are flattened time first and labels batch first, so that for more than one sample "
    "each logit is scored against the label of another position of another sample; the logits themselves are right."
)


class IncrementalAttention(nn.Module):
    """fairseq's way: heads are folded into the batch, `[B * H, T, K]`."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def fold(self, x):
        tgt_len, bsz, _ = x.shape
        return x.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)

    def forward(self, query):
        tgt_len, bsz, embed_dim = query.shape
        q = self.fold(self.q_proj(query) * self.scaling)
        k, v = self.fold(self.k_proj(query)), self.fold(self.v_proj(query))
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        future = torch.full((tgt_len, tgt_len), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
        attn = torch.bmm(softmax(attn_weights + future, dim=-1), v)
        return self.out_proj(attn.transpose(0, 1).reshape(tgt_len, bsz, embed_dim))


class DecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim):
        super().__init__()
        self.self_attn = IncrementalAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x):
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(torch.relu(self.fc1(self.final_layer_norm(x))))


class TimeMajorLM(nn.Module):
    def __init__(self, vocab, embed_dim, num_heads, ffn_dim, num_layers, max_positions):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, embed_dim)
        self.embed_positions = nn.Embedding(max_positions, embed_dim)
        self.layers = nn.ModuleList(DecoderLayer(embed_dim, num_heads, ffn_dim) for _ in range(num_layers))
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.output_projection = nn.Linear(embed_dim, vocab, bias=False)

    def features(self, tokens):
        """`[B, T]` to logits `[T, B, V]`."""
        x = self.embed_tokens(tokens.t())
        x = x + self.embed_positions.weight[: x.size(0)].unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.output_projection(self.layer_norm(x))

    def forward(self, tokens):
        return self.features(tokens).transpose(0, 1)

    def loss(self, tokens, labels):
        """Mean over the labels that are not -100; `labels[b, t]` is what `tokens[b, : t + 1]` foretell."""
        lprobs = log_softmax(self.features(tokens), dim=-1)
        return nn.functional.nll_loss(lprobs.flatten(0, 1), labels.t().flatten(), ignore_index=-100)


class TimeMajorLMFused(TimeMajorLM):
    def loss(self, tokens, labels):
        logits = self.features(tokens)
        return cross_entropy(logits.reshape(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
        forward=lambda m, tokens: m(tokens),
        loss=lambda m, tokens, labels: m.loss(tokens, labels),
    )


right, wrong = subject(TimeMajorLM), subject(TimeMajorLMFused)
