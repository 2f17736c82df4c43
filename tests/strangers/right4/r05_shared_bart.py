"""BART with ALBERT's economy: one encoder layer and one decoder layer, each run num_layers times; places start at row 2 of
their table (the first two rows are a relic of fairseq), a LayerNorm on the embeddings, post-LN, a bias on the tied
logits. Time first inside, heads folded into the batch.

Why it is right: sharing and the offset are the design, and the graph adds up the gradients of the rounds. Below: against
torch's own layers with the same weights, causal, blind to padding on the right, and the gradient of the shared layer
equal to the sum over unshared copies."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

OFFSET = 2


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, y, hidden):
        t, b, d = x.shape

        def shape(z):
            return z.reshape(z.shape[0], b * self.heads, -1).transpose(0, 1)

        q, k, v = shape(self.q_proj(x)) * (d // self.heads) ** -0.5, shape(self.k_proj(y)), shape(self.v_proj(y))
        scores = torch.bmm(q, k.transpose(1, 2)).unflatten(0, (b, self.heads))
        probs = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0)
        return self.out_proj(torch.bmm(probs.flatten(0, 1), v).transpose(0, 1).reshape(t, b, d))


class Layer(nn.Module):
    def __init__(self, c, cross):
        super().__init__()
        self.attn, self.attn_norm = Attention(c.d_model, c.num_heads), nn.LayerNorm(c.d_model)
        if cross:
            self.cross, self.cross_norm = Attention(c.d_model, c.num_heads), nn.LayerNorm(c.d_model)
        self.fc1, self.fc2, self.norm = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, hidden, memory=None, absent=None):
        x = self.attn_norm(x + self.attn(x, x, hidden))
        if memory is not None:
            x = self.cross_norm(x + self.cross(x, memory, absent))
        return self.norm(x + self.fc2(F.gelu(self.fc1(x))))


class Bart(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.rounds = c.num_layers
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.ModuleDict({side: nn.Embedding(2048 + OFFSET, c.d_model) for side in ("source", "target")})
        self.norms = nn.ModuleDict({side: nn.LayerNorm(c.d_model) for side in ("source", "target")})
        self.encoder, self.decoder = Layer(c, False), Layer(c, True)
        self.final_logits_bias = nn.Parameter(torch.zeros(c.vocab_size))

    def embed(self, tokens, side):
        at = torch.arange(tokens.shape[1], device=tokens.device) + OFFSET
        return self.norms[side](self.shared(tokens) + self.places[side](at)).transpose(0, 1)

    def forward(self, source, target, source_mask=None, target_mask=None):
        absent = torch.zeros_like(source, dtype=torch.bool) if source_mask is None else ~source_mask.bool()
        absent = absent[:, None, None]
        hidden = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)[None, None]
        if target_mask is not None:
            hidden = hidden | ~target_mask.bool()[:, None, None]
        memory = self.embed(source, "source")
        for _ in range(self.rounds):
            memory = self.encoder(memory, absent)
        x = self.embed(target, "target")
        for _ in range(self.rounds):
            x = self.decoder(x, hidden, memory, absent)
        return F.linear(x.transpose(0, 1), self.shared.weight, self.final_logits_bias)


def make(**declares):
    return Subject(
        kind="encoder_decoder", name="shared BART", build=Bart, declares=declares,
        forward=lambda model, source, target, source_mask=None, target_mask=None: model(
            source, target, source_mask, target_mask
        ),
    )  # fmt: skip


declared = make(
    shared_layers=True, position_offset=OFFSET, positions="learned", norm="layer", norm_placement="post", residual=True,
    activation="gelu", bias=True, output_bias=True, tied=True, attention_scale="1/sqrt(d_head)", encodes_source=True,
    embedding_scale=False, padding_side="right", structure="other", causal=True,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=3)
    model = Bart(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.4)

    def copy_of(layer, cls):
        n = cls(12, 3, 20, 0.0, F.gelu, batch_first=True).double()
        pairs = [(n.self_attn, layer.attn)] + ([(n.multihead_attn, layer.cross)] if hasattr(layer, "cross") else [])
        for to, of in pairs:
            three = (of.q_proj, of.k_proj, of.v_proj)
            to.in_proj_weight.data = torch.cat([m.weight for m in three]).detach().double()
            to.in_proj_bias.data = torch.cat([m.bias for m in three]).detach().double()
            to.out_proj.load_state_dict(of.out_proj.state_dict())
        norms = (layer.attn_norm, layer.cross_norm, layer.norm) if hasattr(layer, "cross") else (layer.attn_norm, layer.norm)
        for i, of in enumerate(norms):
            getattr(n, f"norm{i + 1}").load_state_dict(of.state_dict())
        n.linear1.load_state_dict(layer.fc1.state_dict())
        n.linear2.load_state_dict(layer.fc2.state_dict())
        return n.train()

    encoder = [copy_of(model.encoder, nn.TransformerEncoderLayer) for _ in range(3)]
    decoder = [copy_of(model.decoder, nn.TransformerDecoderLayer) for _ in range(3)]
    w = {k: v.double() for k, v in model.state_dict().items()}

    def slow(src, tgt):
        def embedded(row, side):
            x = w["shared.weight"][row] + w[f"places.{side}.weight"][2 : 2 + len(row)]
            return F.layer_norm(x, (12,), w[f"norms.{side}.weight"], w[f"norms.{side}.bias"])[None]

        x, y = embedded(src, "source"), embedded(tgt, "target")
        for layer in encoder:
            x = layer(x)
        for layer in decoder:
            y = layer(y, x, tgt_mask=torch.ones(len(tgt), len(tgt), dtype=torch.bool).triu(1))
        return y[0] @ w["shared.weight"].T + w["final_logits_bias"]

    source, target = torch.randint(0, 11, (2, 7)), torch.randint(0, 11, (2, 6))
    ms = torch.arange(7)[None] < torch.tensor([7, 4])[:, None]
    mt = torch.arange(6)[None] < torch.tensor([4, 6])[:, None]
    truth = [slow(source[b][ms[b]], target[b][mt[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        m = model.to(dtype)
        y = m(source, target, ms, mt)
        far = max((y[b][mt[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(source, target[:, :3]) - m(source, target)[:, :3]).abs().max().item()
        print(dtype, f"definition {far:.1e} causality {causal:.1e}")
        assert max(far, causal) < small
    model.double()(source[:1], target[:1], ms[:1], mt[:1])[:, :4].pow(2).sum().backward()
    truth[0].pow(2).sum().backward()
    summed = sum(layer.linear1.weight.grad for layer in decoder)
    gap = (model.decoder.fc1.weight.grad - summed).abs().max().item()
    print(f"gradient of the shared layer against the sum over copies {gap:.1e}")
    assert gap < 1e-9
