from typing import TypedDict
import torch
from torch import nn


class ModelSettings(TypedDict):
    vocab_size: int
    embedding_dim: int
    num_heads: int
    num_layers: int
    ffn_dim: int
    max_seq_length: int


class Encoder(nn.Module):
    def __init__(self, settings: ModelSettings):
        super().__init__()
        d = settings["embedding_dim"]
        self.embed = nn.Embedding(settings["vocab_size"], d)
        self.pos = nn.Embedding(settings["max_seq_length"], d)
        self.layers = nn.ModuleList([
            nn.TransformerEncoderLayer(d, settings["num_heads"], settings["ffn_dim"], 0.0, batch_first=True)
            for _ in range(settings["num_layers"])])

    def forward(self, input_ids, padding_mask=None):
        x = self.embed(input_ids) + self.pos.weight[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding_mask)
        return x
