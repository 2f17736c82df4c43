WHAT = "The walk knows weights and biases of modules alone, and pos_emb, a bare nn.Parameter of the root module, is added to neither set before the groups are made (line 39): position embeddings are never trained."
"""minGPT's two groups of parameters: matrices of linear maps decay, everything else does not."""

import torch
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.key, self.query = nn.Linear(n_embd, n_embd), nn.Linear(n_embd, n_embd)
        self.value, self.proj = nn.Linear(n_embd, n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd))


class GPT(nn.Module):
    def __init__(self, vocab_size, n_embd, n_layer, n_inner, block_size):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, block_size, n_embd))
        self.blocks = nn.Sequential(*[Block(n_embd, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def configure_groups(self, weight_decay):
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                fpn = f"{mn}.{pn}" if mn else pn
                if pn.endswith("bias"):
                    no_decay.add(fpn)
                elif pn.endswith("weight") and isinstance(m, nn.Linear):
                    decay.add(fpn)
                elif pn.endswith("weight") and isinstance(m, (nn.LayerNorm, nn.Embedding)):
                    no_decay.add(fpn)
        param_dict = dict(self.named_parameters())
        return [
            {"params": [param_dict[pn] for pn in sorted(decay)], "weight_decay": weight_decay},
            {"params": [param_dict[pn] for pn in sorted(no_decay)], "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="minGPT groups",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m: m.configure_groups(0.1),
)
