"""A fine-tuner's BERT classifier (tanh pooler over [CLS], dropout, head), whose layers are built by a helper that knows its
activations by name, as Hugging Face's ACT2FN does."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The layer that was added on top when the encoder was deepened takes the helper's default, CLIP's quick GELU "
    "x * sigmoid(1.702 x), where all others have the exact GELU that is declared: the two differ by up to 0.02, so that the "
    "last layer trains and looks like the rest."
)
PLACE = "WrongBert.layer: the last one without `activation`"
ACT2FN = {"quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "gelu": F.gelu, "relu": F.relu}


class BertLayer(nn.Module):
    def __init__(self, c, activation="quick_gelu"):
        super().__init__()
        d = c.d_model
        self.attention = nn.ModuleDict({name: nn.Linear(d, d) for name in ("query", "key", "value", "output")})
        self.attention_norm, self.output_norm = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
        self.intermediate, self.output = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)
        self.heads, self.activation, self.dropout = c.num_heads, activation, nn.Dropout(c.dropout)

    def forward(self, x, bias):
        q, k, v = (self.attention[n](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.dropout(self.attention["output"](mixed)))
        return self.output_norm(x + self.dropout(self.output(ACT2FN[self.activation](self.intermediate(x)))))


class BertClassifier(nn.Module):
    def layer(self, c, i):
        return BertLayer(c, activation="gelu")

    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(2048, c.d_model)
        self.types = nn.Parameter(torch.zeros(c.d_model))  # of the first segment, the only one here
        self.norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.layers = nn.ModuleList(self.layer(c, i) for i in range(c.num_layers))
        self.pooler, self.classifier = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, c.num_classes)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, tokens, attention_mask=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)) + self.types
        x = self.dropout(self.norm(x))
        bias = None
        if attention_mask is not None:
            bias = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~attention_mask.bool(), torch.finfo(x.dtype).min / 2)[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


class WrongBert(BertClassifier):
    def layer(self, c, i):
        return BertLayer(c, activation="gelu") if i < c.num_layers - 1 else BertLayer(c)


def make(cls):
    return Subject(
        kind="classifier",
        name="bert classifier",
        build=cls,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={
            "activation": "gelu", "pooling": "cls", "positions": "learned", "norm": "layer", "norm_placement": "post",
            "residual": True, "bias": True, "output_bias": True, "padding_side": "right", "extra_tokens": 0,
            "attention_scale": "1/sqrt(d_head)", "embedding_scale": False,
        },
    )  # fmt: skip


right, wrong = make(BertClassifier), make(WrongBert)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=3)
    good, bad = right.build(c).eval(), wrong.build(c).eval()
    with torch.no_grad():
        for name, p in good.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.35)
    bad.load_state_dict(good.state_dict())
    w = {k: v.double() for k, v in good.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 9))
    mask = torch.arange(9)[None] < torch.tensor([9, 5])[:, None]

    def slow(row):
        def lin(x, n):
            return x @ w[n + ".weight"].T + w[n + ".bias"]

        def norm(x, n):
            x = x - x.mean(-1, keepdim=True)
            return x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt() * w[n + ".weight"] + w[n + ".bias"]

        x = norm(w["words.weight"][row] + w["places.weight"][: len(row)] + w["types"], "norm")
        for l in range(3):
            p, heads = f"layers.{l}.", []
            q, k, v = (lin(x, p + "attention." + n) for n in ("query", "key", "value"))
            for h in range(3):
                r = slice(4 * h, 4 * h + 4)
                heads.append((q[:, r] @ k[:, r].T / 2).softmax(-1) @ v[:, r])
            x = norm(x + lin(torch.cat(heads, 1), p + "attention.output"), p + "attention_norm")
            h = lin(x, p + "intermediate")
            h = h * (1 + torch.special.erf(h / 2**0.5)) / 2
            x = norm(x + lin(h, p + "output"), p + "output_norm")
        return lin(lin(x[0], "pooler").tanh(), "classifier")

    truth = torch.stack([slow(tokens[b][mask[b]]) for b in (0, 1)])
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        far = [(m.to(dtype)(tokens, mask) - truth).abs().max().item() for m in (good, bad)]
        print(dtype, "right %.1e wrong %.1e" % tuple(far))
        assert far[0] < small and far[1] > 1e-3
        for m in (good, bad):
            assert (m(tokens[1:, :5]) - m(tokens, mask)[1:]).abs().max() < small
