"""The micro-batches of the policy pass: which rows are forwarded together, and with what weight.

A *window* is what one optimizer step sees on one rank: `gradient_accumulation_steps` stock micro-batches. Where it
spans two generation batches it is cut into *segments*, because each generation batch has its own columns and its own
normalizer. Rows are regrouped inside a segment only.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .distributed import RowExchange, RowTable
from .images import images_by_row, join_images
from .layout import (
    RowLengths,
    concatenate_rows,
    first_scored_column,
    has_images,
    padded_length,
    select_rows,
    widen_columns,
)
from .planning import plan_micro_batches, plan_ranks
from .stats import PaddingStats


Groups = list[tuple[int, ...]]  # row indices of each micro-batch


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward of the policy pass.

    Args:
        batch (`dict`): Holds its rows, in TRL's layout.
        rows (`tuple[int, ...]` or `None`): Which rows of `batch`; `None` is a whole micro-batch of stock's.
        lengths ([`RowLengths`]): Lengths of its rows.
        scored_tokens (`int`): Tokens that enter the loss.
        loss_weight (`float`): Factor on TRL's loss, so that the losses of a window add up to stock's.
    """

    batch: dict
    rows: tuple[int, ...] | None
    lengths: RowLengths
    scored_tokens: int
    loss_weight: float = 1.0

    @property
    def is_regrouped(self) -> bool:
        """Whether the rows are others than those of a stock micro-batch."""
        return self.rows is not None

    def inputs(self) -> dict:
        """The batch to compute the loss of."""
        return self.batch if self.rows is None else join_images(select_rows(self.batch, self.rows))


class GenerationBatch:
    """The stock micro-batches of one generation batch, with the lengths of their rows on the host.

    Making one waits for the device once.
    """

    def __init__(self, stock: list[dict]):
        self.stock = stock
        loss_masks = [
            batch["completion_mask"]
            if batch.get("tool_mask") is None
            else batch["completion_mask"] * batch["tool_mask"]
            for batch in stock
        ]
        masks = ([b["prompt_mask"] for b in stock], [b["completion_mask"] for b in stock], loss_masks)
        counts = torch.stack([torch.cat([mask.sum(dim=1) for mask in parts]) for parts in masks]).tolist()
        rows = len(stock[0]["prompt_mask"])
        prompt, completion, scored = ([c[i : i + rows] for i in range(0, len(c), rows)] for c in counts)
        self.lengths = [RowLengths(tuple(p), tuple(c)) for p, c in zip(prompt, completion, strict=True)]
        self.scored_tokens = scored


class Segment:
    """Stock micro-batches of one generation batch that belong to one optimizer step.

    Args:
        generation ([`GenerationBatch`]): Where they come from.
        first (`int`): Index of the first one.
        steps (`int`): How many.
        denominator (`str` or `None`): What divides the loss: `"window"`, `"rows"` or `"tokens"` (of the stock
            micro-batch); `None` keeps stock's micro-batches.
    """

    def __init__(self, generation: GenerationBatch, first: int, steps: int, denominator: str | None):
        self.stock = generation.stock[first : first + steps]
        self.denominator = denominator
        self._stock_lengths = generation.lengths[first : first + steps]
        self._stock_scored = generation.scored_tokens[first : first + steps]
        self.rows_per_step = len(self._stock_scored[0])
        self.lengths = RowLengths(
            tuple(p for lengths in self._stock_lengths for p in lengths.prompt),
            tuple(c for lengths in self._stock_lengths for c in lengths.completion),
        )
        self.scored_tokens = [tokens for step in self._stock_scored for tokens in step]

    @property
    def prompt_width(self) -> int:
        """Tokens to which stock pads every prompt."""
        return self.stock[0]["prompt_mask"].size(1)

    @property
    def has_images(self) -> bool:
        """Whether rows may carry images."""
        return any(has_images(batch) for batch in self.stock)

    @property
    def completion_width(self) -> int:
        """Tokens to which stock pads every completion."""
        return self.stock[0]["completion_mask"].size(1)

    @property
    def width(self) -> int:
        """Tokens to which stock pads every row."""
        return self.prompt_width + self.completion_width

    @cached_property
    def batch(self) -> dict:
        """The rows, in TRL's layout."""
        return concatenate_rows([images_by_row(batch, self.rows_per_step) for batch in self.stock])

    @property
    def table(self) -> RowTable:
        """What other ranks must know of the rows to run them."""
        return RowTable(self.prompt_width, self.completion_width, self.width, self.lengths, tuple(self.scored_tokens))

    def exchanged(self, exchange: RowExchange, table: RowTable) -> "Segment":
        """The segment with the rows that this rank runs, in place of those that it brought."""
        segment = copy(self)
        left, right = table.prompt_width - self.prompt_width, table.completion_width - self.completion_width
        segment.batch = exchange.deliver(widen_columns(self.batch, left, right))
        segment.lengths = table.lengths.select(exchange.runs)
        segment.scored_tokens = [table.scored_tokens[row] for row in exchange.runs]
        return segment

    @property
    def pools(self) -> Groups:
        """Rows that may share a micro-batch; each pool is planned by itself.

        A loss that is divided by the tokens of its stock micro-batch can be split, but not joined with another's.
        """
        rows, size = range(len(self.scored_tokens)), self.rows_per_step
        if self.denominator == "tokens":
            return [tuple(rows[i : i + size]) for i in rows[::size]]
        return [tuple(rows)]

    def micro_batches(self, groups: list[Groups] | None) -> list[list[MicroBatch]]:
        """The micro-batches of each stock step, at least one each.

        Args:
            groups (`list` or `None`): For each pool its groups of rows, indices into the pool; `None` keeps stock's
                micro-batches. A group that repeats a row of an earlier one weighs nothing.
        """
        if groups is None:
            return [
                [MicroBatch(batch, None, lengths, sum(scored))]
                for batch, lengths, scored in zip(self.stock, self._stock_lengths, self._stock_scored, strict=True)
            ]
        micro_batches, seen = [], set()
        for pool, pool_groups in zip(self.pools, groups, strict=True):
            pool_tokens = sum(self.scored_tokens[row] for row in pool)
            for group in pool_groups:
                rows = tuple(pool[row] for row in group)
                tokens = sum(self.scored_tokens[row] for row in rows)
                weight = {
                    "window": 1.0,
                    "rows": len(rows) / self.rows_per_step,
                    "tokens": tokens / max(1, pool_tokens),
                }[self.denominator]
                if not seen.isdisjoint(rows):
                    tokens, weight = 0, 0.0
                seen.update(rows)
                micro_batches.append(MicroBatch(self.batch, rows, self.lengths.select(rows), tokens, weight))
        return spread(micro_batches, len(self.stock))


