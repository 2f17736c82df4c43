WHAT = "The gains of LayerScale stand in a plain list, so that they are in no state_dict and no optimizer: a checkpoint reloads with other outputs (line 47)."
import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, visible=None):
        B, T, D = x.shape
        q = self.q(x).view(B, T, self.num_heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(B, T, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(2, 3) * (D // self.num_heads) ** -0.5
        if visible is not None:
            logits = torch.where(visible[:, None, None, :], logits, torch.finfo(logits.dtype).min)
        return self.out((logits.softmax(3) @ v).transpose(1, 2).reshape(B, T, D))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.expand, self.contract = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.contract(nn.functional.gelu(self.expand(x)))


class ScaledEncoder(nn.Module):
    """What each sublayer gives is multiplied, channel by channel, by a gain that is learnt."""

    def __init__(self, vocab_size, max_len, dim, num_heads, num_layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.position = nn.Parameter(torch.randn(max_len, dim) * 0.1)
        self.sublayers = nn.ModuleList()
        for _ in range(num_layers):
            self.sublayers.append(SelfAttention(dim, num_heads))
            self.sublayers.append(FeedForward(dim, hidden))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in self.sublayers)
        gains = [nn.Parameter(0.5 + torch.rand(dim)) for _ in self.sublayers]
        self.gains = gains
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        visible = None if attention_mask is None else attention_mask.bool()
        for sublayer, norm, gain in zip(self.sublayers, self.norms, self.gains):
            if isinstance(sublayer, SelfAttention):
                x = x + gain * sublayer(norm(x), visible)
            else:
                x = x + gain * sublayer(norm(x))
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="an encoder with LayerScale",
    build=lambda c: ScaledEncoder(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
