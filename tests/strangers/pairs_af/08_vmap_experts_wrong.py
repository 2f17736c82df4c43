WHAT = "The experts' parameters are stacked once, in the constructor (line 26, used in line 30): vmap runs on detached copies in a plain dict, while the registered experts, which optimizers and checkpoints know, do nothing."
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from veriformer.properties import Subject


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SoftMixture(nn.Module):
    """All experts, weighted by a softmax."""

    def __init__(self, dim, hidden, num_experts=3):
        super().__init__()
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(num_experts)])
        self.gate = nn.Linear(dim, num_experts)
        self.params, _ = stack_module_state(list(self.experts))
        self.template = [self.experts[0]]  # in a list, so that it is not registered twice

    def stacked(self):
        return self.params

    def forward(self, x):
        def run(params, x):
            return functional_call(self.template[0], params, (x,))

        params = {name: p.to(x.dtype) for name, p in self.stacked().items()}
        outputs = vmap(run, in_dims=(0, None))(params, x)
        return torch.einsum("bte,ebtd->btd", self.gate(x).softmax(-1), outputs)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mixture = SoftMixture(dim, hidden)

    def attend(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask):
        x = x + self.attend(self.ln1(x), mask)
        return x + self.mixture(self.ln2(x))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.ln = nn.LayerNorm(dim)

    def forward(self, tokens, mask=None):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.ln(x)


subject = Subject(
    kind="encoder",
    name="soft mixture",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "padding_side": "right",
    },
)