def spread(micro_batches: Sequence, steps: int) -> list[list]:
    """Spreads micro-batches over steps, in order and as evenly as their number allows."""
    cuts = [len(micro_batches) * step // steps for step in range(steps + 1)]
    return [list(micro_batches[start:end]) for start, end in pairwise(cuts)]


@dataclass(frozen=True)
class Limits:
    """What a micro-batch may hold.

    Args:
        token_budget (`int`): Most forwarded tokens.
        most_logits (`int` or `None`): Most rows x scored columns, or `None` for no limit of its own.
        overhead_tokens (`int`): What one more micro-batch costs.
        pad_to_multiple_of (`int` or `None`): Widths are rounded up to a multiple of this many tokens.
    """

    token_budget: int
    most_logits: int | None
    overhead_tokens: int
    pad_to_multiple_of: int | None

    def groups(self, lengths: RowLengths, at_least: int = 1) -> Groups:
        """Groups the rows of one rank into at least `at_least` micro-batches."""
        plan = plan_micro_batches(
            lengths.total,
            self.token_budget,
            overhead_tokens=self.overhead_tokens,
            pad_to_multiple_of=self.pad_to_multiple_of,
            min_micro_batches=at_least,
        )
        return self._fit_logits(list(plan), lengths)

    def groups_of_ranks(self, lengths: RowLengths, ranks: int, at_least: int = 1) -> list[Groups]:
        """Spreads the rows of all ranks over ranks, with as many micro-batches on each, at least `at_least`."""
        plans = plan_ranks(
            lengths.total,
            ranks,
            self.token_budget,
            overhead_tokens=self.overhead_tokens,
            pad_to_multiple_of=self.pad_to_multiple_of,
            min_micro_batches=at_least,
        )
        fitting = [self._fit_logits(list(plan), lengths) for plan in plans]
        count = max(map(len, fitting))
        return [split_up_to(count, groups, lengths) for groups in fitting]

    def _fit_logits(self, groups: Groups, lengths: RowLengths) -> Groups:
        """Halves groups of several rows until each holds at most `most_logits`."""
        if self.most_logits is None:
            return groups
        fitting = []
        for group in groups:
            chosen = lengths.select(group)
            width = padded_length(chosen, self.pad_to_multiple_of)
            if len(group) == 1 or len(group) * (width - first_scored_column(chosen, width)) <= self.most_logits:
                fitting.append(group)
            else:
                fitting += self._fit_logits([group[: len(group) // 2], group[len(group) // 2 :]], lengths)
        return fitting


def split_up_to(count: int, groups: Groups, lengths: RowLengths) -> Groups:
    """Halves the groups that forward most until there are `count`; repeats the shortest row where rows run out."""
    groups = list(groups)
    while len(groups) < count:
        index, group = max(
            enumerate(groups), key=lambda item: (len(item[1]) > 1) * len(item[1]) * max(lengths.select(item[1]).total)
        )
        if len(group) > 1:
            groups[index : index + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
        else:
            groups.append((min((row for group in groups for row in group), key=lengths.total.__getitem__),))
    return groups


def padding_stats(
    groups: Sequence[RowLengths], stock_tokens: int, pad_to_multiple_of: int | None, token_budget: int | None
) -> PaddingStats:
    """Counts of a rank's forwards, one group of rows each, against `stock_tokens` that stock would have forwarded."""
    widths = [padded_length(group, pad_to_multiple_of) for group in groups]
    sizes = [len(group.total) for group in groups]
    forwarded = sum(size * width for size, width in zip(sizes, widths, strict=True))
    return PaddingStats(
        rows=sum(sizes),
        micro_batches=len(groups),
        real_tokens=sum(sum(group.total) for group in groups),
        forwarded_tokens=forwarded,
        stock_tokens=stock_tokens,
        critical_tokens=forwarded,
        oversized_rows=0 if token_budget is None else sum(width > token_budget for width in widths),
    )
