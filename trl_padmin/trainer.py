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
from dataclasses import dataclass, field, replace

import torch
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging
from trl import GRPOTrainer, RLOOTrainer

from . import compat
from .config import PaddingMinimizationOptions, config_among
from .distributed import Observation, RowExchange, RowTable, agree_on_groups, can_exchange_rows, pool_window
from .layout import TOKEN_TYPE_KEYS, RowLengths, has_images
from .probe import batch_dependent_rope, probe_architecture, why_scores_are_in_doubt
from .scoring import Scoring
from .stats import PaddingStats
from .window import GenerationBatch, Groups, Limits, MicroBatch, Segment, padding_stats, split_up_to


logger = logging.get_logger(__name__)


@dataclass
class _State:
    """What the mixin keeps between calls. All of it is rebuilt when needed, so a checkpoint holds none of it."""

    options: PaddingMinimizationOptions
    denominator: str | None = None  # of the loss; `None` keeps stock's micro-batches
    moves_rows: bool = False  # between ranks, in the policy pass
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
    scoring: Scoring | None = None  # the last one; the reference and the old policy score the same rows
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
        config = config_among(args, kwargs)
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
        self._check_balancing()
        self._check_model()

    def _check_balancing(self) -> None:
        """Settles whether rows of the policy pass may move between ranks."""
        state = self._padding
        if not state.options.balance_across_ranks or not can_exchange_rows(self.accelerator):
            return
        reason = compat.why_not_movable(self, state.denominator)
        state.moves_rows = state.denominator is not None and reason is None
        if state.denominator is not None and reason is not None:
            logger.warning(f"In the policy pass rows stay on their ranks, because {reason}.")

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
        token_types = {key: kwargs[key] for key in TOKEN_TYPE_KEYS if kwargs.get(key) is not None}
        scoring = self._scoring_of(
            {"input_ids": input_ids, "attention_mask": attention_mask, **token_types}, logits_to_keep
        )
        if not torch.is_grad_enabled():  # rows that get gradients are a micro-batch already
            self._plan_scoring(scoring, batch_size, kwargs)
        return scoring.run(score, model, logits_to_keep, batch_size, self.args.pad_to_multiple_of, kwargs)

    def _scoring_of(self, rows: dict[str, torch.Tensor], columns: int) -> Scoring:
        """What is known of rows about to be scored."""
        state = self._padding
        if state.running is not None:
            scoring = Scoring.of(rows, columns, state.running.lengths)
        else:
            if state.scoring is None or state.scoring.source is not rows["attention_mask"]:
                state.scoring = Scoring.of(rows, columns)
            scoring = state.scoring
        if state.rope is not None and max(scoring.lengths.total) > state.rope[1]:
            logger.warning_once(
                "In stock TRL as here, a row's score depends on the longest row of its micro-batch, because the model "
                f"has `rope_type`={state.rope[0]!r} and rows are longer than {state.rope[1]} tokens."
            )
        return scoring

    def _plan_scoring(self, scoring: Scoring, batch_size: int | None, forward_kwargs: dict) -> None:
        """Groups rows to score without gradients, in training after an exchange with the other ranks."""
        training = self.model.training
        count, width = scoring.source.shape
        chunk = batch_size or count
        # As many as in the policy pass, so that both group the rows alike and the first ratio of a row is 1.
        at_least = -(-count // chunk)

        def propose():
            if scoring.columns == 0:
                raise ValueError("Every completion of the batch is empty, so there is no token to score.")
            # An auxiliary loss belongs to the whole batch.
            if forward_kwargs.get("compute_aux_loss", False) or self._keeps_images(has_images(forward_kwargs)):
                return None
            return [self._limits(chunk, width, scoring.columns).groups(scoring.lengths, at_least)]

        def offer():
            return scoring.rows, scoring.table

        if not scoring.is_planned:
            moves = self._padding.options.balance_across_ranks and training and can_exchange_rows(self.accelerator)
            brought = self.args.per_device_train_batch_size * self.args.steps_per_generation if moves else 0
            groups, table = self._agree(propose, [scoring.lengths], offer if moves else None, brought)
            scoring.groups = None if groups is None else groups[0]
            if table is not None:
                scoring.move(self._exchange(table, chunk, at_least), table)
            scoring.is_planned = True
        if training:
            self._padding.scoring_stats += self._stats(scoring.forwards, count * width)

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
                if segment.denominator is None or self._keeps_images(segment.has_images):
                    return None
                limits = self._limits(segment.rows_per_step, segment.width, segment.completion_width)
                return [limits.groups(pool, at_least=len(segment.stock) // len(pools)) for pool in pools]

            def offer():
                return segment.batch, segment.table

            brought = self.args.per_device_train_batch_size * len(segment.stock) if state.moves_rows else 0
            groups, table = self._agree(propose, pools, offer if state.moves_rows else None, brought)
            runs = segment
            if table is not None:
                exchange = self._exchange(table, segment.rows_per_step, at_least=len(segment.stock))
                runs, groups = segment.exchanged(exchange, table), [exchange.groups]
            state.steps = runs.micro_batches(groups)
            forwards = [micro_batch.lengths for step in state.steps for micro_batch in step]
            state.last_window = segment, forwards
            state.policy_stats += self._stats(forwards, len(segment.scored_tokens) * segment.width)
        return state.steps.pop(0)

    def _limits(self, stock_rows: int, stock_width: int, completion_width: int) -> Limits:
        """What a micro-batch may hold: the token budget, or as much as one of stock's."""
        options = self._padding.options
        is_default = options.token_budget is None
        return Limits(
            stock_rows * stock_width if is_default else options.token_budget,
            stock_rows * completion_width if is_default and compat.holds_logits_in_memory() else None,
            options.overhead_tokens,
            self.args.pad_to_multiple_of,
        )

    def _exchange(self, table: RowTable, stock_rows: int, at_least: int = 1) -> RowExchange:
        """The same plan on every rank: which rank runs which rows of all, in at least `at_least` micro-batches."""
        ranks = self.accelerator.num_processes
        limits = self._limits(stock_rows, table.stock_width, table.completion_width)
        groups = limits.groups_of_ranks(table.lengths, ranks, at_least)
        return RowExchange(groups, len(table.scored_tokens) // ranks, self.accelerator.process_index)

    def _keeps_images(self, images: bool) -> bool:
        """Whether rows with images stay where they are: ranks must run a vision tower equally often."""
        keeps = images and self.accelerator.num_processes > 1
        if keeps:
            logger.warning_once("Rows with images stay in stock TRL's micro-batches on several ranks.")
        return keeps

    def _agree(
        self, propose, pools: Sequence[RowLengths], offer=None, offered_rows: int = 0
    ) -> tuple[list[Groups] | None, RowTable | None]:
        """What this rank proposes, with as many groups as the rank with most of them; `None` keeps stock's.

        Also the rows of all ranks, if they may move.
        """
        agreed = agree_on_groups(propose, len(pools), self.accelerator, offer=offer, offered_rows=offered_rows)
        if agreed.groups is None:
            return None, None
        counts_and_groups = zip(agreed.counts, agreed.groups, pools, strict=True)
        return [split_up_to(*each) for each in counts_and_groups], agreed.table

    def _stats(self, groups: Sequence[RowLengths], stock_tokens: int) -> PaddingStats:
        budget = self._padding.options.token_budget
        stats = padding_stats(groups, stock_tokens, self.args.pad_to_multiple_of, budget)
        if stats.oversized_rows:
            logger.warning_once(
                f"`token_budget`={budget} is less than the longest row. Such rows run alone, above the budget; "
                "`padding/oversized_rows` counts them."
            )
        return stats

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
        if not state.proof_printed and self.is_world_process_zero():
            ranks = self.accelerator.num_processes
            print(
                f"{replace(policy, rows=policy.rows // ranks, micro_batches=policy.micro_batches // ranks)} per rank"
            )
        state.proof_printed = True
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
