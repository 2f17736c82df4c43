"""GPT-J: attention and MLP of a block run in parallel on one LayerNorm, and both are added to the
residual stream. Rotary positions on the first `rotary_dim` channels of each head."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class GPTJConfig:
    def __init__(self, vocab_size=100, n_positions=128, n_embd=64, n_layer=3, n_head=4, rotary_dim=8,
                 n_inner=None, resid_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-5):
        self.vocab_size = vocab_size
        self.n_positions = n_positions
        self.n_embd = n_embd
        self.n_layer = n_layer
        self.n_head = n_head
        self.rotary_dim = rotary_dim
        self.n_inner = n_inner or 4 * n_embd
        self.resid_pdrop = resid_pdrop
        self.attn_pdrop = attn_pdrop
        self.layer_norm_epsilon = layer_norm_epsilon


def create_sinusoidal_positions(num_pos, dim):
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.einsum("i,j->ij", torch.arange(num_pos).float(), inv_freq)
    return torch.cat((torch.sin(angles), torch.cos(angles)), dim=1)


def rotate_every_two(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply_rotary_pos_emb(x, sin, cos):
    sin = torch.repeat_interleave(sin[None, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[None, :, None, :], 2, 3)
    return x * cos + rotate_every_two(x) * sin


class GPTJAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.rotary_dim = config.rotary_dim
        self.q_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.k_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.v_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)
        self.register_buffer(
            "embed_positions", create_sinusoidal_positions(config.n_positions, config.rotary_dim), persistent=False
        )

    def forward(self, hidden_states):
        b, t, d = hidden_states.shape
        query = self.q_proj(hidden_states).view(b, t, self.num_heads, self.head_dim)
        key = self.k_proj(hidden_states).view(b, t, self.num_heads, self.head_dim)
        value = self.v_proj(hidden_states).view(b, t, self.num_heads, self.head_dim)

        sin, cos = self.embed_positions[:t].chunk(2, dim=-1)
        r = self.rotary_dim
        query = torch.cat((apply_rotary_pos_emb(query[..., :r], sin, cos), query[..., r:]), dim=-1)
        key = torch.cat((apply_rotary_pos_emb(key[..., :r], sin, cos), key[..., r:]), dim=-1)

        query, key, value = (z.permute(0, 2, 1, 3) for z in (query, key, value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_dim)
        causal = torch.tril(torch.ones(t, t, dtype=torch.bool, device=scores.device))
        scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
        weights = self.attn_dropout(F.softmax(scores, dim=-1))
        out = torch.matmul(weights, value).permute(0, 2, 1, 3).reshape(b, t, d)
        return self.resid_dropout(self.out_proj(out))


class GPTJMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc_in = nn.Linear(config.n_embd, config.n_inner)
        self.fc_out = nn.Linear(config.n_inner, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x):
        return self.dropout(self.fc_out(F.gelu(self.fc_in(x), approximate="tanh")))


class GPTJBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPTJAttention(config)
        self.mlp = GPTJMLP(config)

    def forward(self, hidden_states):
        hidden_states = self.ln_1(hidden_states)
        residual = hidden_states
        attn_output = self.attn(hidden_states)
        feed_forward_hidden_states = self.mlp(hidden_states)
        return attn_output + feed_forward_hidden_states + residual


class GPTJForCausalLM(nn.Module):
    def __init__(self, config: GPTJConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([GPTJBlock(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, input_ids, labels=None):
        hidden_states = self.wte(input_ids)
        for block in self.h:
            hidden_states = block(hidden_states)
        logits = self.lm_head(self.ln_f(hidden_states))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, self.config.vocab_size), labels[:, 1:].reshape(-1), ignore_index=-100
        )
        return {"loss": loss, "logits": logits}
