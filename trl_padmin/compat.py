"""The only file that names what is private in TRL, transformers and accelerate, and what happens when it changes."""

import argparse
import inspect
import platform
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version

import torch
import transformers
from packaging.version import Version
from torch import nn
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import split_pixel_values_by_grid

from .layout import unknown_keys


# What divides each loss in TRL's `_compute_loss`. It tells by what a micro-batch's loss must be weighted so that the
# sum over a window stays what stock TRL computes, when micro-batches hold other rows than stock's.
LOSS_DENOMINATORS = {
    "dapo": "window",
    "cispo": "window",
    "vespo": "window",
    "grpo": "rows",
    "sapo": "rows",
    "dr_grpo": "rows",
    "luspo": "rows",
    "bnpo": "tokens",
    "rloo": "rows",  # `RLOOTrainer`, which has no `loss_type`
}

# Metrics of TRL that are a mean over rows, not over tokens. Clip ratios are one value per row in sequence mode.
_ROW_METRICS = frozenset({"vespo/phi_seq_mean"})
_RATIO_METRICS = ("clip_ratio/", "cispo_clip_ratio")

_SCORING_PARAMETERS = ("input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
_METHODS = {
    "_get_per_token_logps_and_entropies": ("model", *_SCORING_PARAMETERS),
    "_compute_loss": ("model", "inputs"),
    "_prepare_inputs": ("generation_batch",),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
}
_ATTRIBUTES = ("_step", "_buffered_inputs", "_metrics", "_current_train_step_time", "accelerator")


class TRLContractError(RuntimeError):
    """What we rely on in TRL is not as we know it, so results might be wrong; nothing was computed."""


def installed_versions() -> dict[str, str]:
    """Versions of what a bug report needs, `"not installed"` where a package is missing."""
    names = ("trl-padmin", "trl", "transformers", "accelerate", "torch", "peft", "datasets", "deepspeed")
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def main(argv: Sequence[str] = ()) -> None:
    """`trl-padmin env`: prints the versions that a bug report needs."""
    argparse.ArgumentParser(prog="trl-padmin env", description=main.__doc__).parse_args(argv)
    for name, installed in installed_versions().items():
        print(f"- {name}: {installed}")


def _contract_error(member: str, problem: str, remedy: str) -> TRLContractError:
    found = ", ".join(f"{name} {installed}" for name, installed in installed_versions().items() if name != "platform")
    return TRLContractError(f"`{member}` {problem}. {remedy} `padding_minimization=False` runs stock TRL. ({found})")


def check_trainer_class(trainer_class: type, methods: Mapping[str, Sequence[str]] = _METHODS) -> None:
    """Checks the methods that we override and call, with their parameters, before any model is loaded.

    Raises:
        [`TRLContractError`]: a method is missing or takes other parameters than those we know.
    """
    remedy = "Install a TRL release that this version of trl_padmin knows (1.0 to 1.16), or a newer trl_padmin."
    for name, parameters in methods.items():
        method = getattr(trainer_class, name, None)
        if method is None:
            raise _contract_error(f"{trainer_class.__name__}.{name}", "is missing", remedy)
        found = inspect.signature(method).parameters
        accepts_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())
        missing = [parameter for parameter in parameters if parameter not in found]
        if missing and not accepts_any:
            raise _contract_error(
                f"{trainer_class.__name__}.{name}", f"does not take {', '.join(map(repr, missing))}", remedy
            )


def check_trainer(trainer: transformers.Trainer) -> None:
    """Raises [`TRLContractError`] if an attribute that we read is missing."""
    for name in _ATTRIBUTES:
        if not hasattr(trainer, name):
            raise _contract_error(
                f"{type(trainer).__name__}.{name}", "is missing", "Install a TRL release from 1.0 to 1.16."
            )


def _own_loss(trainer_class: type) -> type | None:
    """The TRL trainer whose loss a trainer class computes, or `None` if it is a loss of a subclass."""
    if trainer_class._compute_loss is RLOOTrainer._compute_loss:
        return RLOOTrainer
    return GRPOTrainer if trainer_class._compute_loss is GRPOTrainer._compute_loss else None


