"""BEiT's groups: one pair of groups a layer, learning rates falling by 0.75 a layer downwards, no weight decay on biases,
norms and embeddings. Unusual: many groups and rates; the tied head stands in the embedding's group once."""
from torch import nn
from veriformer.properties import Subject


class Model(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb = nn.Embedding(c.vocab_size, c.d_model)
        s.blocks = nn.ModuleList(nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, batch_first=True) for _ in range(c.num_layers))
        s.norm, s.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        s.head.weight = s.emb.weight


def groups(m, lr=1e-3, rate=0.75):
    n, made = len(m.blocks), {}
    for name, p in m.named_parameters():  # gives a shared parameter once
        if not p.requires_grad:
            continue
        depth = 0 if name.startswith("emb") else int(name.split(".")[1]) + 1 if name.startswith("blocks") else n + 1
        decay = 0.0 if p.ndim < 2 or name.startswith("emb") else 0.05
        made.setdefault((depth, decay), {"params": [], "weight_decay": decay, "lr": lr * rate ** (n + 1 - depth)})["params"].append(p)
    return list(made.values())


args = dict(kind="parameter_groups", build=Model, forward=groups)
undeclared = Subject(**args)
declared = Subject(**args, declares={"tied": True})
