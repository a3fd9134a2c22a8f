"""The models that are timed: random weights, because time depends on shapes only."""

from dataclasses import dataclass, field

import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers.models.jamba import modeling_jamba


@dataclass(frozen=True)
class Model:
    """A model to time.

    Args:
        model_type (`str`): The architecture's name in transformers.
        config (`dict`): Its config.
        scale (`int`): What lengths are divided by, so that a window takes seconds.
        device (`str`): `"cpu"` or `"cuda"`.
        can_pack (`bool`): Whether rows may be joined end to end (attention only; recurrent states would leak).
    """

    model_type: str
    config: dict = field(default_factory=dict)
    scale: int = 1
    device: str = "cuda"
    can_pack: bool = False


_SMALL = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1536,
    "max_position_embeddings": 4096,
}
_JAMBA = {"num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
MODELS = {
    "qwen2-30m": Model("qwen2", _SMALL | {"num_hidden_layers": 9}, scale=32, device="cpu"),
    "jamba-30m": Model(
        "jamba",
        _SMALL | _JAMBA | {"mamba_d_state": 8, "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
        scale=64,
        device="cpu",
    ),
    "qwen2.5-7b": Model(
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
        can_pack=True,
    ),
    # 28 layers, 26 of them Mamba, 20 query heads and one key-value head, as in the model's card.
    "jamba2-3b": Model(
        "jamba",
        _JAMBA
        | {
            "vocab_size": 65536,
            "hidden_size": 2560,
            "num_hidden_layers": 28,
            "attn_layer_period": 14,
            "attn_layer_offset": 7,
            "num_attention_heads": 20,
            "num_key_value_heads": 1,
            "intermediate_size": 8192,
            "max_position_embeddings": 262144,
        },
    ),
}
PAD, EOS = 0, 1


def make_model(spec: Model) -> transformers.PreTrainedModel:
    """Random weights; float32 on the CPU, bfloat16 with FlashAttention on a GPU."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(spec.model_type, **spec.config, pad_token_id=PAD, eos_token_id=EOS)
    if spec.device == "cpu":
        modeling_jamba.mamba_selective_scan = selective_scan
        return transformers.AutoModelForCausalLM.from_config(config)
    with torch.device(spec.device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="flash_attention_2"
        )


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word is a number; TRL asks for a tokenizer, but rows are given as ids."""
    inner = Tokenizer(WordLevel({"<pad>": PAD, "<eos>": EOS} | {str(i): i for i in range(2, 64)}, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>")


class LinearRecurrence(torch.autograd.Function):
    """`h[t] = a[t] * h[t - 1] + b[t]` along the first dimension, one operation a step, forward and backward."""

    @staticmethod
    def forward(ctx, a, b):
        h = torch.empty_like(b)
        state = torch.zeros_like(b[0])
        for t in range(len(b)):
            state = torch.addcmul(b[t], a[t], state, out=h[t])
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx, grad):
        a, h = ctx.saved_tensors
        grad_b = torch.empty_like(grad)
        carried = torch.zeros_like(grad[0])
        for t in range(len(grad) - 1, -1, -1):
            torch.add(grad[t], carried, out=grad_b[t])
            carried = a[t] * grad_b[t]
        grad_a = torch.zeros_like(grad)
        torch.mul(grad_b[1:], h[:-1], out=grad_a[1:])
        return grad_a, grad_b


def selective_scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    **kwargs,
):
    """Equals `mamba_selective_scan` of transformers' Jamba, whose backward on a CPU is quadratic in the width.

    That one indexes a tensor at each position, and the backward of each index fills a tensor of the full width. Time
    per token would then say nothing about GPUs, whose kernels are linear.
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = torch.nn.functional.softplus(dt)
    x, dt = hidden_states.permute(2, 0, 1), dt.permute(2, 0, 1)  # (width, rows, channels)
    b, c = B.permute(2, 0, 1), C.permute(2, 0, 1)  # (width, rows, states)
    decay = torch.exp(dt[..., None] * A)
    states = LinearRecurrence.apply(decay, (dt * x)[..., None] * b[:, :, None, :])
    output = (states @ c[..., None]).squeeze(-1).permute(1, 2, 0)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * torch.nn.functional.silu(z)
    return (output, states[-1]) if return_last_state else output