def loss_denominator(trainer_class: type, config: object) -> str | None:
    """What divides the loss of a trainer class, see [`LOSS_DENOMINATORS`]; `None` if the loss is not TRL's.

    Raises:
        [`TRLContractError`]: the loss is TRL's, but we do not know what divides it.
    """
    own = _own_loss(trainer_class)
    if own is None:
        return None
    loss_type = "rloo" if own is RLOOTrainer else config.loss_type
    if loss_type not in LOSS_DENOMINATORS:
        raise _contract_error(
            f"loss_type={loss_type!r}",
            "is not a loss we know how to split into micro-batches",
            f"Choose one of {', '.join(LOSS_DENOMINATORS)}, or install a newer trl_padmin.",
        )
    return LOSS_DENOMINATORS[loss_type]


def overriding_class(trainer_class: type, method: str, known: Collection[type]) -> type | None:
    """The first class of a trainer class, other than the known ones and our own, that overrides a method."""
    return next(
        (
            base
            for base in trainer_class.__mro__
            if method in vars(base) and base not in known and not base.__module__.startswith(__package__)
        ),
        None,
    )


def ratio_per_row(trainer: transformers.Trainer) -> bool:
    """Whether an importance ratio, and hence what is logged of it, belongs to a row and not to a token."""
    return getattr(trainer.args, "importance_sampling_level", "sequence") == "sequence"  # RLOO has but this one


def check_batch(batch: Mapping[str, object]) -> None:
    """Raises [`TRLContractError`] if a batch has a key whose shape we do not know."""
    unknown = unknown_keys(batch)
    if unknown:
        raise _contract_error(
            f"inputs[{unknown[0]!r}]",
            f"is a batch entry of unknown shape (all unknown entries: {', '.join(unknown)})",
            "If your trainer adds it with one entry per row, add its name and shape to "
            "`trl_padmin.layout.ROW_SHAPES`; if TRL does, install a newer trl_padmin.",
        )


def why_not_separable(trainer: transformers.Trainer) -> str | None:
    """Why the loss of a window is not a weighted sum over rows, so that stock's micro-batches stay; or `None`."""
    if _own_loss(type(trainer)) is None:
        return f"`_compute_loss` of `{type(trainer).__name__}` is not that of `GRPOTrainer` or `RLOOTrainer`"
    changed = overriding_class(type(trainer), "compute_loss", (GRPOTrainer, RLOOTrainer, transformers.Trainer))
    if changed is not None:
        return f"`{changed.__name__}.compute_loss` may add to the loss"
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        return "`top_entropy_quantile` < 1 selects tokens by a quantile over the micro-batch"
    if getattr(trainer, "_entropy_bonus_enabled", False):
        return "the entropy bonus is a mean over the micro-batch"
    if getattr(trainer, "aux_loss_enabled", False):
        return "the MoE auxiliary loss is a product of means over the micro-batch"
    if uses_liger_loss(trainer):
        return "the Liger loss computes its own log-probabilities"
    return why_not_accumulated(trainer)


def why_not_accumulated(trainer: transformers.Trainer) -> str | None:
    """Why the gradients of several backward passes do not add up before a step; or `None`."""
    if "lomo" in str(getattr(trainer.args.optim, "value", trainer.args.optim)):
        return "LOMO updates the weights in every backward"
    return None


def why_not_movable(trainer: transformers.Trainer, denominator: str | None) -> str | None:
    """Why a row must be run by the rank that it came to, so that the gradient stays the same; or `None`."""
    if denominator == "tokens":
        return "the loss is divided by the tokens of a stock micro-batch"
    if getattr(trainer, "loss_type", None) == "luspo" and Version(version("trl")) < Version("1.10"):
        return "before TRL 1.10 the `luspo` loss is divided by the columns of the rank's generation batch"
    return None


def uses_liger_loss(trainer: transformers.Trainer) -> bool:
    """Whether the policy loss bypasses `_get_per_token_logps_and_entropies` (TRL up to 1.13 with Liger)."""
    return hasattr(trainer, "compute_liger_loss") and bool(
        getattr(trainer, "use_liger_kernel", False) or getattr(trainer, "use_liger_loss", False)
    )


def holds_logits_in_memory() -> bool:
    """Whether a forward materializes rows x completion x vocabulary logits (TRL before its fused head, 1.15)."""
    return not hasattr(inspect.getmodule(GRPOTrainer), "add_fused_lm_head")


