"""AdamW groups by name for an encoder of torch's own layers."""
from torch import nn

from veriformer.properties import Subject


class Tagger(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, labels):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, labels)

    def forward(self, tokens):
        return self.head(self.final_norm(self.encoder(self.embed(tokens))))


def optimizer_groups(model, weight_decay=0.1):
    decay, no_decay = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith("bias") or "norm" in name:
            no_decay.append(parameter)
        elif name.endswith("weight"):
            decay.append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups by name",
    build=lambda c: Tagger(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m: optimizer_groups(m),
)
