"""DeepNet's encoder in torchscale's manner: time first inside, post-LN with the residual times alpha = (2 N) ** (1/4), and
a clipped relative bias per layer. Only where the norm stands is declared."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "DeepNorm multiplies the residual by alpha before every LayerNorm; here the feed-forward sublayer adds it as it is "
    "(alpha 1), attention's alone is multiplied. The two sublayers of a block are weighed otherwise than each other, and "
    "the bound on the updates that alpha is for is lost."
)
PLACE = "WrongLayer.residual_connection of the feed-forward"
CLIP = 4


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.alpha = (2.0 * c.num_layers) ** 0.25
        self.num_heads = c.num_heads
        self.in_proj, self.out_proj = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.distance = nn.Parameter(torch.randn(c.num_heads, 2 * CLIP + 1))
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def residual_connection(self, x, residual, sublayer):
        return residual * self.alpha + x

    def attention(self, x, hidden):
        t, b, d = x.shape
        q, k, v = self.heads(x)
        at = torch.arange(t, device=x.device)
        bias = self.distance[:, (at[None] - at[:, None]).clamp(-CLIP, CLIP) + CLIP]
        scores = torch.bmm(q * q.shape[-1] ** -0.5, k.transpose(1, 2)).view(b, self.num_heads, t, t) + bias
        if hidden is not None:
            scores = scores.masked_fill(hidden[:, None, None], torch.finfo(scores.dtype).min)
        out = torch.bmm(scores.softmax(-1).flatten(0, 1), v)
        return self.out_proj(out.transpose(0, 1).reshape(t, b, d))

    def heads(self, x):
        t, b, d = x.shape
        return (y.reshape(t, b * self.num_heads, -1).transpose(0, 1) for y in self.in_proj(x).chunk(3, -1))

    def forward(self, x, hidden):
        x = self.self_attn_layer_norm(self.residual_connection(self.attention(x, hidden), x, "attention"))
        return self.final_layer_norm(self.residual_connection(self.fc2(F.relu(self.fc1(x))), x, "ffn"))


class WrongLayer(EncoderLayer):
    def residual_connection(self, x, residual, sublayer):
        return residual * self.alpha + x if sublayer == "attention" else residual + x


class DeepNet(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        x = self.embed_tokens(tokens).transpose(0, 1)
        hidden = None if attention_mask is None else ~attention_mask.bool()
        for layer in self.layers:
            x = layer(x, hidden)
        return x.transpose(0, 1)


def make(layer):
    return Subject(
        kind="encoder",
        name="DeepNet",
        build=lambda c: DeepNet(c, layer),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={"norm_placement": "post"},
    )


right, wrong = make(EncoderLayer), make(WrongLayer)


if __name__ == "__main__":
    torch.manual_seed(0)
    for layers in (1, 2, 4):
        c = DrawnConfig(d_model=12, num_heads=3, num_layers=layers)
        good, bad = right.build(c), wrong.build(c)
        with torch.no_grad():
            for p in good.parameters():
                p.normal_(0, 0.5 if p.dim() > 1 else 0.8)
        bad.load_state_dict(good.state_dict())
        tokens = torch.randint(0, 11, (2, 9))
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, 6:] = False
        mask[1, :2] = False
        w = {k: v.double() for k, v in good.state_dict().items()}

        def slow(row):
            def lin(x, n):
                return x @ w[n + ".weight"].T + w[n + ".bias"]

            def norm(x, n):
                x = x - x.mean(-1, keepdim=True)
                return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[n + ".weight"] + w[n + ".bias"]

            x, alpha = w["embed_tokens.weight"][row], float(2 * layers) ** 0.25
            for l in range(layers):
                p = f"layers.{l}."
                qkv, heads = lin(x, p + "in_proj"), []
                for h in range(3):
                    q, k, v = (qkv[:, 12 * j + 4 * h : 12 * j + 4 * h + 4] for j in range(3))
                    s = q @ k.T / 2
                    for i in range(len(row)):
                        for j in range(len(row)):
                            s[i, j] += w[p + "distance"][h, max(-CLIP, min(CLIP, j - i)) + CLIP]
                    heads.append(s.softmax(-1) @ v)
                x = norm(alpha * x + lin(torch.cat(heads, 1), p + "out_proj"), p + "self_attn_layer_norm")
                x = norm(alpha * x + lin(lin(x, p + "fc1").relu(), p + "fc2"), p + "final_layer_norm")
            return x

        truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            far = []
            for m in (good, bad):
                y = m.to(dtype)(tokens, mask)
                far.append(max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1)))
            print(layers, dtype, "right %.1e wrong %.2f" % tuple(far), "spread", y.std().item())
            assert far[0] < small and far[1] > 0.1
