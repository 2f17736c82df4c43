WHAT = 'wrong axis: the mean divides by the number of real tokens of the whole batch, not of the sample (line 58: count = torch.clamp(expanded.sum(), min=1e-9))'
"""A sentence classifier on ALBERT: factorised embeddings, one layer used again and again, the mean over real tokens."""
import torch
from torch import nn

from veriformer.properties import Subject

EMBEDDING = 6


class AlbertLayer(nn.Module):
    def __init__(self, d_model, nhead, d_ff):
        super().__init__()
        self.nhead = nhead
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.dense = nn.Linear(d_model, d_model)
        self.ln_attention = nn.LayerNorm(d_model)
        self.ffn, self.ffn_output = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.ln_full = nn.LayerNorm(d_model)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x, mask):
        n, t, d = x.size()
        heads = (n, t, self.nhead, d // self.nhead)
        q = self.query(x).view(heads).permute(0, 2, 1, 3)
        k = self.key(x).view(heads).permute(0, 2, 3, 1)
        v = self.value(x).view(heads).permute(0, 2, 1, 3)
        energy = (q @ k) / (d // self.nhead) ** 0.5
        energy = energy.masked_fill(mask[:, None, None, :] == 0, torch.finfo(energy.dtype).min)
        context = (torch.softmax(energy, dim=-1) @ v).permute(0, 2, 1, 3).contiguous().view(n, t, d)
        x = self.ln_attention(x + self.dense(context))
        return self.ln_full(x + self.ffn_output(self.act(self.ffn(x))))


class AlbertSentenceClassifier(nn.Module):
    def __init__(self, vocab_size, d_model, nhead, num_layers, d_ff, max_len, num_classes):
        super().__init__()
        self.word = nn.Embedding(vocab_size, EMBEDDING)
        self.position = nn.Embedding(max_len, EMBEDDING)
        self.ln = nn.LayerNorm(EMBEDDING)
        self.embedding_hidden_mapping_in = nn.Linear(EMBEDDING, d_model)
        self.layer = AlbertLayer(d_model, nhead, d_ff)
        self.num_layers = num_layers
        self.classifier = nn.Linear(d_model, num_classes)

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        x = self.ln(self.word(tokens) + self.position(torch.arange(tokens.size(1), device=tokens.device)))
        x = self.embedding_hidden_mapping_in(x)
        for _ in range(self.num_layers):
            x = self.layer(x, mask)
        return self.classifier(self.mean_pooling(x, mask))

    @staticmethod
    def mean_pooling(token_embeddings, mask):
        expanded = mask.unsqueeze(-1).to(token_embeddings.dtype)
        total = torch.sum(token_embeddings * expanded, dim=1)
        count = torch.clamp(expanded.sum(), min=1e-9)
        return total / count


subject = Subject(
    kind="classifier",
    name="ALBERT, mean pooled",
    build=lambda c: AlbertSentenceClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "mean", "shared_layers": True, "positions": "learned", "norm": "layer", "norm_placement": "post",
        "activation": "gelu_tanh", "bias": True, "output_bias": True, "structure": "other", "padding_side": "right",
    },
)
