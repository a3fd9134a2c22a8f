"""Runs stock TRL and ours on the same rows and records what matters: gradients, logs, shapes of forwards.

Rows of chosen lengths are fed through `rollout_func`, so nothing is generated. Token ids are random, so rows differ by
orders of magnitude in length and in log-probability.
"""

import tempfile
import types
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


VOCAB = 64
PAD, EOS = 0, 1

# 2 rows per stock micro-batch, 4 accumulation steps; completions of 1 to 40 tokens, prompts of 3 to 11.
COMPLETIONS = (2, 3, 17, 20, 1, 9, 9, 40)
PROMPTS = (3, 11, 5, 7, 3, 11, 5, 7)


@dataclass(frozen=True)
class Row:
    """A prompt with its completion; `env_mask` is 0 for tokens that a tool wrote, `logprobs` are the sampler's."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    env_mask: tuple[int, ...] | None = None
    logprobs: tuple[float | None, ...] | None = None


def make_rows(completions: Sequence[int] = COMPLETIONS, prompts: Sequence[int] = PROMPTS, seed: int = 0) -> list[Row]:
    """Rows with random ids above the special ones; every second completion ends in eos."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count):
        return tuple(torch.randint(2, VOCAB, (count,), generator=generator).tolist())

    rows = []
    for index, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        completion = ids(c)
        if index % 2 and c:
            completion = (*completion[:-1], EOS)
        rows.append(Row(ids(p), completion))
    return rows


def tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    vocab = {"<pad>": PAD, "<eos>": EOS} | {str(i): i for i in range(2, VOCAB)}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>" if pad_is_eos else "<pad>"
    )


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "attention_dropout": 0.0,
}


def tiny_config(model_type: str = "qwen2", **overrides) -> transformers.PretrainedConfig:
    extra = {
        "jamba": {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_d_conv": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        "gpt2": {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 512,
            "attn_pdrop": 0,
            "resid_pdrop": 0,
            "embd_pdrop": 0,
        },
        "qwen3_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 8,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
        "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
        "gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "sliding_window": 16},
        "granite": {"logits_scaling": 3.0},
    }.get(model_type, {})
    return transformers.AutoConfig.for_model(model_type, **_SMALL | extra | overrides)


def tiny_model(
    model_type: str = "qwen2", dtype: torch.dtype = torch.float64, seed: int = 0, **overrides
) -> transformers.PreTrainedModel:
    """A two-layer model from its config, on disk too, so that TRL can make a reference model that differs from it."""
    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    perturb_and_save(model)
    return in_float64_throughout(model) if dtype is torch.float64 else model


def perturb_and_save(model: transformers.PreTrainedModel) -> None:
    """Moves the weights, and leaves on disk, for the reference model, others than the policy starts with."""
    with torch.no_grad():
        for parameter in model.parameters():  # away from the small initial values, where a fault can hide
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = tempfile.mkdtemp(prefix="tiny-")
    model.save_pretrained(path)
    model.config._name_or_path = path
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


def in_float64_throughout(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Lets norms and rotary embeddings compute in float64, where transformers casts to float32, and experts at all.

    Rotary angles of a row depend on where it starts, so float32 angles alone make two layouts differ by 1e-7.
    """
    model.set_experts_implementation("eager")

    def norm(self, x, gate=None):
        if gate is not None:
            x = x * torch.nn.functional.silu(gate)
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", 1e-6))
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    def rotary(self, x, position_ids):
        angles = position_ids[:, :, None].double() * self.inv_freq.double()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and not name.startswith("Gemma"):  # Gemma scales by 1 + weight
            module.forward = types.MethodType(norm, module)
        elif name.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(rotary, module)
    return model


class Float64Head:
    """TRL's fused head, which accumulates in float32, in plain float64 operations."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        log_probs = (logits / temperature).log_softmax(dim=-1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy, None, None, None


@dataclass
class Recorder(TrainerCallback):
    """Gradients before each optimizer step, in float64."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in gradients.items()}  # FSDP2
        self.gradients.append({name: gradient.double().clone() for name, gradient in whole.items()})


@dataclass
class Run:
    """What one training run did."""

    trainer: GRPOTrainer
    gradients: list[dict[str, torch.Tensor]]
    logs: list[dict[str, float]]
    forwards: list[dict]  # of the policy model: shape, mask, grad enabled, names of the inputs
    reference_forwards: list[dict]
    batches: list[dict]  # what TRL's `_compute_loss` was given

    @property
    def losses(self) -> list[float]:
        return [log["loss"] for log in self.logs if "loss" in log]


@contextmanager
def recorded(model: torch.nn.Module, forwards: list[dict]):
    """Appends what every forward of `model` sees."""

    def record(module, args, kwargs, output):  # after the forward: earlier hooks may change what it is given
        if kwargs.get("attention_mask") is None:  # continuous batching generates without
            return
        forwards.append(
            {
                "ids": kwargs["input_ids"].clone(),
                "mask": kwargs["attention_mask"].clone(),
                "labels": None if kwargs.get("labels") is None else kwargs["labels"].clone(),
                "grad": torch.is_grad_enabled(),
                "names": set(kwargs),
                "use_cache": kwargs.get("use_cache"),
            }
        )

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def reward(completion_ids, **kwargs):
    return [float((sum(ids) + 3 * len(ids)) % 7) for ids in completion_ids]


def plain_training() -> dict[str, object]:
    """Options for a run of a tiny model on the CPU whose weights move by the plain gradient."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="run-"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
    }