def drop_router_loss_of_dense_model(trainer: transformers.Trainer) -> bool:
    """Switches the MoE auxiliary loss off for a model that has no router, where stock TRL raises `IndexError`.

    Jamba2-3B, for one, has the config of an MoE model with `num_experts=1`, and hence no router. Returns whether the
    loss was switched off.
    """
    config = trainer.model.config.get_text_config()
    if getattr(trainer, "aux_loss_enabled", False) and getattr(config, "num_experts", None) == 1:
        trainer.aux_loss_enabled = False
        return True
    return False


def stock_micro_batches(trainer: transformers.Trainer) -> tuple[list[dict], int]:
    """The stock micro-batches of the current generation batch on this rank, and the index of the current one."""
    return trainer._buffered_inputs, trainer._step % trainer.args.steps_per_generation


def split_images(entries: Mapping[str, object]) -> dict[str, object]:
    """The image entries of a batch, none of them `None`, with one entry per row where TRL knows the layout."""
    return split_pixel_values_by_grid(dict(entries))


def add_step_time(trainer: transformers.Trainer, seconds: float) -> None:
    """Adds to the `step_time` metric, which TRL measures around its own `training_step`."""
    trainer._current_train_step_time += seconds


@contextmanager
def labels_restricted(model: nn.Module, is_scored: torch.Tensor | None) -> Iterator[None]:
    """Lets a forward score only the tokens in `is_scored`, `(B, W)`; `None` restricts nothing.

    TRL labels the last `logits_to_keep` columns, which in the tokens-first layout hold some prompt tokens too. Their
    scores are dropped on the way back, but the head would be computed for them.
    """

    if is_scored is None:
        yield
        return

    def restrict(module, args, kwargs):
        if kwargs.get("labels") is not None:
            kwargs["labels"] = kwargs["labels"].masked_fill(~is_scored, -100)
        return args, kwargs

    handle = model.register_forward_pre_hook(restrict, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def gradient_sync_deferred(trainer: transformers.Trainer, model: nn.Module) -> Iterator[None]:
    """Backward passes inside only accumulate: ranks do not exchange gradients, and DeepSpeed does not step.

    `Trainer` does the same for all steps of a window but the last, so only there is something to do.
    """
    state = trainer.accelerator.gradient_state
    if not state.sync_gradients:
        yield
        return
    if state.plugin_kwargs.get("sync_each_batch", False):
        no_sync = nullcontext()
    elif getattr(trainer, "is_distributed_loading_by_transformers", False) and hasattr(
        trainer.model, "set_requires_gradient_sync"
    ):
        no_sync = trainer._defer_fsdp_gradient_reduction()
    else:
        no_sync = trainer.accelerator.no_sync(model)
    state._set_sync_gradients(False)
    try:
        with no_sync:
            yield
    finally:
        state._set_sync_gradients(True)


class _OnDevice(torch.Tensor):
    """A tensor whose `item()` stays on the device, so that a metric does not make the host wait."""

    def item(self):
        return self.detach().as_subclass(torch.Tensor)


class _RankLocalAccelerator:
    """An accelerator whose metric collectives return the rank's own values: micro-batches differ between ranks."""

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def gather(self, tensor):
        return tensor.detach().as_subclass(_OnDevice)

    def gather_for_metrics(self, tensor):
        return self.gather(tensor)

    def reduce(self, tensor, reduction="sum"):
        return self.gather(tensor)


@contextmanager
def metrics_captured(trainer: transformers.Trainer) -> Iterator[dict[str, list]]:
    """Collects what TRL's loss logs for one micro-batch, rank-local and without waiting for the device."""
    accelerator, logged = trainer.accelerator, trainer._metrics["train"]
    captured = defaultdict(list)
    trainer.accelerator, trainer._metrics["train"] = _RankLocalAccelerator(accelerator), captured
    try:
        yield captured
    finally:
        trainer.accelerator, trainer._metrics["train"] = accelerator, logged


def log_metrics(trainer: transformers.Trainer, metrics: Mapping[str, float]) -> None:
    """Appends training metrics where TRL keeps them until the next log."""
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(value)


def metric_kind(name: str, sequence_level: bool) -> str:
    """How a metric is pooled over micro-batches: `"min"`, `"max"`, `"rows"` (mean over rows) or `"tokens"`."""
    if name.endswith(("_min", "/min")):
        return "min"
    if name.endswith(("_max", "/max")):
        return "max"
    if name in _ROW_METRICS or (sequence_level and name.startswith(_RATIO_METRICS)):
        return "rows"
    return "tokens"
