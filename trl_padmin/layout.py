"""Where tokens stand: real tokens first, padding last, width cut to the longest row, and the exact way back.

TRL pads prompts on the left and completions on the right, so a row is `[pad, prompt, completion, pad]`. The model sees
`[prompt, completion, pad]` instead, as narrow as the rows allow. Padding is told from the attention mask, never from
token ids: the pad id may equal eos and may occur inside a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


# Every key of a batch that TRL's `_generate_and_score_completions` returns, with its shape. `B` rows, `P` prompt
# columns, `C` completion columns. Rows are picked along the first dimension; columns are never cut here, because the
# loss is computed in TRL's own layout and only the model's forward sees a narrower one.
ROW_SHAPES = {
    "prompt_ids": "(B, P)",
    "prompt_mask": "(B, P)",
    "completion_ids": "(B, C)",
    "completion_mask": "(B, C)",
    "tool_mask": "(B, C)",
    "advantages": "(B,) or (B, C)",
    "old_per_token_logps": "(B, C)",
    "old_logps": "(B,)",
    "ref_per_token_logps": "(B, C)",
    "sampling_per_token_logps": "(B, C)",
    "importance_sampling_ratio": "(B, C) or (B, 1)",
    "token_type_ids": "(B, P + C)",
    "mm_token_type_ids": "(B, P + C)",
}
_PROMPT_KEYS = frozenset(key for key, shape in ROW_SHAPES.items() if shape == "(B, P)")
_COMPLETION_KEYS = frozenset(key for key, shape in ROW_SHAPES.items() if "(B, C)" in shape)
TOKEN_TYPE_KEYS = ("token_type_ids", "mm_token_type_ids")
_ROW_KEYS = frozenset({"input_ids", "attention_mask", *TOKEN_TYPE_KEYS})  # "(B, P + C)", also of what is scored
SCALARS = frozenset({"num_items_in_batch"})
IMAGE_KEYS = frozenset(
    {
        "pixel_values",
        "pixel_attention_mask",
        "pixel_position_ids",
        "image_grid_thw",
        "image_sizes",
        "image_position_ids",
        "spatial_shapes",
        "num_images",
        "num_tiles",
    }
)


def unknown_keys(batch: Mapping[str, object]) -> list[str]:
    """The keys of `batch` whose shape is not registered here, sorted."""
    return sorted(batch.keys() - ROW_SHAPES.keys() - SCALARS - IMAGE_KEYS)


def has_images(batch: Mapping[str, object]) -> bool:
    """Whether rows of `batch` may carry images."""
    return any(batch.get(key) is not None for key in IMAGE_KEYS)


def concatenate_rows(batches: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Joins batches that were cut from one generation batch, so that their columns agree.

    Raises:
        `ValueError`: a value does not have one entry per row, or batches differ in their keys.
    """
    joined = {}
    for key, first in batches[0].items():
        values = [batch[key] for batch in batches]
        if first is None or key in SCALARS:
            joined[key] = first
            continue
        for batch, value in zip(batches, values, strict=True):
            if len(value) != len(batch["prompt_ids"]):
                raise ValueError(
                    f"`{key}` has {len(value)} entries for {len(batch['prompt_ids'])} rows; its shape must be "
                    f"{ROW_SHAPES.get(key, '(B, ...)')}."
                )
        joined[key] = torch.cat(values) if isinstance(first, torch.Tensor) else [item for v in values for item in v]
    return joined


def select_rows(batch: Mapping[str, object], rows: Sequence[int]) -> dict[str, object]:
    """The given rows of a batch, in the given order."""
    index = torch.tensor(rows, device=batch["prompt_ids"].device)
    selected = {}
    for key, value in batch.items():
        if value is None or key in SCALARS:
            selected[key] = value
        elif isinstance(value, torch.Tensor):
            selected[key] = value[index]
        else:
            selected[key] = [value[row] for row in rows]
    return selected


def widen_columns(batch: Mapping[str, object], left: int, right: int) -> dict[str, object]:
    """Adds `left` columns before the prompts of a batch and `right` columns behind its completions, all masked.

    An importance ratio is padded with 1, and stays as it is where it has one value per row.
    """
    widened = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            if key in _PROMPT_KEYS:
                value = torch.nn.functional.pad(value, (left, 0))
            elif key in _ROW_KEYS:
                value = torch.nn.functional.pad(value, (left, right))
            elif key in _COMPLETION_KEYS and value.shape == batch["completion_mask"].shape:
                fill = 1 if key == "importance_sampling_ratio" else 0
                value = torch.nn.functional.pad(value, (0, right), value=fill)
        widened[key] = value
    return widened


