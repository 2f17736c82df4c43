import torch
import torch.nn as nn
import torch.nn.functional as F


class PretrainedConfig:
    model_type = ""

    def __init__(self, **kwargs):
        self.pad_token_id = kwargs.pop("pad_token_id", None)
        self.bos_token_id = kwargs.pop("bos_token_id", None)
        self.eos_token_id = kwargs.pop("eos_token_id", None)
        self.tie_word_embeddings = kwargs.pop("tie_word_embeddings", True)
        self.use_return_dict = kwargs.pop("return_dict", True)
        for k, v in kwargs.items():
            setattr(self, k, v)


class TinyStoryConfig(PretrainedConfig):
    model_type = "tinystory"

    def __init__(
        self,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        layer_norm_eps=1e-5,
        initializer_range=0.02,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        super().__init__(**kwargs)


class TinyStoryAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def _shape(self, t):
        return t.view(t.shape[0], t.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, attention_mask):
        bsz, q_len, width = hidden_states.shape
        q = self._shape(self.q_proj(hidden_states))
        k = self._shape(self.k_proj(hidden_states))
        v = self._shape(self.v_proj(hidden_states))
        weights = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        weights = weights + attention_mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(weights, v).transpose(1, 2).reshape(bsz, q_len, width)
        return self.out_proj(out)


class TinyStoryLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = TinyStoryAttention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states, attention_mask):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), attention_mask)
        residual = hidden_states
        hidden_states = self.fc2(F.gelu(self.fc1(self.post_attention_layernorm(hidden_states))))
        return residual + hidden_states


class TinyStoryForCausalLM(nn.Module):
    config_class = TinyStoryConfig

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList([TinyStoryLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)

    def _mask(self, input_ids, attention_mask, dtype):
        b, t = input_ids.shape
        causal = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).tril()[None, None]
        if attention_mask is not None:
            causal = causal & attention_mask[:, None, None, :].bool()
        return torch.zeros(causal.shape, dtype=dtype, device=input_ids.device).masked_fill(
            ~causal, torch.finfo(dtype).min
        )

    def forward(self, input_ids, attention_mask=None, labels=None):
        """
        labels (`torch.LongTensor` of shape `(batch, seq)`, *optional*): same layout as `input_ids`,
        shifted inside the model; positions set to -100 are ignored.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(positions)
        mask = self._mask(input_ids, attention_mask, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        logits = self.lm_head(self.norm(hidden_states))

        loss = None
        if labels is not None:
            shift_logits = logits[..., 1:, :].contiguous()
            shift_labels = labels[..., :-1].contiguous()
            loss = F.cross_entropy(
                shift_logits.view(-1, self.config.vocab_size), shift_labels.view(-1), ignore_index=-100
            )
        return {"loss": loss, "logits": logits}
