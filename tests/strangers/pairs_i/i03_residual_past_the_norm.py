"""BERT's encoder: embeddings of token, place and segment with a LayerNorm, post-LN layers with the exact GELU, names as in
google-research/bert (`attention_output`, `intermediate_output`, `layer_output`)."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The feed-forward sublayer reads the normalised sum, as it should, but the residual that is added to its output is the "
    "sum before the LayerNorm: the layer is LN(h + FF(LN(h))) instead of LN(LN(h) + FF(LN(h))). The declared post-LN "
    "holds for attention alone, and the share of the residual grows with the activations."
)
PLACE = "WrongLayer.carried"


class Layer(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size, rate):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.attention_dense = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output_dense = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(rate)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def carried(self, attention_sum, attention_output):
        return attention_output

    def forward(self, layer_input, adder):
        q, k, v = (self.transpose_for_scores(f(layer_input)) for f in (self.query, self.key, self.value))
        attention_scores = torch.matmul(q, k.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1])) + adder
        context = torch.matmul(attention_scores.softmax(-1), v).permute(0, 2, 1, 3).flatten(2)
        attention_sum = layer_input + self.dropout(self.attention_dense(context))
        attention_output = self.attention_norm(attention_sum)
        intermediate_output = F.gelu(self.intermediate(attention_output))
        layer_output = self.dropout(self.output_dense(intermediate_output))
        return self.output_norm(layer_output + self.carried(attention_sum, attention_output))


class WrongLayer(Layer):
    def carried(self, attention_sum, attention_output):
        return attention_sum


class Bert(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(2048, c.d_model)
        self.token_type_embeddings = nn.Embedding(2, c.d_model)
        self.norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.dropout = nn.Dropout(c.dropout)
        self.layers = nn.ModuleList(layer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        x = self.word_embeddings(input_ids) + self.position_embeddings(places) + self.token_type_embeddings(token_type_ids)
        x = self.dropout(self.norm(x))
        adder = x.new_zeros(())
        if attention_mask is not None:
            adder = x.new_zeros(attention_mask.shape).masked_fill(~attention_mask.bool(), torch.finfo(x.dtype).min / 2)
            adder = adder[:, None, None, :]
        for layer in self.layers:
            x = layer(x, adder)
        return x


def make(layer):
    return Subject(
        kind="encoder",
        name="bert",
        build=lambda c: Bert(c, layer),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={
            "causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "residual": True,
            "activation": "gelu", "bias": True, "norm_bias": True, "attention_scale": "1/sqrt(d_head)",
            "embedding_scale": False, "padding_side": "right", "sparse": False,
        },
    )  # fmt: skip


right, wrong = make(Layer), make(WrongLayer)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=3)
    good, bad = right.build(c).eval(), wrong.build(c).eval()
    with torch.no_grad():
        for p in good.parameters():
            p.normal_(0, 0.5 if p.dim() > 1 else 0.7)
    bad.load_state_dict(good.state_dict())

    # torch's own post-LN layer with the same weights is the independent definition
    reference = []
    for layer in good.double().layers:
        other = nn.TransformerEncoderLayer(12, 3, 20, 0.0, "gelu", 1e-12, batch_first=True).double()
        other.self_attn.in_proj_weight.data = torch.cat([m.weight for m in (layer.query, layer.key, layer.value)]).detach()
        other.self_attn.in_proj_bias.data = torch.cat([m.bias for m in (layer.query, layer.key, layer.value)]).detach()
        pairs = (
            (other.self_attn.out_proj, layer.attention_dense), (other.linear1, layer.intermediate),
            (other.linear2, layer.output_dense), (other.norm1, layer.attention_norm), (other.norm2, layer.output_norm),
        )  # fmt: skip
        for to, of in pairs:
            to.load_state_dict(of.state_dict())
        reference.append(other)
    tokens = torch.randint(0, 11, (2, 8))
    mask = torch.arange(8)[None] < torch.tensor([8, 5])[:, None]
    x = good.word_embeddings(tokens) + good.position_embeddings.weight[:8] + good.token_type_embeddings.weight[0]
    truth = good.norm(x)
    for layer in reference:
        truth = layer.train()(truth, src_key_padding_mask=~mask)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        a, b = (m.to(dtype)(tokens, mask) for m in (good, bad))
        far = [(y - truth)[mask].abs().max().item() for y in (a, b)]
        print(dtype, "right %.1e wrong %.2f" % tuple(far), "spread", a.std().item(), b.std().item())
        assert far[0] < small and far[1] > 0.05
        for m in (good, bad):
            assert (m(tokens[1:, :5]) - m(tokens, mask)[1:, :5]).abs().max() < small
