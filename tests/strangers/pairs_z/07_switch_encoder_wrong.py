WHAT = "the router runs under no_grad, put there for the argmax of the choice: the probability that multiplies the expert's output carries no gradient either, and the router is never trained (line 20)."
"""A Switch Transformer encoder: every token goes to one expert, whose output is multiplied by its probability."""
import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class Switch(nn.Module):
    """Top-1 routing without a capacity limit."""

    def __init__(self, d_model: int, d_ff: int, n_experts: int) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.router = nn.Linear(d_model, n_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)) for _ in range(n_experts)
        )

    @torch.no_grad()
    def route(self, tokens):
        probs = self.router(tokens).softmax(dim=-1)
        return probs.max(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        prob, routes = self.route(tokens)
        chosen = [torch.eq(routes, e).nonzero(as_tuple=True)[0] for e in range(self.n_experts)]
        order = torch.cat(chosen)
        outputs = torch.cat([expert(tokens[index]) for expert, index in zip(self.experts, chosen)])
        final = torch.zeros_like(tokens).index_copy(0, order, outputs)
        return (final * prob.unsqueeze(-1)).view_as(x)


class SelfAttention(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.output = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, d // self.heads) for f in (self.query, self.key, self.value))
        scores = torch.einsum("bihd,bjhd->bijh", q, k) * (d // self.heads) ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :, None], torch.finfo(scores.dtype).min)
        attention = scores.softmax(dim=2)
        return self.output(torch.einsum("bijh,bjhd->bihd", attention, v).reshape(b, t, d))


class SwitchLayer(nn.Module):
    def __init__(self, d_model: int, heads: int, d_ff: int, n_experts: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_switch = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = SelfAttention(d_model, heads)
        self.switch = Switch(d_model, d_ff, n_experts)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), mask)
        return x + self.switch(self.norm_switch(x))


class SwitchEncoder(nn.Module):
    def __init__(self, vocab: int, d_model: int, heads: int, layers: int, d_ff: int, max_len: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d_model), nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList(SwitchLayer(d_model, heads, d_ff, n_experts=3) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


def router(model, x):
    switch = model.layers[0].switch
    prob, routes = switch.route(x.flatten(0, 1))
    dense = torch.nn.functional.one_hot(routes, switch.n_experts).to(prob.dtype) * prob[:, None]
    return dense.view(*x.shape[:2], -1)


subject = Subject(
    kind="encoder",
    name="Switch Transformer encoder",
    build=lambda c: SwitchEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    router=router,
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "norm_topk_prob": False,
        "padding_side": "right",
        "structure": "other",
    },
)
