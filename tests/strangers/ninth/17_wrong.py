"""Token tagger (named entities): a post-norm Transformer encoder of `num_layers` layers, each with
weights of its own, and a linear layer over every word. attention_mask: 1 word, 0 padding."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class EncoderLayer(nn.Module):
    def __init__(self, hidden, heads, ffn, dropout):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(hidden, heads, dropout=dropout, batch_first=True)
        self.norm1 = nn.LayerNorm(hidden)
        self.linear1 = nn.Linear(hidden, ffn)
        self.linear2 = nn.Linear(ffn, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, key_padding_mask):
        attended, _ = self.self_attn(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
        x = self.norm1(x + self.dropout(attended))
        fed = self.linear2(self.dropout(F.gelu(self.linear1(x))))
        return self.norm2(x + self.dropout(fed))


class Encoder(nn.Module):
    def __init__(self, layer, num_layers):
        super().__init__()
        self.layers = nn.ModuleList([layer for _ in range(num_layers)])

    def forward(self, x, key_padding_mask):
        for layer in self.layers:
            x = layer(x, key_padding_mask)
        return x


class TransformerTagger(nn.Module):
    def __init__(self, vocab_size=150, num_tags=9, hidden=48, num_layers=3, heads=4, ffn=96, max_len=64, dropout=0.1):
        super().__init__()
        self.word_embedding = nn.Embedding(vocab_size, hidden)
        self.position_embedding = nn.Embedding(max_len, hidden)
        self.embedding_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.encoder = Encoder(EncoderLayer(hidden, heads, ffn, dropout), num_layers)
        self.tag_head = nn.Linear(hidden, num_tags)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, input_ids, attention_mask=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.word_embedding(input_ids) + self.position_embedding(positions)
        x = self.dropout(self.embedding_norm(x))
        x = self.encoder(x, attention_mask == 0)
        logits = self.tag_head(x)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return logits, loss
