"""The micro-batches of the policy pass: which rows are forwarded together, and with what weight.

A *window* is what one optimizer step sees on one rank: `gradient_accumulation_steps` stock micro-batches. Where it
spans two generation batches it is cut into *segments*, because each generation batch has its own columns and its own
normalizer. Rows are regrouped inside a segment only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .layout import RowLengths, concatenate_rows, has_images, padded_length, select_rows
from .stats import PaddingStats


@dataclass(frozen=True)
class StockShape:
    """Shape of a stock micro-batch.

    Args:
        rows (`int`): Rows.
        width (`int`): `P + C`, tokens to which every row is padded.
        completion_width (`int`): `C`, tokens of it that are the completion's.
    """

    rows: int
    width: int
    completion_width: int


# Groups the rows of each pool into micro-batches: (lengths of each pool, stock's shape, least micro-batches a pool).
Planner = Callable[[Sequence[RowLengths], StockShape, int], list[list[tuple[int, ...]]]]


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
        return self.batch if self.rows is None else select_rows(self.batch, self.rows)


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
        step = self.shape.rows
        prompt, completion, scored = ([c[i : i + step] for i in range(0, len(c), step)] for c in counts)
        self.lengths = [RowLengths(tuple(p), tuple(c)) for p, c in zip(prompt, completion, strict=True)]
        self.scored_tokens = scored

    @property
    def shape(self) -> StockShape:
        """Shape of a stock micro-batch of this generation batch."""
        (rows, prompt_width), completion_width = (
            self.stock[0]["prompt_mask"].shape,
            self.stock[0]["completion_mask"].size(1),
        )
        return StockShape(rows, prompt_width + completion_width, completion_width)

    def segment(self, first: int, steps: int, denominator: str | None, plan: Planner) -> list[list[MicroBatch]]:
        """The micro-batches of `steps` stock steps from `first` on, one list per step, at least one each.

        Args:
            first (`int`): Index of the first stock micro-batch.
            steps (`int`): Stock micro-batches in the segment.
            denominator (`str` or `None`): What divides the loss: `"window"`, `"rows"` or `"tokens"` (of the stock
                micro-batch); `None` keeps stock's micro-batches.
            plan (`Callable`): Groups the rows of each pool, see `Planner`.
        """
        span = range(first, first + steps)
        if denominator is None or any(has_images(self.stock[step]) for step in span):
            return [
                [MicroBatch(self.stock[step], None, self.lengths[step], sum(self.scored_tokens[step]))]
                for step in span
            ]
        batch = concatenate_rows([self.stock[step] for step in span])
        lengths = RowLengths(
            tuple(p for step in span for p in self.lengths[step].prompt),
            tuple(c for step in span for c in self.lengths[step].completion),
        )
        scored = [tokens for step in span for tokens in self.scored_tokens[step]]

        # A loss that is divided by the tokens of its stock micro-batch can be split, but not joined with another's.
        if denominator == "tokens":
            pools = [tuple(range(i * self.shape.rows, (i + 1) * self.shape.rows)) for i in range(steps)]
        else:
            pools = [tuple(range(len(scored)))]
        plans = plan([lengths.select(pool) for pool in pools], self.shape, steps // len(pools))

        micro_batches = []
        for pool, planned in zip(pools, plans, strict=True):
            pool_tokens = sum(scored[row] for row in pool)
            for group in planned:
                rows = tuple(pool[row] for row in group)
                tokens = sum(scored[row] for row in rows)
                weight = {
                    "window": 1.0,
                    "rows": len(rows) / self.shape.rows,
                    "tokens": tokens / max(1, pool_tokens),
                }[denominator]
                micro_batches.append(MicroBatch(batch, rows, lengths.select(rows), tokens, weight))
        return spread(micro_batches, steps)


def spread(micro_batches: Sequence[MicroBatch], steps: int) -> list[list[MicroBatch]]:
    """Spreads micro-batches over steps, in order and as evenly as their number allows."""
    cuts = [len(micro_batches) * step // steps for step in range(steps + 1)]
    return [list(micro_batches[start:end]) for start, end in pairwise(cuts)]


def padding_stats(
    groups: Sequence[RowLengths], stock_width: int, pad_to_multiple_of: int | None, token_budget: int | None
) -> PaddingStats:
    """Counts of a rank's forwards, one group of rows each, against the same rows padded to `stock_width` tokens."""
    widths = [padded_length(group, pad_to_multiple_of) for group in groups]
    sizes = [len(group.total) for group in groups]
    forwarded = sum(size * width for size, width in zip(sizes, widths, strict=True))
    return PaddingStats(
        rows=sum(sizes),
        micro_batches=len(groups),
        real_tokens=sum(sum(group.total) for group in groups),
        forwarded_tokens=forwarded,
        stock_tokens=sum(sizes) * stock_width,
        critical_tokens=forwarded,
        oversized_rows=0 if token_budget is None else sum(width > token_budget for width in widths),
    )
