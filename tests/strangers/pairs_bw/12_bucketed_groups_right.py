from torch import nn
from veriformer.properties import Subject

BUCKET = 3


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, batch_first=True) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def bucketed(model, weight_decay=0.1):
    """Groups of at most BUCKET parameters, in reverse order, as gradients become ready."""
    open_buckets = {True: [], False: []}
    groups = []

    def flush(decayed):
        if open_buckets[decayed]:
            groups.append({"params": open_buckets[decayed], "weight_decay": weight_decay if decayed else 0.0})
            open_buckets[decayed] = []

    for name, parameter in reversed(list(model.named_parameters())):
        decayed = parameter.ndim >= 2 and not name.startswith("embed")
        open_buckets[decayed].append(parameter)
        if len(open_buckets[decayed]) == BUCKET:
            flush(decayed)
    for decayed in open_buckets:
        flush(decayed)
    return groups


subject = Subject(kind="parameter_groups", build=Model, forward=lambda m: bucketed(m))
