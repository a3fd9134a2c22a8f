"""Rows that are scored together: laid out tokens first and in groups, scored by TRL, and the scores put back."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from . import compat
from .distributed import RowExchange, RowTable
from .images import images_by_row, pick_images
from .layout import TOKEN_TYPE_KEYS, RowLengths, TokensFirst, has_images, restore_rows, row_lengths, widen_columns
from .window import Groups


@dataclass
class Scoring:
    """Rows in TRL's layout, and how to score them.

    Args:
        source (`torch.Tensor` of shape `(B, P + C)`): The attention mask that TRL passed; tells whose rows these are.
        rows (`dict[str, torch.Tensor]`): Ids, mask and token types, `(B, P + C)`.
        columns (`int`): `C`.
        lengths ([`RowLengths`]): Real tokens of each row.
        groups (`list`, *optional*): Rows to score together; `None` is all of them, for TRL to cut into chunks.
        exchange ([`RowExchange`], *optional*): Where other ranks score some of the rows, and this one some of theirs.
        is_planned (`bool`, *optional*, defaults to `False`): Whether `groups` and `exchange` are settled.
    """

    source: torch.Tensor
    rows: dict[str, torch.Tensor]
    columns: int
    lengths: RowLengths
    groups: Groups | None = None
    exchange: RowExchange | None = None
    is_planned: bool = False

    @classmethod
    def of(cls, rows: dict[str, torch.Tensor], columns: int, lengths: RowLengths | None = None) -> "Scoring":
        """Makes one; waits for the device once unless the lengths are known."""
        mask = rows["attention_mask"]
        return cls(mask, rows, columns, row_lengths(mask, columns) if lengths is None else lengths)

    @property
    def table(self) -> RowTable:
        """What other ranks must know of the rows to score them."""
        width = self.source.size(1)
        return RowTable(width - self.columns, self.columns, width, self.lengths, self.lengths.completion)

    @property
    def forwards(self) -> list[RowLengths]:
        """Lengths of the rows of each forward."""
        return [self.lengths] if self.groups is None else [self.lengths.select(group) for group in self.groups]

    def move(self, exchange: RowExchange, table: RowTable) -> None:
        """Takes the rows that this rank scores, in place of those that it brought."""
        left = table.prompt_width - (self.source.size(1) - self.columns)
        right = table.completion_width - self.columns
        self.rows = exchange.deliver(widen_columns(self.rows, left, right))
        self.exchange, self.groups = exchange, exchange.groups
        self.columns, self.lengths = table.completion_width, table.lengths.select(exchange.runs)

    def run(
        self,
        score: Callable[..., tuple],
        model: nn.Module,
        columns: int,
        batch_size: int | None,
        pad_to_multiple_of: int | None,
        forward_kwargs: dict,
    ) -> tuple[torch.Tensor | None, ...]:
        """Equals `score` on all rows as TRL passed them, with 0 where there is no real token.

        Args:
            score (`Callable`): TRL's scoring function.
            model (`nn.Module`): What scores.
            columns (`int`): `C` of the rows that this rank brought.
            batch_size (`int` or `None`): Rows in one of TRL's chunks.
            pad_to_multiple_of (`int` or `None`): Widths are rounded up to a multiple of this many tokens.
            forward_kwargs (`dict`): The other arguments of `score`.

        Returns:
            `tuple`: what `score` returns: `(B, C)`, scalars, and `None` for what was not asked for.
        """
        groups, by_row = self.groups, {}
        if groups is None:
            groups = [tuple(range(len(self.source)))]
        else:
            batch_size = None
            by_row = images_by_row(forward_kwargs, len(self.source)) if has_images(forward_kwargs) else {}
        token_types = [key for key in TOKEN_TYPE_KEYS if key in self.rows]
        scores = []
        for group in groups:
            index = torch.tensor(group, device=self.source.device)
            mask, lengths = self.rows["attention_mask"][index], self.lengths.select(group)
            layout = TokensFirst(mask, self.columns, lengths, pad_to_multiple_of)
            moved = {key: layout.apply(self.rows[key][index]) for key in token_types} | pick_images(by_row, group)
            # Where TRL chunks the rows again, it labels each chunk, so there is no one mask to narrow the labels by.
            is_scored = layout.is_completion if batch_size is None or batch_size >= len(group) else None
            with compat.labels_restricted(model, is_scored):
                results = score(
                    model,
                    layout.apply(self.rows["input_ids"][index]),
                    layout.attention_mask,
                    layout.logits_to_keep,
                    batch_size=batch_size,
                    **forward_kwargs | moved,
                )
            scores.append([r if r is None or r.dim() == 0 else layout.restore(r) for r in results])
        restored = restore_rows(scores, groups)
        if self.exchange is None:
            return restored
        home = iter(self.exchange.bring_home(value for value in restored if value is not None))
        return tuple(None if value is None else next(home)[:, :columns] for value in restored)
