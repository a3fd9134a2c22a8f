"""The examples of one optimizer step of supervised training: which are forwarded together, and with what weight.

An *example* is an entry of the data set: one sequence, or two for preferences, chosen and rejected. A *window* is what
one optimizer step sees on one rank: the stock batches that `Trainer.get_batch_samples` collects.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from .collators import Narrowed
from .distributed import Observation
from .layout import RowLengths, has_images, padded_length
from .window import Groups, spread


class ExampleWindow:
    """The examples of one optimizer step on one rank.

    Args:
        stock (`Sequence` of `Mapping`): The batches as they were collated.
        narrowed (`Sequence` of [`Narrowed`]): The same without their padding.
        sequences (`int`): Sequences of one example; a batch holds the first of each example, then the second.
        pad_id (`int`): Fills `input_ids`.
        pad_to_multiple_of (`int` or `None`): Widths are rounded up to a multiple of this many tokens.
    """

    def __init__(
        self,
        stock: Sequence[Mapping],
        narrowed: Sequence[Narrowed],
        sequences: int,
        pad_id: int,
        pad_to_multiple_of: int | None,
    ):
        self.batches = [each.batch for each in narrowed]
        self.sequences = sequences
        self.stock_tokens = [batch["input_ids"].numel() for batch in stock]
        self.stock_examples = [len(batch["input_ids"]) // sequences for batch in stock]
        self._columns = narrowed[0].columns
        self._fill = {"input_ids": pad_id, "labels": -100}
        self._multiple = pad_to_multiple_of
        lengths, scored, real = self._fetch_counts(stock, narrowed)
        self.lengths = lengths  # for each example those of its sequences
        self.scored_tokens = scored  # likewise, tokens that enter the loss
        self.stock_real_tokens = real
        longest = padded_length(RowLengths(tuple(chain(*lengths)), (0,) * len(lengths) * sequences), self._multiple)
        self._joined = {key: self._join(key, longest) for key in self.batches[0]}

    def _fetch_counts(
        self, stock: Sequence[Mapping], narrowed: Sequence[Narrowed]
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
        """Lengths and scored tokens by example, and the tokens that stock's masks call real; waits for the device."""
        counts = []
        for before, after in zip(stock, narrowed, strict=True):
            batch = after.batch
            is_scored = batch["labels"] != -100 if "labels" in after.columns else batch["completion_mask"].bool()
            mask = before.get("attention_mask")
            real = torch.ones_like(before["input_ids"]) if mask is None else mask
            counts.append(torch.stack([after.lengths, is_scored[:, 1:].sum(dim=1), real.bool().sum(dim=1)]))
        lengths, scored, real = torch.cat([self._by_example(c.T) for c in counts]).permute(2, 0, 1).tolist()
        return list(map(tuple, lengths)), list(map(tuple, scored)), sum(chain(*real))

    def _by_example(self, values: torch.Tensor) -> torch.Tensor:
        """`(sequences x B, ...)` to `(B, sequences, ...)`."""
        return values.unflatten(0, (self.sequences, -1)).transpose(0, 1)

    def _join(self, key: str, width: int) -> torch.Tensor | None:
        """One entry of all batches, by example, with its columns widened to the same width."""
        parts = [batch[key] for batch in self.batches]
        if parts[0] is None:
            return None
        if key in self._columns:
            fill = self._fill.get(key, 0)
            parts = [torch.nn.functional.pad(part, (0, width - part.size(1)), value=fill) for part in parts]
        if len(parts[0]) == self.stock_examples[0] * self.sequences:
            parts = [self._by_example(part) for part in parts]
        return torch.cat(parts)

    @property
    def pools(self) -> list[tuple[int, ...]]:
        """Examples that may share a micro-batch.

        In a mean over pairs, those of a smaller batch weigh more, as the last one of an epoch may be.
        """
        if self.sequences == 1:
            return [tuple(range(len(self.lengths)))]
        pools, start = defaultdict(list), 0
        for size in self.stock_examples:
            pools[size] += range(start, start + size)
            start += size
        return [tuple(pool) for pool in pools.values()]

    def steps_of(self, pool: Sequence[int]) -> int:
        """How many stock batches the examples of a pool come from."""
        if self.sequences == 1:
            return len(self.stock_examples)
        return len(pool) // self._batch_size(pool)

    def _batch_size(self, pool: Sequence[int]) -> int:
        """Examples of the stock batches that a pool comes from."""
        ends = accumulate(self.stock_examples)
        return next(size for size, end in zip(self.stock_examples, ends, strict=True) if pool[0] < end)

    def micro_batches(self, groups: Sequence[Groups]) -> list[list["ExampleMicroBatch"]]:
        """The micro-batches of each stock batch, at least one each, from the groups of examples of each pool."""
        planned, seen = [], set()
        for pool, pool_groups in zip(self.pools, groups, strict=True):
            for group in pool_groups:
                examples = tuple(pool[index] for index in group)
                weight = 1.0 if self.sequences == 1 else len(examples) / self._batch_size(pool)
                is_repeated = not seen.isdisjoint(examples)
                seen.update(examples)
                planned.append(ExampleMicroBatch(self, examples, 0.0 if is_repeated else weight, is_repeated))
        return spread(planned, len(self.batches))

    def row_lengths(self, examples: Sequence[int]) -> RowLengths:
        """Lengths of all sequences of some examples."""
        lengths = tuple(chain(*(self.lengths[example] for example in examples)))
        return RowLengths(lengths, (0,) * len(lengths))

    def example_lengths(self, examples: Sequence[int]) -> RowLengths:
        """Lengths of the longest sequence of each example."""
        return RowLengths(tuple(max(self.lengths[example]) for example in examples), (0,) * len(examples))

    def select(self, examples: Sequence[int]) -> dict[str, torch.Tensor]:
        """A batch of some examples, as the collator would have made it."""
        width = padded_length(self.row_lengths(examples), self._multiple)
        batch = {}
        for key, value in self._joined.items():
            if value is not None:
                value = value[list(examples)]
                if key in self._columns:
                    value = value[:, :, :width]
                if value.dim() > 1 and len(self.batches[0][key]) == self.stock_examples[0] * self.sequences:
                    value = value.transpose(0, 1).flatten(0, 1)
            batch[key] = value
        return batch


