WHAT = "before the max over time padding is set to 0, not to the least number, so that a channel that is negative on all real tokens gives 0 when there is padding: line 39"
"""A small DistilBERT with max-over-time pooling, for sentence classification."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, dim, n_heads, hidden_dim):
        super().__init__()
        self.n_heads = n_heads
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(dim, dim) for _ in range(4))
        self.sa_layer_norm, self.output_layer_norm = nn.LayerNorm(dim, eps=1e-12), nn.LayerNorm(dim, eps=1e-12)
        self.lin1, self.lin2 = nn.Linear(dim, hidden_dim), nn.Linear(hidden_dim, dim)

    def forward(self, x, mask):
        def shape(t):
            return t.view(t.size(0), -1, self.n_heads, t.size(-1) // self.n_heads).transpose(1, 2)

        q, k, v = shape(self.q_lin(x)), shape(self.k_lin(x)), shape(self.v_lin(x))
        scores = torch.matmul(q / q.size(-1) ** 0.5, k.transpose(2, 3))
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)
        x = self.sa_layer_norm(self.out_lin(context) + x)
        return self.output_layer_norm(self.lin2(F.gelu(self.lin1(x))) + x)


class SentenceClassifier(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_layers, hidden_dim, max_len, num_labels):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.position_embeddings = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([Layer(dim, n_heads, hidden_dim) for _ in range(n_layers)])
        self.classifier = nn.Linear(dim, num_labels)

    def pool(self, hidden, mask):
        hidden = hidden * mask[:, :, None]
        pooled = hidden.amax(dim=1)
        return pooled * mask.any(dim=1, keepdim=True)  # nothing said: nothing pooled

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.classifier(self.pool(hidden, mask))


subject = Subject(
    kind="classifier",
    name="SentenceClassifier",
    build=lambda c: SentenceClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "pooling": "max",
        "output_bias": True,
        "padding_side": "right",
    },
)
