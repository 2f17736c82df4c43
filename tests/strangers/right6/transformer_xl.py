"""Transformer-XL: content and place biases u, v, sinusoids of the distance, the shift trick, norms behind."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject


class RelPartialLearnableMultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net = nn.Linear(d_model, 3 * d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.scale = 1 / (self.d_head**0.5)

    def _rel_shift(self, x):  # q k b h: row i moves left by q - 1 - i
        zero_pad = x.new_zeros((x.size(0), 1, *x.size()[2:]))
        x_padded = torch.cat([zero_pad, x], dim=1).view(x.size(1) + 1, x.size(0), *x.size()[2:])
        return x_padded[1:].view_as(x)

    def forward(self, w, r, u, v_bias, attn_mask):
        qlen, bsz, d = w.shape
        q, k, v = torch.chunk(self.qkv_net(w), 3, dim=-1)
        q, k, v = (z.view(qlen, bsz, self.n_head, self.d_head) for z in (q, k, v))
        r = self.r_net(r).view(-1, self.n_head, self.d_head)
        AC = torch.einsum("ibnd,jbnd->ijbn", q + u, k)
        BD = self._rel_shift(torch.einsum("ibnd,jnd->ijbn", q + v_bias, r))
        score = (AC + BD).mul(self.scale)
        score = score.masked_fill(attn_mask[..., None], torch.finfo(score.dtype).min)
        prob = F.softmax(score, dim=1)
        vec = torch.einsum("ijbn,jbnd->ibnd", prob, v).reshape(qlen, bsz, d)
        return self.layer_norm(w + self.o_net(vec))


class PositionwiseFF(nn.Module):
    def __init__(self, d_model, d_inner):
        super().__init__()
        self.CoreNet = nn.Sequential(nn.Linear(d_model, d_inner), nn.ReLU(inplace=True), nn.Linear(d_inner, d_model))
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, x):
        return self.layer_norm(x + self.CoreNet(x))


class Layer(nn.Module):
    def __init__(self, n_head, d_model, d_inner):
        super().__init__()
        self.dec_attn = RelPartialLearnableMultiHeadAttn(n_head, d_model)
        self.pos_ff = PositionwiseFF(d_model, d_inner)

    def forward(self, x, r, u, v, mask):
        return self.pos_ff(self.dec_attn(x, r, u, v, mask))


class MemTransformerLM(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.d = c.d_model
        self.word_emb = nn.Embedding(c.vocab_size, c.d_model)
        shape = (c.num_heads, c.d_model // c.num_heads)
        self.r_w_bias, self.r_r_bias = nn.Parameter(torch.randn(shape) * 0.3), nn.Parameter(torch.randn(shape) * 0.3)
        self.layers = nn.ModuleList([Layer(c.num_heads, c.d_model, c.d_ff) for _ in range(c.num_layers)])
        self.out_layer = nn.Linear(c.d_model, c.vocab_size)

    def pos_emb(self, klen, like):
        pos_seq = torch.arange(klen - 1, -1, -1.0, device=like.device, dtype=torch.float64)
        inv = 1 / (10000 ** (torch.arange(0.0, self.d, 2.0, device=like.device, dtype=torch.float64) / self.d))
        s = torch.outer(pos_seq, inv)
        return torch.cat([s.sin(), s.cos()], -1)[:, : self.d].to(like.dtype)

    def forward(self, data, mask=None):
        x = self.word_emb(data).transpose(0, 1) * (self.d**0.5)
        t = x.shape[0]
        i = torch.arange(t, device=x.device)
        attn_mask = (i[None, :] > i[:, None])[:, :, None]
        if mask is not None:
            attn_mask = attn_mask | ~mask.bool().t()[None]
        r = self.pos_emb(t, x)
        for layer in self.layers:
            x = layer(x, r, self.r_w_bias, self.r_r_bias, attn_mask)
        return self.out_layer(x).transpose(0, 1)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="Transformer-XL", build=MemTransformerLM, forward=forward,
    declares={
        "causal": True, "positions": "relative", "norm": "layer", "norm_placement": "post", "residual": True,
        "activation": "relu", "output_bias": True, "tied": False, "padding_side": "both", "embedding_scale": True,
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works", "structure": "other",
    },
)
undeclared = Subject(kind="decoder", build=MemTransformerLM, forward=forward)
