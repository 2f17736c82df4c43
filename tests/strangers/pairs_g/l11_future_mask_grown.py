"""Translation model in fairseq's manner: learned positions, pre-LN, and a buffered future mask that is enlarged when needed."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The buffered causal mask is made for 64 target tokens; when it is enlarged for a longer target, the new columns are filled "
    "with True in the old rows as well, so that the first 64 positions see all tokens from position 64 on."
)
PLACE = "LeakyFutureMask.fill, used in FutureMask.__call__"


class FutureMask:
    """`visible[i, j]`: may target i see target j. Made once, enlarged when a longer target comes."""

    fill = False

    def __init__(self, size=64):
        self.visible = torch.ones(size, size, dtype=torch.bool).tril()

    def __call__(self, length):
        have = self.visible.shape[0]
        if have < length:
            more = length - have
            visible = F.pad(self.visible, (0, more, 0, more), value=self.fill)
            visible[have:] = torch.ones(more, length, dtype=torch.bool).tril(have)
            self.visible = visible
        return self.visible[:length, :length]


class LeakyFutureMask(FutureMask):
    fill = True


class MultiheadAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, query, memory, visible):
        """visible: bool, [B or 1, T or 1, S]"""
        q = self.q_proj(query).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v_proj(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        hidden = ~visible.unsqueeze(1)
        scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3))
        probs = F.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1).masked_fill(hidden, 0.0)
        return self.out_proj(torch.matmul(probs.to(v.dtype), v).transpose(1, 2).flatten(2))


class Sublayers(nn.Module):
    def __init__(self, dim, heads, hidden, cross):
        super().__init__()
        self.self_attn_layer_norm, self.self_attn = nn.LayerNorm(dim), MultiheadAttention(dim, heads)
        if cross:
            self.encoder_attn_layer_norm, self.encoder_attn = nn.LayerNorm(dim), MultiheadAttention(dim, heads)
        self.final_layer_norm, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, visible, memory=None, memory_visible=None):
        h = self.self_attn_layer_norm(x)
        x = x + self.self_attn(h, h, visible)
        if memory is not None:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), memory, memory_visible)
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))


class TransformerModel(nn.Module):
    def __init__(self, c, future_mask):
        super().__init__()
        self.max_len, self.heads = c.max_len, c.num_heads
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.source_positions, self.target_positions = (nn.Embedding(c.max_len, c.d_model) for _ in range(2))
        self.encoder = nn.ModuleList(Sublayers(c.d_model, c.num_heads, c.d_ff, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Sublayers(c.d_model, c.num_heads, c.d_ff, True) for _ in range(c.num_layers))
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.output_projection = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.future_mask = future_mask()

    def place(self, tokens, table):
        if tokens.shape[1] > self.max_len:
            raise ValueError(f"{tokens.shape[1]} tokens exceed {self.max_len}")
        return self.embed_tokens(tokens) + table.weight[: tokens.shape[1]]

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_visible = (torch.ones_like(source) if source_mask is None else source_mask).bool()[:, None]
        memory = self.place(source, self.source_positions)
        for layer in self.encoder:
            memory = layer(memory, source_visible)
        memory = self.encoder_norm(memory)
        visible = self.future_mask(target.shape[1]).to(target.device)[None]
        if target_mask is not None:
            visible = visible & target_mask.bool()[:, None]
        x = self.place(target, self.target_positions)
        for layer in self.decoder:
            x = layer(x, visible, memory, source_visible)
        return self.output_projection(self.decoder_norm(x))


SIZES = DrawnConfig(d_model=48, num_heads=4, num_key_value_heads=4, num_layers=2, d_ff=96, vocab_size=60, max_len=256)


def trained(future_mask):
    model = TransformerModel(SIZES, future_mask)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.normal_(0.0, 0.7 if "positions" in name or "tokens" in name else SIZES.d_model**-0.5, generator=g)
    return model.eval()


def subject(future_mask, name):
    return Subject(
        kind="encoder_decoder",
        module=trained(future_mask),
        config=SIZES,
        name=name,
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "learned",
            "max_len": 256,
            "beyond_max_len": "error",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "relu",
            "bias": True,
            "output_bias": False,
            "tied": False,
            "embedding_scale": False,
            "encodes_source": True,
            "cross_attention": True,
            "padding_side": "right",
        },
    )


right = subject(FutureMask, "fairseq-like")
wrong = subject(LeakyFutureMask, "fairseq-like-leaky")


def reference(m, source, target, source_mask, target_mask):
    p = {k: v.double() for k, v in m.named_parameters()}
    D, K = 48, 12
    lin = lambda h, n: h @ p[n + ".weight"].T + p[n + ".bias"]
    ln = lambda h, n: F.layer_norm(h, (D,), p[n + ".weight"], p[n + ".bias"])

    def mha(x, y, n, see):
        q, k, v = lin(x, n + ".q_proj"), lin(y, n + ".k_proj"), lin(y, n + ".v_proj")
        o = [(q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5).masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0) @ v[..., a : a + K] for a in range(0, D, K)]
        return lin(torch.cat(o, -1), n + ".out_proj")

    def ff(x, n):
        return x + lin(lin(ln(x, n + ".final_layer_norm"), n + ".fc1").relu(), n + ".fc2")

    y = p["embed_tokens.weight"][source] + p["source_positions.weight"][: source.shape[1]]
    for i in range(2):
        h = ln(y, f"encoder.{i}.self_attn_layer_norm")
        y = ff(y + mha(h, h, f"encoder.{i}.self_attn", source_mask[:, None]), f"encoder.{i}")
    y = ln(y, "encoder_norm")
    T = target.shape[1]
    see = (torch.arange(T)[:, None] >= torch.arange(T)) & target_mask[:, None]
    x = p["embed_tokens.weight"][target] + p["target_positions.weight"][:T]
    for i in range(2):
        h = ln(x, f"decoder.{i}.self_attn_layer_norm")
        x = x + mha(h, h, f"decoder.{i}.self_attn", see)
        x = x + mha(ln(x, f"decoder.{i}.encoder_attn_layer_norm"), y, f"decoder.{i}.encoder_attn", source_mask[:, None])
        x = ff(x, f"decoder.{i}")
    return ln(x, "decoder_norm") @ p["output_projection.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        for S, T, same in [(4, 3, True), (100, 64, True), (9, 65, False), (30, 150, False)]:
            source, target = torch.randint(60, (2, S)), torch.randint(60, (2, T))
            sm, tm = torch.rand(2, S) > 0.3, torch.rand(2, T) > 0.3
            good, bad = trained(FutureMask), trained(LeakyFutureMask)
            for a, b in ((sm, tm), (None, None)):
                full = [torch.ones_like(z, dtype=torch.bool) if w is None else w for z, w in ((source, a), (target, b))]
                want = reference(good, source, target, *full)
                assert (good(source, target, a, b) - want).abs().max() < 1e-4
                off = (bad(source, target, a, b) - want).abs().max()
                assert (off < 1e-4) == same and (same or off > 1e-2 or not full[1][:, 64:].any()), (S, T, off)
            assert (trained(FutureMask).double()(source, target) - want).abs().max() < 1e-10
    print("ok", __file__)
