WHAT = "the decoder's attention is made causal wherever queries and keys are equal in number: so is its cross-attention once the target is as long as the source (line 40)"
# An encoder-decoder written as functions over one nn.ParameterDict.
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Net(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.depth = c.num_heads, c.num_layers
        D, H = c.d_model, c.d_ff
        p = {"tokens": torch.randn(c.vocab_size, D), "places": torch.randn(c.max_len, D) * 0.5}
        for side, blocks in (("enc", ("self", "mlp")), ("dec", ("self", "cross", "mlp"))):
            for i in range(c.num_layers):
                for block in blocks:
                    name = f"{side}_{i}_{block}"
                    p[f"{name}_gain"], p[f"{name}_shift"] = torch.ones(D), torch.zeros(D)
                    if block == "mlp":
                        p[f"{name}_up"], p[f"{name}_down"] = torch.randn(D, H) / D**0.5, torch.randn(H, D) / H**0.5
                    else:
                        for matrix in "qkvo":
                            p[f"{name}_{matrix}"] = torch.randn(D, D) / D**0.5
            p[f"{side}_gain"], p[f"{side}_shift"] = torch.ones(D), torch.zeros(D)
        self.p = nn.ParameterDict({name: nn.Parameter(value) for name, value in p.items()})

    def norm(self, name, x):
        return F.layer_norm(x, x.shape[-1:], self.p[f"{name}_gain"], self.p[f"{name}_shift"])

    def attend(self, name, x, memory=None, keep=None, causal=False):
        keys = x if memory is None else memory
        q, k, v = (
            (y @ self.p[f"{name}_{m}"]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y, m in ((x, "q"), (keys, "k"), (keys, "v"))
        )
        T, S = x.shape[1], keys.shape[1]
        allowed = torch.ones(1, 1, T, S, dtype=torch.bool, device=x.device)
        if causal and T == S:
            allowed = allowed.tril()
        if keep is not None:
            allowed = allowed & keep[:, None, None, :]
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2) @ self.p[f"{name}_o"]

    def mlp(self, name, x):
        return F.relu(x @ self.p[f"{name}_up"]) @ self.p[f"{name}_down"]

    def embed(self, tokens):
        return self.p["tokens"][tokens] + self.p["places"][: tokens.shape[1]]

    def forward(self, source, target, source_mask=None, target_mask=None):
        x = self.embed(source)
        for i in range(self.depth):
            x = x + self.attend(f"enc_{i}_self", self.norm(f"enc_{i}_self", x), keep=source_mask)
            x = x + self.mlp(f"enc_{i}_mlp", self.norm(f"enc_{i}_mlp", x))
        memory, y = self.norm("enc", x), self.embed(target)
        for i in range(self.depth):
            y = y + self.attend(f"dec_{i}_self", self.norm(f"dec_{i}_self", y), keep=target_mask, causal=True)
            query = self.norm(f"dec_{i}_cross", y)
            y = y + self.attend(f"dec_{i}_cross", query, memory, source_mask, causal=True)
            y = y + self.mlp(f"dec_{i}_mlp", self.norm(f"dec_{i}_mlp", y))
        return self.norm("dec", y) @ self.p["tokens"].T


subject = Subject(
    kind="encoder_decoder",
    name="functions over parameters",
    build=Net,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "tied": True,
        "padding_side": "right",
    },
)
