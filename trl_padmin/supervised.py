"""The same method for supervised training: the rows of one optimizer step in micro-batches of similar length.

`Trainer.get_batch_samples` collects the batches of one optimizer step. There the batches lose their padding and their
rows are planned together. `Trainer` still runs one `training_step` per batch; each runs the micro-batches that the
plan gives to it, in place of the batch. Sampling, random state, the optimizer and the loss itself stay stock's.

The loss must be a sum over the scored tokens of the window, or a mean over pairs; then the gradients of an optimizer
step add up to stock's.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from transformers.utils import logging
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from . import supervised_compat as compat
from .collators import ignores_masks, narrow, pad_token
from .compat import gradient_sync_deferred
from .config import PaddingMinimizationOptions, config_among
from .distributed import Observation, agree_on_groups, pool_window
from .example_window import ExampleMicroBatch, ExampleWindow, why_not_rows, why_unknown
from .planning import plan_micro_batches
from .stats import PaddingStats
from .window import Groups, padding_stats, split_up_to


logger = logging.get_logger(__name__)


@dataclass
class _State:
    """What the mixin keeps between calls. All of it is rebuilt when needed, so a checkpoint holds none of it."""

    options: PaddingMinimizationOptions
    is_active: bool = False
    steps: list[tuple[Mapping, list[ExampleMicroBatch]]] = field(default_factory=list)  # still to run, by stock batch
    running: ExampleMicroBatch | None = None
    observations: list[Observation] = field(default_factory=list)  # of the current window
    stats: PaddingStats = field(default_factory=PaddingStats)  # of the current window
    stock_real_tokens: int = 0  # of the current window
    total_stats: PaddingStats = field(default_factory=PaddingStats)
    unlogged: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    proof_printed: bool = False

    def begin_window(self) -> None:
        self.steps, self.observations, self.running = [], [], None


class SupervisedPaddingMinimizationMixin:
    """Forwards almost no padding in a `Trainer`, `SFTTrainer` or `DPOTrainer` of a causal language model.

    Goes in front of the trainer class: `class MyTrainer(SupervisedPaddingMinimizationMixin, Trainer)`. Equals the
    trainer behind it, with the examples of an optimizer step in other micro-batches: same examples, same random state,
    same gradients. The loss must be a sum over the tokens of the window (`num_items_in_batch`), or a mean over pairs;
    others are left alone, as are packed rows, images and the MoE auxiliary loss, and a warning says so. Evaluation is
    stock's. Options come from the config, see [`PaddingMinimizationOptions`]; a config without them gets the defaults.

    Raises:
        `TypeError`, `ValueError`: an option is out of its range. Raised before a model is loaded.
        [`TRLContractError`]: TRL or transformers is not as we know it.
        `NotImplementedError`, `ValueError`: a batch has an entry that may have columns, see
            [`~trl_padmin.collators.minimize_padding`].
    """

    padding_defaults: PaddingMinimizationOptions | None = None  # for a config without our options

    def __init__(self, *args, **kwargs):
        behind = type(self).__mro__[type(self).__mro__.index(SupervisedPaddingMinimizationMixin) + 1]
        options = PaddingMinimizationOptions.of(config_among(args, kwargs), self.padding_defaults)
        self._padding = _State(options)
        if options.padding_minimization:
            compat.check_trainer_class(behind)
        super().__init__(*args, **kwargs)
        if not options.padding_minimization:
            return
        if compat.drop_router_loss_of_dense_model(self):
            logger.info("The model has no router, so its auxiliary loss is off (stock TRL raises an IndexError here).")
        reason = compat.why_left_alone(self)
        self._padding.is_active = reason is None
        if reason is not None:
            logger.warning(f"Batches are left as they are, because {reason}.")

    @property
    def padding_stats(self) -> PaddingStats:
        """Counts over all training forwards of the policy so far, summed over ranks; a table in Jupyter."""
        return self._padding.total_stats

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        state = self._padding
        if not state.is_active:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        state.begin_window()
        stock = list(islice(epoch_iterator, num_batches))
        window = None

        def propose():
            nonlocal window
            window = self._window(stock)
            return None if window is None else self._groups(window)

        # With several ranks a window has but one pool, see `_groups`.
        agreed = agree_on_groups(propose, 1, self.accelerator)
        groups = agreed.groups
        batches = stock if groups is None else window.batches
        # Scored tokens are counted here: the first token of a row that was padded on the left is scored no more.
        batches, num_items_in_batch = super().get_batch_samples(iter(batches), num_batches, device)
        if groups is None:
            return batches, num_items_in_batch
        if num_items_in_batch is None and not compat.is_preference(self):
            _say_left_alone("the loss is a mean over the tokens of the batch (there is no `num_items_in_batch`)")
            return stock, None
        lengths = [window.example_lengths(pool) for pool in window.pools]
        groups = [split_up_to(*each) for each in zip(agreed.counts, groups, lengths, strict=True)]
        steps = window.micro_batches(groups)
        state.steps = list(zip(batches, steps, strict=True))
        self._count(window, [micro_batch.examples for step in steps for micro_batch in step])
        return batches, num_items_in_batch

    def _window(self, stock: Sequence[Mapping]) -> ExampleWindow | None:
        """The examples of some batches; `None`, after a warning, if they cannot be put into other batches."""
        # `SFTTrainer` ignores the mask of a data set: what was padded before shows in the labels only.
        pad = pad_token(self.data_collator) if ignores_masks(self.data_collator) else None
        sequences = 2 if compat.is_preference(self) else 1
        reason = why_unknown(stock)
        if reason is None:
            narrowed = [narrow(batch, pad=pad) for batch in stock]
            reason = why_not_rows(narrowed, sequences)
        if reason is not None:
            _say_left_alone(reason)
            return None
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        ids = [None if pad is None else pad.id, getattr(tokenizer, "pad_token_id", None)]
        pad_id = next((each for each in ids if each is not None), self.model.config.get_text_config().pad_token_id)
        return ExampleWindow(stock, narrowed, sequences, pad_id or 0, self._pad_to_multiple_of)

    @property
    def _pad_to_multiple_of(self) -> int | None:
        own = getattr(self.args, "pad_to_multiple_of", None)
        return own or getattr(self.data_collator, "pad_to_multiple_of", None)

    def _groups(self, window: ExampleWindow) -> list[Groups] | None:
        """Groups of examples of each pool, by default none larger than the largest stock batch."""
        options, multiple = self._padding.options, self._pad_to_multiple_of
        if len(window.pools) > 1 and self.accelerator.num_processes > 1:
            _say_left_alone("the batches of the last window differ in size")
            return None
        budget = (options.token_budget or max(window.stock_tokens)) // window.sequences
        plans = [
            plan_micro_batches(
                window.example_lengths(pool).total,
                max(budget, multiple or 1),
                overhead_tokens=options.overhead_tokens // window.sequences,
                pad_to_multiple_of=multiple,
                min_micro_batches=window.steps_of(pool),
            )
            for pool in window.pools
        ]
        if options.token_budget is not None and any(plan.oversized_rows for plan in plans):
            logger.warning_once(
                f"`token_budget`={options.token_budget} is less than the longest example. Such examples run alone, "
                "above the budget; `padding/oversized_rows` counts them."
            )
        return [list(plan) for plan in plans]

    def _count(self, window: ExampleWindow, groups: Groups) -> None:
        state, budget = self._padding, self._padding.options.token_budget
        state.stats = padding_stats(
            [window.row_lengths(examples) for examples in groups],
            sum(window.stock_tokens),
            self._pad_to_multiple_of,
            None if budget is None else budget // window.sequences,
        )
        state.stock_real_tokens = window.stock_real_tokens
        if not state.proof_printed and self.is_world_process_zero():
            print(f"{state.stats} per rank")
        state.proof_printed = True

    def training_step(self, model, inputs, num_items_in_batch=None):
        state = self._padding
        if not state.steps or state.steps[0][0] is not inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        _, (*earlier, last) = state.steps.pop(0)
        losses = []
        with gradient_sync_deferred(self, model):
            for micro_batch in earlier:
                with self._running(micro_batch):
                    losses.append(super().training_step(model, micro_batch.inputs(), num_items_in_batch))
        with self._running(last):
            losses.append(super().training_step(model, last.inputs(), num_items_in_batch))
        if not state.steps:
            self._end_window()
        return sum(losses)

    @contextmanager
    def _running(self, micro_batch: ExampleMicroBatch) -> Iterator[None]:
        self._padding.running = micro_batch
        try:
            yield
        finally:
            self._padding.running = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        running = self._padding.running
        if running is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with compat.metrics_captured(self) as metrics:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._padding.observations += running.observations(metrics, compat.metric_half)
        return loss * running.loss_weight

    def _end_window(self) -> None:
        """Logs what the micro-batches of the window logged, pooled, and what padding it cost."""
        state = self._padding
        metrics, (stats, stock) = pool_window(
            state.observations,
            [state.stats, PaddingStats(real_tokens=state.stock_real_tokens)],
            compat.metric_kind,
            self.accelerator,
        )
        if compat.logs_metrics(self):
            compat.log_metrics(self, metrics | stats.as_metrics(), stock.real_tokens)
        else:
            for name, value in stats.as_metrics().items():
                state.unlogged[name].append(value)
        state.total_stats += stats

    def log(self, logs, *args, **kwargs):
        unlogged = self._padding.unlogged
        if "loss" in logs:  # neither an evaluation nor the summary of a run
            logs.update({name: sum(values) / len(values) for name, values in unlogged.items()})
            unlogged.clear()
        super().log(logs, *args, **kwargs)


def _say_left_alone(reason: str) -> None:
    logger.warning_once(f"Batches are left as they are, because {reason}.")


@dataclass
class PadminSFTConfig(PaddingMinimizationOptions, SFTConfig):
    """[`trl.SFTConfig`] with the options of padding minimization.

    Every argument of `trl.SFTConfig` keeps its place, name and default; ours are keywords:
    [`PaddingMinimizationOptions`]. `balance_across_ranks` and `probe` have no effect here.
    """


@dataclass
class PadminDPOConfig(PaddingMinimizationOptions, DPOConfig):
    """[`trl.DPOConfig`] with the options of padding minimization.

    Every argument of `trl.DPOConfig` keeps its place, name and default; ours are keywords:
    [`PaddingMinimizationOptions`]. `balance_across_ranks` and `probe` have no effect here.
    """


class PadminSFTTrainer(SupervisedPaddingMinimizationMixin, SFTTrainer):
    """[`trl.SFTTrainer`] without the padding.

    Takes the arguments of `trl.SFTTrainer`, and equals it with the rows of an optimizer step in other micro-batches:
    [`SupervisedPaddingMinimizationMixin`]. `args` is a [`PadminSFTConfig`], or a plain `trl.SFTConfig` for the
    defaults.

    Example:

    ```python
    from trl_padmin import SFTConfig, SFTTrainer

    trainer = SFTTrainer(model="ai21labs/AI21-Jamba2-3B", args=SFTConfig(...), train_dataset=...)
    trainer.train()
    trainer.padding_stats
    ```
    """

    _tag_names = [*SFTTrainer._tag_names, "trl-padmin"]  # in the model card


class PadminDPOTrainer(SupervisedPaddingMinimizationMixin, DPOTrainer):
    """[`trl.DPOTrainer`] without the padding; see [`PadminSFTTrainer`], and [`PadminDPOConfig`] for `args`.

    The sequences of a pair share a micro-batch. `loss_type` must be a mean over pairs: not `"aot"`, `"aot_unpaired"`,
    `"bco_pair"` or `"sft"`, which are left alone.
    """

    _tag_names = [*DPOTrainer._tag_names, "trl-padmin"]
