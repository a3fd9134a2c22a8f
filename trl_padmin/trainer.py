"""The trainers: check, plan, lay out, call `super()`, log.

Stock TRL hands one micro-batch at a time to `training_step`, each as wide as the longest prompt plus the longest
completion of the generation batch. Here is where that changes:

- `_get_per_token_logps_and_entropies` scores rows with their tokens first and in groups of similar length, and returns
  the scores in TRL's own layout, so that nothing that calls it can tell.
- `training_step` runs the micro-batches that the plan gives to the step, in place of stock's one.
- `compute_loss` weights each by its share, so that the gradients of an optimizer step add up to stock's.

Generation, shuffling, random state, the optimizer and the loss itself are TRL's and transformers'.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging
from trl import GRPOTrainer, RLOOTrainer

from . import compat
from .config import PaddingMinimizationOptions
from .distributed import Observation, agree_on_groups, pool_window
from .layout import IMAGE_KEYS, TOKEN_TYPE_KEYS, RowLengths, TokensFirst, restore_rows, row_lengths
from .planning import plan_micro_batches
from .probe import batch_dependent_rope, probe_architecture, why_scores_are_in_doubt
from .stats import PaddingStats
from .window import GenerationBatch, Groups, MicroBatch, Segment, fit_logits, padding_stats, split_up_to


logger = logging.get_logger(__name__)


@dataclass
class _State:
    """What the mixin keeps between calls. All of it is rebuilt when needed, so a checkpoint holds none of it."""

    options: PaddingMinimizationOptions
    denominator: str | None = None  # of the loss; `None` keeps stock's micro-batches
    generation: GenerationBatch | None = None
    last_window: tuple[Segment, list[RowLengths]] | None = None  # and the forwards planned for it, for `plot_padding`
    steps: list[list[MicroBatch]] = field(default_factory=list)  # planned and still to run
    steps_into_window: int = 0
    running: MicroBatch | None = None
    observations: list[Observation] = field(default_factory=list)  # of the current window
    policy_stats: PaddingStats = field(default_factory=PaddingStats)  # of the current window
    scoring_stats: PaddingStats = field(default_factory=PaddingStats)  # since the last window ended
    total_stats: PaddingStats = field(default_factory=PaddingStats)
    rope: tuple[str, int] | None = None  # kind and context of a rotary embedding that depends on the batch
    scored: tuple[torch.Tensor, RowLengths] | None = None  # last attention mask scored, and its lengths
    proof_printed: bool = False

    def begin_window(self) -> None:
        self.steps_into_window = 0
        self.observations = []
        self.policy_stats = self.scoring_stats = PaddingStats()


class PaddingMinimizationMixin:
    """Forwards almost no padding in the scoring passes and the policy pass of a GRPO-like trainer of TRL.

    Goes in front of the trainer class: `class MyTrainer(PaddingMinimizationMixin, GRPOTrainer)`. Equals the trainer
    behind it, with the rows of an optimizer step in other micro-batches: same rows, same random state, same gradients.
    Options come from the config, see [`PaddingMinimizationOptions`]; a config without them gets the defaults.

    Raises:
        `TypeError`, `ValueError`: an option is out of its range. Raised before a model is loaded.
        [`TRLContractError`]: TRL is not as we know it, or the loss or a batch entry is unknown.
    """

    padding_defaults: PaddingMinimizationOptions | None = None  # for a config without our options

    def __init__(self, *args, **kwargs):
        behind = type(self).__mro__[type(self).__mro__.index(PaddingMinimizationMixin) + 1]
        config = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, TrainingArguments)), None)
        options = PaddingMinimizationOptions.of(config, self.padding_defaults)
        self._padding = _State(options)
        if options.padding_minimization:
            compat.check_trainer_class(behind)
            if config is not None:
                compat.loss_denominator(type(self), config)
        super().__init__(*args, **kwargs)
        if not options.padding_minimization:
            return
        compat.check_trainer(self)
        if compat.drop_router_loss_of_dense_model(self):
            logger.info("The model has no router, so its auxiliary loss is off (stock TRL raises an IndexError here).")
        reason = compat.why_not_separable(self)
        if reason is None:
            self._padding.denominator = compat.loss_denominator(type(self), self.args)
        else:
            logger.warning(f"Rows stay in stock TRL's micro-batches and only padding is cut, because {reason}.")
        self._check_model()

    def _check_model(self) -> None:
        """Warns of what no layout gets right, and probes the model if asked for."""
        state = self._padding
        doubt = why_scores_are_in_doubt(self.model.config)
        if doubt is not None:
            logger.warning(f"In stock TRL as here, {doubt}.")
        state.rope = batch_dependent_rope(self.model.config)
        if state.options.probe and is_deepspeed_zero3_enabled():
            raise NotImplementedError(
                "`probe`=True needs the whole model on one rank, and ZeRO-3 has cut it up already. Leave the option "
                "out, and run `trl-padmin probe MODEL` once."
            )
        if state.options.probe and self.is_world_process_zero():
            found = probe_architecture(self.model)
            print(found)
            if not found.is_right(found.tokens_first):
                logger.warning("The model does not score rows as if they were alone; see the probe above.")

    @property
    def padding_stats(self) -> PaddingStats:
        """Counts over all scoring and policy passes so far, summed over ranks; a table in Jupyter."""
        return self._padding.total_stats

    def train(self, *args, **kwargs):
        # A run that was interrupted in the middle of a window starts the next one with a fresh window.
        self._padding.begin_window()
        self._padding.steps.clear()
        return super().train(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **kwargs
    ):
        score = super()._get_per_token_logps_and_entropies
        kwargs["compute_entropy"] = compute_entropy
        if not self._padding.options.padding_minimization:
            return score(model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size, **kwargs)
        lengths = self._lengths_of(attention_mask, logits_to_keep)
        if self._padding.rope is not None and max(lengths.total) > self._padding.rope[1]:
            logger.warning_once(
                "In stock TRL as here, a row's score depends on the longest row of its micro-batch, because the model "
                f"has `rope_type`={self._padding.rope[0]!r} and rows are longer than {self._padding.rope[1]} tokens."
            )
        groups = None  # rows that get gradients are a micro-batch already
        if not torch.is_grad_enabled():
            groups = self._scoring_groups(lengths, attention_mask.size(1), logits_to_keep, batch_size, kwargs)
        if groups is None:
            groups = [tuple(range(len(input_ids)))]
        else:
            batch_size = None

        scores = []
        for rows in groups:
            index = torch.tensor(rows, device=attention_mask.device)
            layout = TokensFirst(
                attention_mask[index], logits_to_keep, lengths.select(rows), self.args.pad_to_multiple_of
            )
            moved = {key: layout.apply(kwargs[key][index]) for key in TOKEN_TYPE_KEYS if kwargs.get(key) is not None}
            # Where TRL chunks the rows again, it labels each chunk, so there is no one mask to narrow the labels by.
            is_scored = layout.is_completion if batch_size is None or batch_size >= len(rows) else None
            with compat.labels_restricted(model, is_scored):
                results = score(
                    model,
                    layout.apply(input_ids[index]),
                    layout.attention_mask,
                    layout.logits_to_keep,
                    batch_size=batch_size,
                    **kwargs | moved,
                )
            # Scores are `(rows, logits_to_keep)`; an auxiliary loss is a scalar; what was not asked for is `None`.
            scores.append([r if r is None or r.dim() == 0 else layout.restore(r) for r in results])
        return restore_rows(scores, groups)

    def _scoring_groups(self, lengths, width, logits_to_keep, batch_size, forward_kwargs) -> Groups | None:
        """Groups of rows to score without gradients; `None` keeps the batch as it is, for TRL to cut into chunks."""

        def propose():
            if logits_to_keep == 0:
                raise ValueError("Every completion of the batch is empty, so there is no token to score.")
            # An auxiliary loss and images belong to the whole batch.
            images = any(forward_kwargs.get(key) is not None for key in IMAGE_KEYS)
            if images or forward_kwargs.get("compute_aux_loss", False):
                return None
            return [self._groups(lengths, batch_size or len(lengths.total), width, logits_to_keep)]

        agreed = self._agree(propose, [lengths])
        if self.model.training:
            forwards = [tuple(range(len(lengths.total)))] if agreed is None else agreed[0]
            self._padding.scoring_stats += self._stats([lengths.select(rows) for rows in forwards], width)
        return None if agreed is None else agreed[0]

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not self._padding.options.padding_minimization:
            return super().training_step(model, inputs, num_items_in_batch)
        started = time.perf_counter()
        # What `Trainer.training_step` does before it prepares inputs: TRL generates in training mode only.
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        *earlier, last = self._micro_batches_of_step(self._prepare_inputs(inputs))
        losses = []
        with compat.gradient_sync_deferred(self, model):
            for micro_batch in earlier:
                with self._running(micro_batch):
                    # Not `super()`: TRL counts a step in each call of its own.
                    losses.append(Trainer.training_step(self, model, inputs, num_items_in_batch))
        compat.add_step_time(self, time.perf_counter() - started)
        with self._running(last):
            losses.append(super().training_step(model, inputs, num_items_in_batch))
        self._padding.steps_into_window += 1
        if self.accelerator.sync_gradients:
            self._end_window()
        return sum(losses)

    def _prepare_inputs(self, generation_batch):
        running = self._padding.running
        return super()._prepare_inputs(generation_batch) if running is None else running.inputs()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        running = self._padding.running
        if running is None or not running.is_regrouped:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with compat.metrics_captured(self) as metrics:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self._padding.observations.append(Observation(metrics, len(running.rows), running.scored_tokens))
        return loss * running.loss_weight

    @contextmanager
    def _running(self, micro_batch: MicroBatch) -> Iterator[None]:
        self._padding.running = micro_batch
        try:
            yield
        finally:
            self._padding.running = None

    def _lengths_of(self, attention_mask: torch.Tensor, logits_to_keep: int) -> RowLengths:
        """Lengths of the rows about to be scored, fetched from the device unless they are known already."""
        if self._padding.running is not None:
            return self._padding.running.lengths
        scored = self._padding.scored
        if scored is None or scored[0] is not attention_mask:  # the reference and the old policy score the same rows
            scored = self._padding.scored = attention_mask, row_lengths(attention_mask, logits_to_keep)
        return scored[1]

    def _micro_batches_of_step(self, inputs: dict) -> list[MicroBatch]:
        """The micro-batches that stand for one stock micro-batch; plans a segment when the last one is used up."""
        state = self._padding
        if not state.steps:
            stock, first = compat.stock_micro_batches(self)
            if stock[first] is not inputs:  # a subclass prepared other inputs than TRL's
                stock, first = [inputs], 0
            if state.generation is None or state.generation.stock is not stock:
                state.generation = GenerationBatch(stock)
            left_in_window = max(1, self.current_gradient_accumulation_steps - state.steps_into_window)
            segment = Segment(state.generation, first, min(left_in_window, len(stock) - first), state.denominator)
            pools = [segment.lengths.select(pool) for pool in segment.pools]

            def propose():
                compat.check_batch(inputs)
                if segment.denominator is None:
                    return None
                shape = segment.rows_per_step, segment.width, segment.completion_width
                return [self._groups(pool, *shape, at_least=len(segment.stock) // len(pools)) for pool in pools]

            state.steps = segment.micro_batches(self._agree(propose, pools))
            forwards = [micro_batch.lengths for step in state.steps for micro_batch in step]
            state.last_window = segment, forwards
            state.policy_stats += self._stats(forwards, segment.width)
            if not state.proof_printed and self.is_world_process_zero():
                print(f"{state.policy_stats} per rank")
            state.proof_printed = True
        return state.steps.pop(0)

    def _groups(
        self, lengths: RowLengths, stock_rows: int, stock_width: int, completion_width: int, at_least: int = 1
    ) -> Groups:
        """Groups rows into at least `at_least` micro-batches, by default none larger than stock's."""
        options = self._padding.options
        plan = plan_micro_batches(
            lengths.total,
            options.token_budget or stock_rows * stock_width,
            overhead_tokens=options.overhead_tokens,
            pad_to_multiple_of=self.args.pad_to_multiple_of,
            min_micro_batches=at_least,
        )
        if options.token_budget is None and compat.holds_logits_in_memory():
            return fit_logits(list(plan), lengths, stock_rows * completion_width, self.args.pad_to_multiple_of)
        if options.token_budget is not None and plan.oversized_rows:
            logger.warning_once(
                f"`token_budget`={options.token_budget} is less than the longest row. Such rows run alone, above the "
                "budget; `padding/oversized_rows` counts them."
            )
        return list(plan)

    def _agree(self, propose, pools: Sequence[RowLengths]) -> list[Groups] | None:
        """What this rank proposes, with as many groups as the rank with most of them; `None` keeps stock's."""
        groups, counts = agree_on_groups(propose, len(pools), self.accelerator)
        if groups is None:
            return None
        return [split_up_to(*each) for each in zip(counts, groups, pools, strict=True)]

    def _stats(self, groups: Sequence[RowLengths], stock_width: int) -> PaddingStats:
        return padding_stats(groups, stock_width, self.args.pad_to_multiple_of, self._padding.options.token_budget)

    def _end_window(self) -> None:
        """Logs what the micro-batches of the window logged, pooled, and what padding it cost."""
        state = self._padding
        sequence_level = compat.ratio_per_row(self)
        metrics, (policy, scoring) = pool_window(
            state.observations,
            [state.policy_stats, state.scoring_stats],
            lambda name: compat.metric_kind(name, sequence_level),
            self.accelerator,
        )
        compat.log_metrics(self, metrics | policy.as_metrics())
        state.total_stats += policy + scoring
        state.begin_window()


class PadminGRPOTrainer(PaddingMinimizationMixin, GRPOTrainer):
    """[`trl.GRPOTrainer`] without the padding.

    Takes the arguments of `trl.GRPOTrainer`, and equals it with the rows of an optimizer step in other micro-batches:
    [`PaddingMinimizationMixin`]. `args` is a [`PadminGRPOConfig`], or a plain `trl.GRPOConfig` for the defaults.

    Example:

    ```python
    from trl_padmin import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=..., args=GRPOConfig(...), train_dataset=...)
    trainer.train()
    trainer.padding_stats
    ```
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-padmin"]  # in the model card


class PadminRLOOTrainer(PaddingMinimizationMixin, RLOOTrainer):
    """[`trl.RLOOTrainer`] without the padding; see [`PadminGRPOTrainer`], and [`PadminRLOOConfig`] for `args`."""

    _tag_names = [*RLOOTrainer._tag_names, "trl-padmin"]
