import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MixtralBlockSparseTop2MLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)

    def forward(self, hidden_states):
        return self.w2(F.silu(self.w1(hidden_states)) * self.w3(hidden_states))


class MixtralSparseMoeBlock(nn.Module):
    """No capacity and no dropped tokens: every token goes to its top_k experts."""

    def __init__(self, hidden_size, intermediate_size, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            [MixtralBlockSparseTop2MLP(hidden_size, intermediate_size) for _ in range(num_experts)]
        )

    def route(self, hidden_states):
        probs = F.softmax(self.gate(hidden_states), dim=-1)
        routing_weights, selected_experts = torch.topk(probs, self.top_k, dim=-1)
        return routing_weights / routing_weights.sum(dim=-1, keepdim=True), selected_experts

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_dim)
        routing_weights, selected_experts = self.route(hidden_states)
        final_hidden_states = torch.zeros_like(hidden_states)
        # [experts, top_k, tokens]
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx, expert_layer in enumerate(self.experts):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[top_x]
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states = final_hidden_states.index_add(0, top_x, current_hidden_states)
        return final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)


def router(model, x):
    weights, chosen = model.route(x)
    return torch.zeros(*x.shape[:-1], model.num_experts, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="feed_forward",
    name="Mixtral sparse MoE block",
    build=lambda c: MixtralSparseMoeBlock(c.d_model, c.d_ff),
    forward=lambda model, x: model(x),
    router=router,
    declares={"norm_topk_prob": True, "bias": False, "activation": "swiglu", "structure": "other"},
)
