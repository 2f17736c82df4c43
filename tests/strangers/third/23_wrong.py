import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, hidden_dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(hidden_dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(hidden_dim, ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    """Mixtral style sparse mixture of experts: every token goes to its top_k experts and
    the outputs are added with the renormalised routing weights."""

    def __init__(self, hidden_dim: int = 32, ffn_dim: int = 64, num_experts: int = 4, top_k: int = 2):
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = nn.Linear(hidden_dim, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden_dim, ffn_dim) for _ in range(num_experts)])

    def forward(self, hidden_states):
        batch, seq, dim = hidden_states.shape
        flat = hidden_states.reshape(-1, dim)
        router_logits = self.gate(flat)
        routing = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing, selected = torch.topk(routing, self.top_k, dim=-1)
        routing = (routing / routing.sum(dim=-1, keepdim=True)).to(flat.dtype)

        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(selected == e)
            if token.numel() == 0:
                continue
            out[token] = expert(flat[token]) * routing[token, slot, None]
        return out.reshape(batch, seq, dim), router_logits


class MoEBlock(nn.Module):
    def __init__(self, hidden_dim=32, ffn_dim=64, num_experts=4, top_k=2):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_dim)
        self.moe = SparseMoE(hidden_dim, ffn_dim, num_experts, top_k)

    def forward(self, x):
        y, _ = self.moe(self.norm(x))
        return x + y
