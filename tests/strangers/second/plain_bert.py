import math
import torch
from torch import nn


class BertConfig:
    def __init__(self, vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
                 intermediate_size=3072, hidden_dropout_prob=0.1, max_position_embeddings=512, type_vocab_size=2):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class BertSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, attention_mask):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + attention_mask
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class BertModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.emb_norm = nn.LayerNorm(config.hidden_size, eps=1e-12)
        self.attn = nn.ModuleList(BertSelfAttention(config) for _ in range(config.num_hidden_layers))
        self.norm1 = nn.ModuleList(nn.LayerNorm(config.hidden_size, eps=1e-12) for _ in range(config.num_hidden_layers))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(config.hidden_size, config.intermediate_size), nn.GELU(),
                                nn.Linear(config.intermediate_size, config.hidden_size)) for _ in range(config.num_hidden_layers))
        self.norm2 = nn.ModuleList(nn.LayerNorm(config.hidden_size, eps=1e-12) for _ in range(config.num_hidden_layers))
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, input_ids, token_type_ids=None, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.word_embeddings(input_ids) + self.position_embeddings(torch.arange(input_ids.size(1))) + self.token_type_embeddings(token_type_ids)
        x = self.emb_norm(x)
        extended = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for attn, n1, ff, n2 in zip(self.attn, self.norm1, self.ff, self.norm2):
            x = n1(x + attn(x, extended))
            x = n2(x + ff(x))
        return x, torch.tanh(self.pooler(x[:, 0]))
