"""GPT-2 cut into pipeline stages of four blocks each; static key-value cache, one slot a block. An instance with six blocks."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "A block finds its slot in the key-value cache by its index within its pipeline stage (four blocks a stage), so that from "
    "the fifth block on the slots of the first stage are overwritten: with more than four layers, the second chunk of cached "
    "decoding reads another layer's keys and values."
)
PLACE = "StageLocalGPT.slot"

BLOCKS_PER_STAGE = 4


class StaticCache:
    def __init__(self, slots: int, batch: int, heads: int, length: int, width: int, like: torch.Tensor):
        self.keys = like.new_zeros(slots, batch, heads, length, width)
        self.values = torch.zeros_like(self.keys)

    def update(self, slot, k, v, at):
        n = k.size(2)
        self.keys[slot, :, :, at : at + n] = k
        self.values[slot, :, :, at : at + n] = v
        return self.keys[slot, :, :, : at + n], self.values[slot, :, :, : at + n]


class Block(nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(d)
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)
        self.ln_2 = nn.LayerNorm(d)
        self.c_fc = nn.Linear(d, hidden)
        self.c_out = nn.Linear(hidden, d)

    def forward(self, x, at, mask, cache, slot):
        B, n, D = x.shape
        q, k, v = (u.view(B, n, self.heads, -1).transpose(1, 2) for u in self.c_attn(self.ln_1(x)).split(D, -1))
        if cache is not None:
            k, v = cache.update(slot, k, v, at)
        S = k.size(2)
        see = torch.ones(n, S, dtype=torch.bool, device=x.device).tril(S - n).expand(B, 1, n, S)
        if mask is not None:
            see = see & mask.bool()[:, None, None, :S]
        att = q @ k.mT * q.size(-1) ** -0.5
        att = att.masked_fill(~see, torch.finfo(att.dtype).min)
        att = F.softmax(att, -1) * see
        x = x + self.c_proj((att.to(v.dtype) @ v).transpose(1, 2).reshape(B, n, D))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.c = c
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        blocks = [Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)]
        self.stages = nn.ModuleList(
            nn.ModuleList(blocks[i : i + BLOCKS_PER_STAGE]) for i in range(0, len(blocks), BLOCKS_PER_STAGE)
        )
        self.ln_f = nn.LayerNorm(c.d_model)

    def slot(self, stage, local):
        return stage * BLOCKS_PER_STAGE + local

    def run(self, tokens, at=0, mask=None, cache=None):
        n = tokens.size(1)
        if at + n > self.c.max_len:
            raise ValueError(f"sequence of {at + n} is longer than {self.c.max_len}")
        x = self.wte(tokens) + self.wpe(torch.arange(at, at + n, device=tokens.device))
        for s, stage in enumerate(self.stages):
            for i, block in enumerate(stage):
                x = block(x, at, mask, cache, self.slot(s, i))
        return self.ln_f(x) @ self.wte.weight.T

    def forward(self, tokens, attention_mask=None):
        return self.run(tokens, 0, attention_mask)

    def new_cache(self, batch):
        c = self.c
        return StaticCache(c.num_layers, batch, c.num_heads, c.max_len, c.d_model // c.num_heads, self.wte.weight)

    @torch.no_grad()
    def chunked(self, chunks, attention_mask=None):
        cache, at, out = self.new_cache(chunks[0].size(0)), 0, []
        for chunk in chunks:
            out.append(self.run(chunk, at, attention_mask, cache))
            at += chunk.size(1)
        return torch.cat(out, 1)

    @torch.no_grad()
    def generate(self, tokens, steps, use_cache):
        cache, at = (self.new_cache(tokens.size(0)) if use_cache else None), 0
        for _ in range(steps):
            logits = self.run(tokens[:, at:], at, None, cache)
            at = tokens.size(1) if use_cache else 0
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
        return tokens


class StageLocalGPT(GPT):
    def slot(self, stage, local):
        return local


SIZES = DrawnConfig(d_model=48, num_heads=4, num_key_value_heads=4, num_layers=6, d_ff=96, vocab_size=101, max_len=128)


def filled(cls, c):
    m, g = cls(c), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.5 if name.startswith("w") else p.shape[1] ** -0.5, generator=g)
            elif name.endswith("bias"):
                p.normal_(0.0, 0.1, generator=g)
    return m.eval()


def subject(cls, name):
    return Subject(
        kind="decoder",
        module=filled(cls, SIZES),
        config=SIZES,
        name=name,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        cache=lambda m, chunks, attention_mask=None: m.chunked(chunks, attention_mask),
        generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "learned",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "gelu_tanh",
            "bias": True,
            "output_bias": False,
            "tied": True,
            "embedding_scale": False,
            "padding_side": "right",
            "max_len": 128,
            "beyond_max_len": "error",
        },
    )


right = subject(GPT, "gpt2-stages")
wrong = subject(StageLocalGPT, "gpt2-stages-local")


def reference(m, tokens, mask=None):
    p = {k: v.double() for k, v in m.named_parameters()}
    T, D, H = tokens.shape[1], m.c.d_model, m.c.num_heads
    K = D // H
    see = torch.ones(T, T).tril().bool().expand(len(tokens), T, T)
    see = see if mask is None else see & mask[:, None]
    x = p["wte.weight"][tokens] + p["wpe.weight"][:T]
    for l in range(m.c.num_layers):
        w = lambda n: (p[f"stages.{l // 4}.{l % 4}.{n}.weight"], p[f"stages.{l // 4}.{l % 4}.{n}.bias"])
        h = F.linear(F.layer_norm(x, (D,), *w("ln_1")), *w("c_attn"))
        heads = []
        for i in range(H):
            q, k, v = (h[..., j * D + i * K : j * D + (i + 1) * K] for j in range(3))
            heads.append((q @ k.mT / K**0.5).masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0.0) @ v)
        x = x + F.linear(torch.cat(heads, -1), *w("c_proj"))
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (D,), *w("ln_2")), *w("c_fc")), approximate="tanh"), *w("c_out"))
    return F.layer_norm(x, (D,), p["ln_f.weight"], p["ln_f.bias"]) @ p["wte.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    from dataclasses import replace

    for layers in (1, 2, 4, 5, 6):
        c = replace(SIZES, num_layers=layers)
        good, bad = filled(GPT, c), filled(StageLocalGPT, c)
        for sizes in [(9,), (3, 2), (20, 1, 1, 1), (60, 40)]:
            tokens = torch.randint(101, (3, sum(sizes)))
            mask = torch.rand(3, sum(sizes)) > 0.2
            want = reference(good, tokens, mask)
            assert (good(tokens, mask) - want).abs().max() < 2e-4
            assert (bad(tokens, mask) - want).abs().max() < 2e-4
            assert (good.chunked(tokens.split(sizes, 1), mask) - want).abs().max() < 2e-4
            off = (bad.chunked(tokens.split(sizes, 1), mask) - want).abs().max()
            same = layers <= 4 or len(sizes) == 1
            assert off < 2e-4 if same else off > 1e-1, (layers, sizes, off)
        assert (filled(GPT, c).double()(tokens, mask) - want).abs().max() < 1e-9
        assert torch.equal(good.generate(tokens[:, :9], 12, True), good.generate(tokens[:, :9], 12, False))
    print("ok", __file__)