def run(
    trainer_class: type,
    rows: Sequence[Row],
    model: transformers.PreTrainedModel,
    *,
    config_class: type = GRPOConfig,
    optimizer_steps: int = 1,
    pad_is_eos: bool = False,
    eval_rows: Sequence[Row] | None = None,
    prepare: Callable[[GRPOTrainer], None] | None = None,
    train_kwargs: dict | None = None,
    trainer_kwargs: dict | None = None,
    dataset_size: int | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **options,
) -> Run:
    """Trains on `rows`, taken in order and again from the start when they are used up."""
    options = {
        **plain_training(),
        "max_steps": optimizer_steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_generations": 2,
        "max_completion_length": 64,
        "shuffle_dataset": False,
        "beta": 0.0,
        **options,
    }
    args = config_class(**options)
    fed = {True: 0, False: 0}

    def rollout(prompts, trainer):
        training = trainer.model.training
        source = rows if training or eval_rows is None else eval_rows
        start, fed[training] = fed[training], fed[training] + len(prompts)
        chosen = [source[(start + i) % len(source)] for i in range(len(prompts))]
        output = {
            "prompt_ids": [list(row.prompt) for row in chosen],
            "completion_ids": [list(row.completion) for row in chosen],
            "logprobs": None if chosen[0].logprobs is None else [list(row.logprobs) for row in chosen],
        }
        if chosen[0].env_mask is not None:
            output["env_mask"] = [list(row.env_mask) for row in chosen]
        return output

    size = dataset_size or 64 * args.generation_batch_size
    recorder = Recorder()
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [str(2 + i % 50) for i in range(size)]}),
        eval_dataset=None if eval_rows is None else Dataset.from_dict({"prompt": [str(2 + i) for i in range(4)]}),
        processing_class=tokenizer(pad_is_eos),
        rollout_func=rollout,
        callbacks=[recorder, *callbacks],
        **trainer_kwargs or {},
    )
    if prepare is not None:
        prepare(trainer)
    if getattr(trainer, "ref_model", None) is not None and model.dtype is torch.float64:
        in_float64_throughout(trainer.ref_model.double())  # older TRL loads it in float32
    result = Run(trainer, recorder.gradients, [], [], [], [])

    compute = trainer._compute_loss

    def recorded_compute(model, inputs):
        result.batches.append(inputs)
        return compute(model, inputs)

    trainer._compute_loss = recorded_compute
    reference = trainer.ref_model if getattr(trainer, "ref_model", None) is not None else torch.nn.Identity()
    with recorded(trainer.model, result.forwards), recorded(reference, result.reference_forwards):
        trainer.train(**train_kwargs or {})
    result.logs = trainer.state.log_history
    return result


def relative_error(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Largest difference of any parameter's gradient, relative to the largest gradient of all."""
    assert ours.keys() == truth.keys(), ours.keys() ^ truth.keys()
    present = [name for name in truth if truth[name].numel()]  # FSDP1 leaves some ranks nothing of a parameter
    scale = max(truth[name].abs().max().item() for name in present)
    worst = max((ours[name] - truth[name]).abs().max().item() for name in present)
    return worst / scale if scale else worst


def compare(rows: Sequence[Row], make_model: Callable[[], transformers.PreTrainedModel], **options) -> tuple[Run, Run]:
    """Runs stock TRL and ours alike; our own options are left out for stock."""
    from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer

    own = {k: options.pop(k) for k in ("token_budget", "overhead_tokens", "padding_minimization") if k in options}
    stock = run(GRPOTrainer, rows, make_model(), **options)
    ours = run(PadminGRPOTrainer, rows, make_model(), config_class=PadminGRPOConfig, **options, **own)
    return stock, ours