@dataclass(frozen=True)
class RowLengths:
    """Tokens of each row, on the host.

    Args:
        prompt (`tuple[int, ...]`): Real prompt tokens of each row.
        completion (`tuple[int, ...]`): Real completion tokens; 0 for a completion that TRL masked as truncated.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def total(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return tuple(p + c for p, c in zip(self.prompt, self.completion, strict=True))

    def select(self, rows: Sequence[int]) -> "RowLengths":
        """The lengths of the given rows, in the given order."""
        return RowLengths(tuple(self.prompt[row] for row in rows), tuple(self.completion[row] for row in rows))


def row_lengths(attention_mask: torch.Tensor, logits_to_keep: int) -> RowLengths:
    """Lengths from an attention mask `(B, P + C)` whose last `logits_to_keep` = `C` columns are the completion.

    This waits for the device once.
    """
    prompt_columns = attention_mask.size(1) - logits_to_keep
    halves = attention_mask[:, :prompt_columns], attention_mask[:, prompt_columns:]
    prompt, completion = torch.stack([half.sum(dim=1) for half in halves]).tolist()
    return RowLengths(tuple(prompt), tuple(completion))


def padded_length(lengths: RowLengths, pad_to_multiple_of: int | None = None) -> int:
    """Width of a micro-batch of these rows in tokens; at least 2, because a score needs a token and its successor."""
    multiple = pad_to_multiple_of or 1
    return -(-max(2, *lengths.total) // multiple) * multiple


def first_scored_column(lengths: RowLengths, width: int) -> int:
    """The first column of a tokens-first micro-batch that holds a completion token.

    At least 1, because the token before predicts it, and the last one if no row has a completion.
    """
    return max(1, min((p for p, c in zip(lengths.prompt, lengths.completion, strict=True) if c), default=width - 1))


class TokensFirst:
    """The tokens-first layout of some rows, and the way back.

    Equals shifting each row left by its left padding and cutting columns that are padding in every row.

    Args:
        attention_mask (`torch.Tensor` of shape `(B, P + C)`): 1 for real tokens.
        logits_to_keep (`int`): `C`, completion columns of the source.
        lengths ([`RowLengths`]): Lengths of the same rows.
        pad_to_multiple_of (`int`, *optional*): The width is rounded up to a multiple of this many tokens.

    Attributes:
        attention_mask (`torch.Tensor` of shape `(B, W)`): 1 for real tokens, which come first in each row.
        logits_to_keep (`int`): The fewest last columns that hold every completion token, at least 1.
        is_completion (`torch.Tensor` of shape `(B, W)`): Which tokens are completion tokens, the ones to score.
    """

    def __init__(
        self,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        lengths: RowLengths,
        pad_to_multiple_of: int | None = None,
    ):
        real = attention_mask.bool()
        source_width = attention_mask.size(1)
        width = padded_length(lengths, pad_to_multiple_of)

        order = (~real).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
        self._source_columns = torch.nn.functional.pad(order, (0, max(0, width - source_width)))
        columns = torch.arange(width, device=attention_mask.device)
        self.attention_mask = (columns < real.sum(dim=1, keepdim=True)).to(attention_mask.dtype)

        first_scored = first_scored_column(lengths, width)
        self.logits_to_keep = width - first_scored

        completion = slice(source_width - logits_to_keep, source_width)
        prompt_tokens = real[:, : completion.start].sum(dim=1, keepdim=True)
        self.is_completion = self.attention_mask.bool() & (columns >= prompt_tokens)
        position = real.cumsum(dim=1)[:, completion] - 1
        self._is_scored = real[:, completion] & (position >= first_scored)
        self._scored_columns = (position - first_scored).clamp(0, self.logits_to_keep - 1)

    def apply(self, values: torch.Tensor) -> torch.Tensor:
        """Moves `(B, P + C)` to `(B, W)`."""
        return values.gather(1, self._source_columns)

    def restore(self, scores: torch.Tensor) -> torch.Tensor:
        """Moves scores of the last `logits_to_keep` columns back to `(B, C)`, with 0 where there is no real token."""
        return scores.gather(1, self._scored_columns).masked_fill(~self._is_scored, 0)


def restore_rows(scores: Sequence[Sequence[torch.Tensor | None]], groups: Sequence[Sequence[int]]) -> tuple:
    """Joins what each group of rows returned, rows in their own order; scalars and `None` pass.

    Of a row that is in several groups the first one counts.
    """
    order = [row for group in groups for row in group]
    first_position = {row: position for position, row in reversed(list(enumerate(order)))}
    index = [first_position[row] for row in range(len(first_position))]
    return tuple(
        parts[0] if parts[0] is None or parts[0].dim() == 0 else torch.cat(parts)[index]
        for parts in zip(*scores, strict=True)
    )
