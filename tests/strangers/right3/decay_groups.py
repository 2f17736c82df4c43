"""AdamW groups: weight matrices decay by 0.1; biases, norms and embeddings do not, tied weights once."""
from torch import nn
from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.norm = nn.Embedding(c.vocab_size, c.d_model), nn.LayerNorm(c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

def groups(model):
    yes, no = [], []
    for mod in model.modules():
        for name, p in mod.named_parameters(recurse=False):
            (yes if isinstance(mod, nn.Linear) and name == "weight" else no).append(p)
    return [{"params": yes, "weight_decay": 0.1}, {"params": no, "weight_decay": 0.0}]

common = dict(kind="parameter_groups", build=Net, forward=groups)
undeclared = Subject(**common)
declared = Subject(**common, declares={})
