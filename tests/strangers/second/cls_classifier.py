import torch
from torch import nn


class Classifier(nn.Module):
    """Puts a class token before the sequence and reads its output."""

    def __init__(self, vocab_size, hidden_size=256, num_attention_heads=4, num_hidden_layers=4, intermediate_size=512,
                 num_labels=2, max_position_embeddings=512, hidden_dropout_prob=0.1):
        super().__init__()
        self.word = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(max_position_embeddings + 1, hidden_size)
        self.cls = nn.Parameter(torch.randn(1, 1, hidden_size) * 0.02)
        layer = nn.TransformerEncoderLayer(hidden_size, num_attention_heads, intermediate_size, hidden_dropout_prob, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_hidden_layers, enable_nested_tensor=False)
        self.out = nn.Linear(hidden_size, num_labels)

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = torch.cat([self.cls.expand(len(input_ids), -1, -1), self.word(input_ids)], 1)
        x = x + self.position(torch.arange(x.size(1), device=x.device))
        pad = None
        if attention_mask is not None:
            first = torch.ones(len(input_ids), 1, dtype=attention_mask.dtype, device=x.device)
            pad = torch.cat([first, attention_mask], 1) == 0
        x = self.encoder(x, src_key_padding_mask=pad)
        logits = self.out(x[:, 0])
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits}