@dataclass(frozen=True)
class ExampleMicroBatch:
    """One forward and backward: some examples of a window, and the factor on their loss."""

    window: ExampleWindow
    examples: tuple[int, ...]
    loss_weight: float
    is_repeated: bool = False  # it only keeps ranks in step, and weighs nothing

    def inputs(self) -> dict[str, torch.Tensor | None]:
        """The batch to compute the loss of."""
        return self.window.select(self.examples)

    def observations(self, metrics: Mapping[str, list], half_of: Callable[[str], int | None]) -> list[Observation]:
        """What the loss logged, each with the examples and tokens that it is a mean over.

        Args:
            metrics (`Mapping`): Values by name.
            half_of (`Callable`): For a metric of preferences, 0 if it is of the chosen sequences, 1 of the rejected
                ones, and `None` if of both.
        """
        counted = () if self.is_repeated else self.examples
        scored = [self.window.scored_tokens[example] for example in counted]
        observed = []
        for name, values in metrics.items():
            half = half_of(name) if self.window.sequences > 1 else None
            tokens = sum(sum(each) if half is None else each[half] for each in scored)
            observed.append(Observation({name: values}, len(counted), tokens))
        return observed


def why_unknown(stock: Sequence[Mapping]) -> str | None:
    """Why batches are not narrowed; or `None`."""
    if not stock:
        return "there are none"
    for batch in stock:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
            return "a batch holds no tensor of `input_ids`"
        if has_images(batch):
            return "rows carry images"
    return None


def why_not_rows(narrowed: Sequence[Narrowed], sequences: int) -> str | None:
    """Why rows of batches cannot be put into other batches; or `None`."""
    for each in narrowed:
        rows = len(each.batch["input_ids"])
        if each.lengths is None:
            return "rows are packed or padding-free"
        if "labels" not in each.columns and "completion_mask" not in each.columns:
            return "no entry tells which tokens are scored"
        if each.batch.keys() != narrowed[0].batch.keys() or each.columns != narrowed[0].columns:
            return "batches differ in their entries"
        for key, value in each.batch.items():
            is_per_row = isinstance(value, torch.Tensor) and value.dim() and len(value) in (rows, rows // sequences)
            if value is not None and not is_per_row:
                return f"`{key}` has not one entry per row"
    return None
