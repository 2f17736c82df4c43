WHAT = "the running mean over chunks of tokens weights every chunk alike (1 / number of chunks) in place of by its real tokens (count / total), so a short last chunk counts as much as a full one"
import torch
from torch import nn
from veriformer.properties import Subject

CHUNK = 4


def streamed_mean(states, mask):
    """Mean over real tokens, chunk by chunk: no second [B, T, D] is made."""
    mean = states.new_zeros(states.shape[0], states.shape[2])
    seen = states.new_zeros(states.shape[0], 1)
    for part, real in zip(states.split(CHUNK, 1), mask.split(CHUNK, 1)):
        real = real.to(states.dtype).unsqueeze(-1)
        count = real.sum(1)
        here = (part * real).sum(1) / count.clamp(min=1)
        weight = (count > 0).to(states.dtype)
        seen = seen + weight
        mean = mean + (here - mean) * weight / seen.clamp(min=1)
    return mean


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings, self.position_embeddings = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, batch_first=True) for _ in range(c.num_layers))
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.embeddings(input_ids) + self.position_embeddings.weight[: input_ids.shape[1]]
        hidden = torch.zeros(attention_mask.shape, dtype=x.dtype, device=x.device).masked_fill(~attention_mask, float("-inf"))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hidden)
        return self.classifier(streamed_mean(x, attention_mask))


subject = Subject(kind="classifier", build=Classifier, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                  declares={"pooling": "mean", "positions": "learned", "norm_placement": "post", "norm": "layer", "activation": "relu", "padding_side": "right"})
