"""DeepNet: norms behind, the stream multiplied by (2N)^(1/4), the writing matrices begun smaller."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class DeepNormLayer(nn.Module):
    def __init__(self, d, h, f, alpha, beta, p):
        super().__init__()
        self.alpha, self.h = alpha, h
        self.qk, self.v, self.o = nn.Linear(d, 2 * d), nn.Linear(d, d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.norm1, self.norm2, self.drop = nn.LayerNorm(d), nn.LayerNorm(d), nn.Dropout(p)
        for lin, gain in ((self.qk, 1.0), (self.v, beta), (self.o, beta), (self.up, beta), (self.down, beta)):
            nn.init.xavier_normal_(lin.weight, gain=gain)
            nn.init.zeros_(lin.bias)

    def forward(self, x, see):
        b, t, d = x.shape
        q, k = self.qk(x).unflatten(-1, (2, self.h, d // self.h)).unbind(2)
        v = self.v(x).unflatten(-1, (self.h, d // self.h))
        heads = []
        for i in range(self.h):  # one head after another
            s = torch.bmm(q[:, :, i], k[:, :, i].transpose(1, 2)) / (d // self.h) ** 0.5
            s = s.masked_fill(~see, torch.finfo(s.dtype).min)
            heads.append(torch.bmm(self.drop(s.softmax(-1)), v[:, :, i]))
        x = self.norm1(x * self.alpha + self.drop(self.o(torch.cat(heads, -1))))
        return self.norm2(x * self.alpha + self.drop(self.down(torch.nn.functional.gelu(self.up(x)))))


class DeepNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        n = c.num_layers
        self.word, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(
            DeepNormLayer(c.d_model, c.num_heads, c.d_ff, (2 * n) ** 0.25, (8 * n) ** -0.25, c.dropout)
            for _ in range(n)
        )

    def forward(self, tokens, mask=None):
        b, t = tokens.shape
        see = torch.ones(b, 1, t, dtype=torch.bool, device=tokens.device) if mask is None else mask[:, None].bool()
        x = self.word(tokens) + self.place(torch.arange(t, device=tokens.device)).unsqueeze(0)
        for layer in self.layers:
            x = layer(x, see)
        return x


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="encoder", name="DeepNet", build=DeepNet, forward=forward,
    declares={
        "causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "residual": True,
        "activation": "gelu", "bias": True, "padding_side": "right", "attention_scale": "1/sqrt(d_head)",
        "beyond_max_len": "error", "embedding_scale": False, "init": "other",
    },
)
undeclared = Subject(kind="encoder", build=DeepNet, forward=forward)
