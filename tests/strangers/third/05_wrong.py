import math

import torch
import torch.nn as nn


class BertEmbeddings(nn.Module):
    def __init__(self, vocab, hidden, max_pos, n_segments, p):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden, padding_idx=0)
        self.position_embeddings = nn.Embedding(max_pos, hidden)
        self.token_type_embeddings = nn.Embedding(n_segments, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, input_ids, token_type_ids=None):
        seq_length = input_ids.size(1)
        position_ids = torch.arange(seq_length, dtype=torch.long, device=input_ids.device)
        position_ids = position_ids.unsqueeze(0).expand_as(input_ids)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        e = self.word_embeddings(input_ids)
        e = e + self.position_embeddings(position_ids)
        e = e + self.token_type_embeddings(token_type_ids)
        return self.dropout(self.LayerNorm(e))


class BertSelfAttention(nn.Module):
    def __init__(self, hidden, heads, p):
        super().__init__()
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(p)

    def transpose_for_scores(self, x):
        x = x.view(x.size(0), x.size(1), self.num_attention_heads, self.attention_head_size)
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        scores = scores + attention_mask
        probs = self.dropout(nn.Softmax(dim=-1)(scores))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:2], -1)


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate, p):
        super().__init__()
        self.attention = BertSelfAttention(hidden, heads, p)
        self.attn_out = nn.Linear(hidden, hidden)
        self.attn_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.intermediate = nn.Linear(hidden, intermediate)
        self.output = nn.Linear(intermediate, hidden)
        self.out_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(p)

    def forward(self, x, mask):
        a = self.dropout(self.attn_out(self.attention(x, mask)))
        x = self.attn_norm(a + x)
        y = self.dropout(self.output(nn.functional.gelu(self.intermediate(x))))
        return self.out_norm(y + x)


class BertModel(nn.Module):
    def __init__(self, vocab=200, hidden=64, layers=2, heads=4, intermediate=128,
                 max_pos=64, n_segments=2, p=0.1):
        super().__init__()
        self.embeddings = BertEmbeddings(vocab, hidden, max_pos, n_segments, p)
        self.encoder = nn.ModuleList([BertLayer(hidden, heads, intermediate, p) for _ in range(layers)])
        self.pooler = nn.Linear(hidden, hidden)

    def forward(self, input_ids, token_type_ids=None, attention_mask=None):
        """attention_mask: 1 for real tokens, 0 for padding."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        extended = attention_mask.unsqueeze(1).unsqueeze(3)
        extended = (1.0 - extended.to(self.pooler.weight.dtype)) * -10000.0
        x = self.embeddings(input_ids, token_type_ids)
        for layer in self.encoder:
            x = layer(x, extended)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return x, pooled


model = BertModel()
