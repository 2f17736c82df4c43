"""Axial positions (Reformer): position p has row p // 64 and column p % 64; two small tables instead of one of 200 rows."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The number of rows of the axial position grid is max_len // 64, rounded down, and the row index is clamped to the table: "
    "where max_len is no multiple of 64, the last max_len % 64 positions are those of the row before once more "
    "(192..199 equal 128..135 at max_len 200)."
)
PLACE = "FlooredAxial.number_of_rows"

COLUMNS = 64


class AxialPositions(nn.Module):
    def __init__(self, max_len, dim):
        super().__init__()
        self.max_len = max_len
        self.rows = nn.Parameter(torch.randn(self.number_of_rows(max_len), dim))
        self.columns = nn.Parameter(torch.randn(COLUMNS, dim))

    @staticmethod
    def number_of_rows(max_len):
        return max(1, -(-max_len // COLUMNS))

    def forward(self, length):
        if length > self.max_len:
            raise ValueError(f"{length} positions asked for, {self.max_len} there")
        at = torch.arange(length, device=self.rows.device)
        row = torch.div(at, COLUMNS, rounding_mode="floor").clamp_(max=self.rows.shape[0] - 1)
        return self.rows[row] + self.columns[at % COLUMNS]


class FlooredAxial(AxialPositions):
    @staticmethod
    def number_of_rows(max_len):
        return max(1, max_len // COLUMNS)


class Encoder(nn.Module):
    def __init__(self, c, axial):
        super().__init__()
        self.heads = c.num_heads
        self.token = nn.Embedding(c.vocab_size, c.d_model)
        self.axial = axial(c.max_len, c.d_model)
        shapes = {"qkv": (3 * c.d_model, c.d_model), "o": (c.d_model, c.d_model), "up": (c.d_ff, c.d_model), "down": (c.d_model, c.d_ff)}
        self.w = nn.ModuleList(nn.ParameterDict({k: torch.empty(s) for k, s in shapes.items()}) for _ in range(c.num_layers))
        self.gain = nn.Parameter(torch.ones(2 * c.num_layers + 1, c.d_model))
        for layer in self.w:
            for p in layer.values():
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def forward(self, tokens, attention_mask=None):
        return self.hidden(self.token(tokens), attention_mask)

    def hidden(self, x, attention_mask=None):
        b, t, d = x.shape
        x = x + self.axial(t)
        keep = None
        if attention_mask is not None:
            keep = attention_mask.bool()[:, None, None, :].expand(b, 1, t, t)
            none = ~keep.any(-1, keepdim=True)
        for i, w in enumerate(self.w):
            h = F.rms_norm(x, (d,), self.gain[2 * i], 1e-6)
            q, k, v = F.linear(h, w["qkv"]).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
            if keep is None:
                o = F.scaled_dot_product_attention(q, k, v)
            else:
                o = F.scaled_dot_product_attention(q, k, v, attn_mask=keep | none).masked_fill(none, 0)
            x = x + F.linear(o.transpose(1, 2).reshape(b, t, d), w["o"])
            h = F.rms_norm(x, (d,), self.gain[2 * i + 1], 1e-6)
            x = x + F.linear(F.relu(F.linear(h, w["up"])), w["down"])
        return F.rms_norm(x, (d,), self.gain[-1], 1e-6)


SIZES = DrawnConfig(d_model=64, num_heads=4, num_key_value_heads=4, num_layers=2, d_ff=96, vocab_size=40, max_len=200)


def instance(axial, c=SIZES):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Encoder(c, AxialPositions)  # the same numbers whatever the class of the positions
    rows = model.axial
    model.axial = axial(c.max_len, c.d_model)
    model.axial.columns.data.copy_(rows.columns.data)
    model.axial.rows.data.copy_(rows.rows.data[: len(model.axial.rows)])
    return model.eval()


def subject(axial, name):
    return Subject(
        kind="encoder",
        module=instance(axial),
        config=SIZES,
        name=name,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.hidden(x, attention_mask),
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "other",
            "max_len": 200,
            "beyond_max_len": "error",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "rms",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "relu",
            "bias": False,
            "embedding_scale": False,
            "padding_side": "right",
            "structure": "other",
        },
    )


right = subject(AxialPositions, "axial")
wrong = subject(FlooredAxial, "axial-floored")


def reference(m, tokens, mask=None):
    p = {k: v.double() for k, v in m.state_dict().items()}
    T, D, H = tokens.shape[1], 64, 4
    rms = lambda h, g: h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * g
    grid = (p["axial.rows"][:, None] + p["axial.columns"][None]).flatten(0, 1)
    x = p["token.weight"][tokens] + grid[:T]
    for i in range(len(m.w)):
        q, k, v = (rms(x, p["gain"][2 * i]) @ p[f"w.{i}.qkv"].T).split(D, -1)
        o = []
        for a in range(0, D, D // H):
            s = q[..., a : a + 16] @ k[..., a : a + 16].mT / 4
            s = s if mask is None else s.masked_fill(~mask[:, None], -torch.inf)
            o.append(s.softmax(-1).nan_to_num(0) @ v[..., a : a + 16])
        x = x + torch.cat(o, -1) @ p[f"w.{i}.o"].T
        x = x + (rms(x, p["gain"][2 * i + 1]) @ p[f"w.{i}.up"].T).relu() @ p[f"w.{i}.down"].T
    return rms(x, p["gain"][-1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = right.module, wrong.module
    with torch.no_grad():
        for T, same in [(2, True), (100, True), (192, True), (193, False), (200, False)]:
            tokens = torch.randint(40, (2, T))
            mask = torch.arange(T) < torch.tensor([[T], [T // 2]])
            for keep in (None, mask):
                want = reference(good, tokens, keep)
                assert (good(tokens, keep) - want).abs().max() < 1e-4
                off = (bad(tokens, keep) - want).abs().max()
                assert (off < 1e-4) == same and (same or off > 1e-1), (T, off)
        assert (instance(AxialPositions).double()(tokens, mask) - want).abs().max() < 1e-10
        swapped = tokens.clone()
        tokens[:, 130], tokens[:, 194] = 1, 2
        swapped.copy_(tokens)
        swapped[:, 130], swapped[:, 194] = 2, 1
        assert (bad(tokens) - bad(swapped))[:, 5].abs().max() < 1e-5 < 1e-3 < (good(tokens) - good(swapped))[:, 5].abs().max()
    print("ok", __file__)
