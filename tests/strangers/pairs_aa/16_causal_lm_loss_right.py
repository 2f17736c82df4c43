"""The loss of a causal language model in the way of Hugging Face: labels are the inputs, the loss moves them."""

from torch import nn

from veriformer.properties import Subject


def for_causal_lm_loss(logits, labels, vocab_size, ignore_index=-100):
    # Shift so that tokens < n predict n
    shift_logits = logits[:, :-1, :].reshape(-1, vocab_size)
    shift_labels = labels[:, 1:].reshape(-1)
    # Flatten the tokens
    loss_fct = nn.CrossEntropyLoss(ignore_index=ignore_index)
    return loss_fct(shift_logits, shift_labels.to(shift_logits.device))


subject = Subject(
    kind="loss",
    name="ForCausalLMLoss",
    forward=lambda model, logits, labels: for_causal_lm_loss(logits, labels, logits.shape[-1]),
    declares={"shifts_labels": True, "ignore_index": -100, "empty_loss": "nan", "min_length": 2},
)
