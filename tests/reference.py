"""Slow oracles: what the fast code must equal, written as plainly as possible."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from trl import GRPOTrainer


def partitions(rows: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to split rows into groups."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for count in range(len(rest) + 1):
        for others in combinations(rest, count):
            left = [row for row in rest if row not in others]
            for partition in partitions(left):
                yield [(first, *others), *partition]


def least_cost(
    lengths: Sequence[int],
    token_budget: int | None,
    overhead_tokens: int,
    pad_to_multiple_of: int | None,
    min_micro_batches: int,
) -> int:
    """Cost of the cheapest partition that obeys the budget and the least number of micro-batches, by trying all."""
    multiple = pad_to_multiple_of or 1
    padded = [-(-length // multiple) * multiple for length in lengths]

    def tokens(group):
        return len(group) * max(padded[row] for row in group)

    def is_allowed(partition):
        fits = all(len(group) == 1 or token_budget is None or tokens(group) <= token_budget for group in partition)
        return fits and len(partition) >= min(min_micro_batches, len(lengths))

    return min(
        sum(tokens(group) + overhead_tokens for group in partition)
        for partition in partitions(range(len(lengths)))
        if is_allowed(partition)
    )


def score_each_row_alone(
    score, model, input_ids, attention_mask, logits_to_keep, **kwargs
) -> tuple[torch.Tensor | None, ...]:
    """`score` of TRL, called once per row on its real tokens only; its results in the shape of one call."""
    results = []
    for ids, mask in zip(input_ids, attention_mask, strict=True):
        real = mask.bool()
        completion_tokens = int(real[-logits_to_keep:].sum())
        is_completion = torch.zeros_like(real)
        is_completion[-logits_to_keep:] = real[-logits_to_keep:]
        alone = score(model, ids[real][None], mask[real][None], max(1, completion_tokens), **kwargs)
        row = []
        for value in alone:
            if value is None or value.dim() == 0:
                row.append(None)
                continue
            full = value.new_zeros(logits_to_keep)
            if completion_tokens:
                full = full.masked_scatter(is_completion[-logits_to_keep:], value[0])
            else:
                full = full + 0.0 * value.sum()
            row.append(full)
        results.append(row)
    return tuple(None if column[0] is None else torch.stack(column) for column in zip(*results, strict=True))


def log_probs_of_each_row_alone(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
) -> torch.Tensor:
    """Log-probabilities of the completion tokens, `(B, logits_to_keep)`, from the model's plain logits."""
    result = torch.zeros(len(input_ids), logits_to_keep, dtype=torch.float64)
    for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
        real = mask.bool()
        alone = ids[real][None]
        log_probs = model(alone, use_cache=False).logits[0, :-1].double().log_softmax(dim=-1)
        scores = log_probs.gather(1, alone[0, 1:, None]).squeeze(1)
        count = int(real[-logits_to_keep:].sum())
        result[row, :count] = scores[len(scores) - count :]
    return result


class RowAloneGRPOTrainer(GRPOTrainer):
    """Stock TRL, scoring each row alone and unpadded: the truth that layouts are measured against."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        return score_each_row_alone(
            super()._get_per_token_logps_and_entropies, model, input_ids, attention_mask, logits_to_keep, **kwargs
        )
