"""As `compat.py`, for `Trainer`, `SFTTrainer` and `DPOTrainer`: their private members, and what their losses are."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import transformers
from trl import DPOTrainer, SFTTrainer

from . import compat


# Losses of `DPOTrainer` that are a mean over pairs. The others sort the pairs, or are a mean over tokens.
_PAIR_LOSSES = frozenset(
    {
        "sigmoid",
        "hinge",
        "ipo",
        "exo_pair",
        "nca_pair",
        "robust",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
        "sigmoid_norm",
    }
)
_METHODS = {
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "log": ("logs",),
}


def check_trainer_class(trainer_class: type) -> None:
    """Raises [`TRLContractError`] if a method that we override is missing or takes other parameters."""
    compat.check_trainer_class(trainer_class, _METHODS)


def is_preference(trainer: transformers.Trainer) -> bool:
    """Whether a batch holds the chosen sequences, then the rejected ones, and the loss is a mean over pairs."""
    return isinstance(trainer, DPOTrainer)


def why_left_alone(trainer: transformers.Trainer) -> str | None:
    """Why the loss of a window is not a weighted sum over its rows, or rows cannot be told apart; or `None`."""
    args, config = trainer.args, trainer.model.config.get_text_config()
    known = {transformers.Trainer, SFTTrainer, DPOTrainer}
    for name in ("compute_loss", "_compute_loss"):
        changed = compat.overriding_class(type(trainer), name, known)
        if changed is not None:
            return f"`{changed.__name__}.{name}` may not be a sum over tokens"
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if getattr(trainer, "padding_free", False) or getattr(args, "packing", False):
        return "rows are packed"
    if getattr(trainer.model.config, "is_encoder_decoder", False) or not _is_causal(trainer):
        return f"`{type(trainer.model).__name__}` is not a causal language model"
    if getattr(trainer, "aux_loss_enabled", False) or getattr(config, "output_router_logits", False):
        return "the MoE auxiliary loss is a product of means over the micro-batch (`router_aux_loss_coef=0.0` is off)"
    if trainer.compute_loss_func is not None:
        return "`compute_loss_func` may be a mean over the micro-batch"
    smoother = trainer.label_smoother
    if smoother is not None and "num_items_in_batch" not in inspect.signature(smoother.__call__).parameters:
        return "`label_smoothing_factor` is a mean over the micro-batch before transformers 5.15"
    if is_preference(trainer):
        losses = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
        other = sorted(set(losses) - _PAIR_LOSSES)
        if other:
            return f"`loss_type`={other[0]!r} is not a mean over pairs"
        if hasattr(trainer, "_compute_loss_liger") and args.use_liger_kernel:
            return "the Liger loss is not known to be a mean over pairs"
    if parallelism is not None and any(getattr(parallelism, f"{kind}_enabled", False) for kind in ("cp", "sp")):
        return "context or sequence parallelism shards the columns of a batch"
    if args.n_gpu > 1:
        return "`nn.DataParallel` splits a batch again"
    return compat.why_not_accumulated(trainer)


def _is_causal(trainer: transformers.Trainer) -> bool:
    if isinstance(trainer, (SFTTrainer, DPOTrainer)):
        return True
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(model, "loss_type", None) == "ForCausalLM"


def drop_router_loss_of_dense_model(trainer: transformers.Trainer) -> bool:
    """As in `compat`; `SFTTrainer` asks for router logits through the model's config too."""
    dropped = compat.drop_router_loss_of_dense_model(trainer)
    if dropped:
        trainer.model.config.get_text_config().output_router_logits = False
    return dropped


@contextmanager
def metrics_captured(trainer: transformers.Trainer) -> Iterator[dict[str, list]]:
    """Collects what the loss logs for one micro-batch, rank-local; tokens are counted by [`log_metrics`] instead."""
    if not logs_metrics(trainer):
        yield {}
        return
    counted = trainer._total_train_tokens
    try:
        with compat.metrics_captured(trainer) as metrics:
            yield metrics
    finally:
        trainer._total_train_tokens = counted
    metrics.pop("num_tokens", None)


def logs_metrics(trainer: transformers.Trainer) -> bool:
    """Whether the trainer keeps metrics of its own until the next log, as those of TRL do."""
    return isinstance(trainer, (SFTTrainer, DPOTrainer))


def log_metrics(trainer: transformers.Trainer, metrics: dict[str, float], tokens: int) -> None:
    """Appends a window's metrics where TRL keeps them, and counts its tokens for `num_tokens`."""
    compat.log_metrics(trainer, metrics)
    trainer._total_train_tokens += tokens // getattr(trainer, "_tp_size", 1)
    trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]


def metric_kind(name: str) -> str:
    """How a metric is pooled over micro-batches: `"rows"` (mean over rows or pairs) or `"tokens"`."""
    return "rows" if name.startswith(("rewards/", "logps/")) else "tokens"


def metric_half(name: str) -> int | None:
    """Which half of a preference batch a metric is a mean over: 0 the chosen, 1 the rejected; `None` is all of it."""
    return {"logits/chosen": 0, "mean_token_accuracy": 0, "logits/rejected": 1}.get(name)
