WHAT = "groups are made anew whenever the layer's number changes (`if layer != last`), not when they are missing, so layer 0 of the decoder overwrites the groups of layer 0 of the encoder, whose parameters are then never trained"
import torch
from torch import nn

from veriformer.properties import Subject


class Stack(nn.Module):
    def __init__(self, d, h, ff, layers, decoder):
        super().__init__()
        kind = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(kind(d, h, ff, dropout=0.0, batch_first=True) for _ in range(layers))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, h, ff, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.encoder = Stack(d, h, ff, layers, decoder=False)
        self.decoder = Stack(d, h, ff, layers, decoder=True)
        self.head = nn.Linear(d, vocab)


def layer_number(name, layers):
    parts = name.split(".")
    if parts[0] == "embed":
        return 0
    if parts[0] == "head":
        return layers + 1
    return int(parts[2]) + 1


def param_groups(model, lr=1e-3, weight_decay=0.05, layer_decay=0.75):
    """Layer-wise decay of the learning rate; vectors have no weight decay."""
    layers = len(model.encoder.layers)
    groups, last = {}, None
    for name, p in model.named_parameters():
        layer = layer_number(name, layers)
        if layer != last:
            scale = layer_decay ** (layers + 1 - layer)
            groups[layer, "decay"] = {"params": [], "weight_decay": weight_decay, "lr": lr * scale}
            groups[layer, "no_decay"] = {"params": [], "weight_decay": 0.0, "lr": lr * scale}
            last = layer
        groups[layer, "no_decay" if p.ndim < 2 else "decay"]["params"].append(p)
    return [group for group in groups.values() if group["params"]]


subject = Subject(
    kind="parameter_groups",
    name="layer-wise learning rates of a translator",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m: param_groups(m),
)
