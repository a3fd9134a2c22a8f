"""Data collators without the padding: the parent's batch, as narrow as its rows allow.

A cell is *dead* if it is neither a real token (attention mask 0) nor scored (label -100, completion and assistant mask
0). Two things happen to a batch: a row's dead cells on the left move to its right end, and columns at an end that are
dead in every row are cut. So every value is the parent's, and a causal model scores each token as in its row alone.
Dead cells between two others stay, because closing the gap would change distances between tokens.

Padding is told from the attention mask, not from token ids: the pad id may equal eos. The one exception is a data set
without a mask column, whose pad tokens the parent marks as real. If labels are the ids of their columns, those at the
end of a row that have none are cut, with a warning, since no scored token of a causal model sees them. (What counts
tokens by the mask, as the router loss of an MoE model and TRL's `num_tokens` do, then counts fewer.)
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import transformers
from transformers.utils import logging
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as SFTDataCollatorForLanguageModeling

from .layout import IMAGE_KEYS, TOKEN_TYPE_KEYS
from .planning import check_int


logger = logging.get_logger(__name__)

# Entries with one value per token, `(B, L)`, and entries that pass in any shape. Others pass if they are one value per
# row, `(B,)` or `(B, 1)`, or a scalar.
_SCORE_MASKS = ("completion_mask", "assistant_masks")
COLUMN_KEYS = {"input_ids", "attention_mask", "labels", "position_ids", "special_tokens_mask"}
COLUMN_KEYS |= {*_SCORE_MASKS, *TOKEN_TYPE_KEYS}
ROW_KEYS = {"ref_chosen_logps", "ref_rejected_logps", *IMAGE_KEYS}
_DECODER_KEYS = {"decoder_input_ids", "decoder_attention_mask"}
_PACKED_KEYS = {
    "seq_lengths",
    "seq_idx",
    "cu_seqlens",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
}


@dataclass(frozen=True)
class PadToken:
    """What the parent pads with, where its mask may take padding for real tokens."""

    id: int
    may_be_eos: bool


@dataclass(frozen=True)
class Narrowed:
    """A batch without its padding, and what a trainer must know to put its rows into other batches.

    Args:
        batch (`Mapping[str, object]`): What [`minimize_padding`] returns.
        columns (`tuple[str, ...]`): Its entries with one value per token.
        lengths (`torch.Tensor` of shape `(B,)` or `None`): Columns that each row needs; the rest of a row may be cut.
            `None` if rows are not separate sequences of a causal model, such as packed ones.
    """

    batch: Mapping[str, object]
    columns: tuple[str, ...] = ()
    lengths: torch.Tensor | None = None


def minimize_padding(
    batch: Mapping[str, object], *, pad_to_multiple_of: int | None = None, padding_side: str = "right"
) -> Mapping[str, object]:
    """Moves a batch's left padding to the right and cuts the columns that are dead in every row.

    Equals padding the same rows on the right, to the longest of them, where a row reaches from its first to its last
    cell that is a real token or scored. Some batches are changed less:

    - packed and padding-free ones (sequence boundaries, `position_ids` that restart) not at all;
    - encoder-decoder ones (decoder entries, or `labels` of another width than `input_ids`) are cut on the right only,
      the entries of the encoder and those of the decoder to a width each;
    - so are those whose `labels` are not the ids of their columns.

    Args:
        batch (`Mapping[str, object]`): What a collator returns, with `input_ids` of shape `(B, L)`. It is not changed.
        pad_to_multiple_of (`int`, *optional*): The width is rounded up to a multiple of this many tokens, but never
            above `L`: nothing is added to a batch.
        padding_side (`str`, *optional*, defaults to `"right"`): `"right"` is for causal models. `"keep"` moves nothing
            and cuts columns on both sides.

    Returns:
        `Mapping[str, object]`: a batch of the same type with narrower entries.

    Raises:
        `NotImplementedError`: an entry with columns has not two dimensions, such as a 4-D attention mask.
        `TypeError`: an entry with columns is not a tensor.
        `ValueError`: an option is out of its range, an entry has another shape than it should, or an unknown one might
            have columns.

    Example:

    ```python
    >>> import torch
    >>> ids, mask = torch.tensor([[0, 0, 5, 6], [0, 0, 0, 7]]), torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]])
    >>> minimize_padding({"input_ids": ids, "attention_mask": mask})["input_ids"].tolist()
    [[5, 6], [7, 0]]

    ```
    """
    _check_options(pad_to_multiple_of, padding_side)
    return narrow(batch, pad_to_multiple_of, padding_side).batch


class PaddingMinimizingCollator:
    """Any collator, with [`minimize_padding`] applied to what it returns.

    Args:
        inner (`Callable`): Makes a batch, a mapping of tensors, from a list of features.
        pad_to_multiple_of (`int`, *optional*): See [`minimize_padding`].
        padding_side (`str`, *optional*, defaults to `"right"`): See [`minimize_padding`].

    Raises:
        `TypeError`: `inner` is not callable.
        `ValueError`: an option is out of its range.
    """

    def __init__(
        self,
        inner: Callable[[Sequence[object]], Mapping[str, object]],
        *,
        pad_to_multiple_of: int | None = None,
        padding_side: str = "right",
    ):
        if not callable(inner):
            raise TypeError(f"`inner`={inner!r} is not callable; it must be a data collator.")
        _check_options(pad_to_multiple_of, padding_side)
        self.inner, self.pad_to_multiple_of, self.padding_side = inner, pad_to_multiple_of, padding_side

    @property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase | None:
        """The inner collator's tokenizer, which `Trainer` saves with the model."""
        return getattr(self.inner, "tokenizer", None)

    def __call__(self, features: Sequence[object]) -> Mapping[str, object]:
        batch = self.inner(features)
        pad = _unmasked_pad(self.inner, features, batch)
        return narrow(batch, self.pad_to_multiple_of, self.padding_side, pad).batch


class _Minimizing:
    """Goes in front of a collator class."""

    def __post_init__(self):
        if hasattr(super(), "__post_init__"):
            super().__post_init__()
        _check_options(self.pad_to_multiple_of, self.padding_side)

    def __call__(self, features, *args, **kwargs):
        batch = super().__call__(features, *args, **kwargs)
        pad = _unmasked_pad(self, features, batch)
        return narrow(batch, self.pad_to_multiple_of, self.padding_side, pad).batch


@dataclass
class PadminDataCollatorForLanguageModeling(_Minimizing, transformers.DataCollatorForLanguageModeling):
    """[`transformers.DataCollatorForLanguageModeling`] with [`minimize_padding`] applied to its batch.

    Takes its arguments, and `padding_side`. `mlm=True` needs `padding_side="keep"`: such models are not causal.
    """

    padding_side: str = "right"

    def __post_init__(self):
        super().__post_init__()
        if self.mlm and self.padding_side != "keep":
            raise NotImplementedError(
                f"`mlm`=True with `padding_side`={self.padding_side!r}: padding moves for causal models only. Set "
                '`mlm=False`, or `padding_side="keep"`.'
            )


@dataclass
class PadminDataCollatorForSeq2Seq(_Minimizing, transformers.DataCollatorForSeq2Seq):
    """[`transformers.DataCollatorForSeq2Seq`] with [`minimize_padding`] applied to its batch.

    Takes its arguments, and `padding_side`. Batches of encoder-decoder models are cut on the right only.
    """

    padding_side: str = "right"


@dataclass
class PadminDataCollatorWithPadding(_Minimizing, transformers.DataCollatorWithPadding):
    """[`transformers.DataCollatorWithPadding`] with [`minimize_padding`] applied to its batch.

    Takes its arguments, and `padding_side`; choose `"keep"` for models that are not causal.
    """

    padding_side: str = "right"


@dataclass
class PadminSFTDataCollatorForLanguageModeling(_Minimizing, SFTDataCollatorForLanguageModeling):
    """`trl.trainer.sft_trainer.DataCollatorForLanguageModeling` with [`minimize_padding`] applied to its batch.

    Takes its arguments, and `padding_side`. TRL ignores a data set's `attention_mask`: what was padded before can be
    told by its `labels` only.
    """

    padding_side: str = "right"


@dataclass
class PadminDataCollatorForPreference(_Minimizing, DataCollatorForPreference):
    """`trl.trainer.dpo_trainer.DataCollatorForPreference` with [`minimize_padding`] applied to its batch.

    Takes its arguments, and `padding_side`.
    """

    padding_side: str = "right"


def _check_options(pad_to_multiple_of: int | None, padding_side: str) -> None:
    if pad_to_multiple_of is not None:
        check_int("pad_to_multiple_of", pad_to_multiple_of, at_least=1)
    if padding_side not in ("right", "keep"):
        raise ValueError(f'`padding_side`={padding_side!r} is not known; choose "right" or "keep".')


def _unmasked_pad(collator: Callable, features: Sequence[object], batch: Mapping[str, object]) -> PadToken | None:
    """The collator's pad token, if the attention mask cannot know which tokens of `features` are padding."""
    if batch.get("attention_mask") is not None and not ignores_masks(collator):
        first = features[0] if isinstance(features, Sequence) and features else None
        if not isinstance(first, Mapping) or "input_ids" not in first or "attention_mask" in first:
            return None
    return pad_token(collator)


def ignores_masks(collator: Callable) -> bool:
    """Whether a collator marks all tokens of a row as real, whatever the data set's mask says."""
    return isinstance(getattr(collator, "inner", collator), SFTDataCollatorForLanguageModeling)


def pad_token(collator: Callable) -> PadToken | None:
    """What a collator pads with, if it tells."""
    collator = getattr(collator, "inner", collator)
    tokenizer = getattr(collator, "tokenizer", None)
    pad = getattr(collator if tokenizer is None else tokenizer, "pad_token_id", None)
    eos = getattr(tokenizer, "eos_token_id", None)
    return None if pad is None else PadToken(pad, may_be_eos=eos is None or eos == pad)


def narrow(
    batch: Mapping[str, object], multiple: int | None = None, padding_side: str = "right", pad: PadToken | None = None
) -> Narrowed:
    """[`minimize_padding`], with the lengths of the rows; `pad` if the mask may take padding for real tokens."""
    if _PACKED_KEYS & batch.keys():
        return Narrowed(batch)
    columns, decoder_columns = _columns(batch)
    if _holds_several_sequences(batch):
        return Narrowed(batch)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = batch["labels"] if "labels" in columns else torch.full_like(ids, -100)
    scored = labels != -100
    # A label that is not the id of its column may be a decoder's, whose padding on the left has an effect.
    may_cut_left = not decoder_columns and bool(((labels == ids) | ~scored).all())
    for key in columns:
        if key in _SCORE_MASKS:
            scored = scored | batch[key].bool()
    real = torch.ones_like(scored) if mask is None else mask.bool()
    alive = real | scored
    if (scored & ~real).any():
        logger.warning_once(
            "Tokens with `attention_mask` 0 are scored (`labels` other than -100, or `completion_mask` 1), so their "
            "columns stay. If they are padding, set their `labels` to -100."
        )
    if pad is not None and may_cut_left and padding_side == "right" and "labels" in columns:
        alive = _without_unmasked_tail(alive, scored, ids, pad)
    # One pad token at an end may be a real eos or bos.
    is_pad = torch.zeros_like(alive) if pad is None else (ids == pad.id) & alive
    if is_pad[:, :2].all() or is_pad[:, -2:].all() or (pad is None and mask is None):
        logger.warning_once(
            "Without an attention mask from the data set it is not known which tokens are padding, so they are kept. "
            "Tokenize the data set without padding, or add such a column if the collator reads it."
        )
    if not may_cut_left and not decoder_columns and not alive[:, 0].all():
        logger.warning_once("`labels` are not the ids of their columns, so padding on the left is not moved.")

    move = may_cut_left and padding_side == "right"
    first, end = _ends(alive)
    orders = dict.fromkeys(columns, _kept(first, end, alive.size(1), multiple, move=move, cut_left=may_cut_left))
    ends = {"labels": -100, "decoder_attention_mask": 0}
    used = [batch[key] != ends[key] for key in decoder_columns if key in ends]
    if used:
        # A decoder is causal: nothing sees what follows the last scored token, but what precedes the first is seen.
        used = torch.stack(used).any(dim=0)
        order = _kept(*_ends(used), used.size(1), multiple, move=False, cut_left=False)
        orders |= dict.fromkeys(decoder_columns, order)
    minimized = copy.copy(batch)
    for key, order in orders.items():
        minimized[key] = batch[key].gather(1, order)
    separable = not decoder_columns and padding_side == "right"
    lengths = (end - first if move else end).clamp(min=0).squeeze(1) if separable else None
    return Narrowed(minimized, tuple(columns), lengths)


def _columns(batch: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """The entries with one value per token, and those with one per decoder token; raises on what may be either."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    _check_columns("input_ids", ids)
    # Labels of rows are `(B,)`, `(B, 1)` or, for several classes each, floats.
    has_token_labels = isinstance(labels, torch.Tensor) and labels.dim() > 1
    if has_token_labels and labels.dim() == 2 and labels.shape != ids.shape:
        has_token_labels = labels.size(1) != 1 and not labels.is_floating_point()
    decoder_keys = {key for key in _DECODER_KEYS if batch.get(key) is not None}
    if has_token_labels and (decoder_keys or labels.size(1) != ids.size(1)):
        decoder_keys.add("labels")

    columns, decoder_columns = [], []
    for key, value in batch.items():
        if value is None or key in ROW_KEYS or (key == "labels" and not has_token_labels):
            continue
        if key in decoder_keys:
            _check_columns(key, value, batch[decoder_columns[0]].shape if decoder_columns else None)
            decoder_columns.append(key)
        elif key in COLUMN_KEYS:
            _check_columns(key, value, ids.shape)
            columns.append(key)
        elif _shape(value) not in ((), (len(ids),), (len(ids), 1)):
            raise ValueError(
                f"`{key}` of shape {_shape(value)} is not known, with `input_ids` of shape {tuple(ids.shape)}. Add it "
                "to `trl_padmin.collators.COLUMN_KEYS` if it has one value per token, else to `ROW_KEYS`."
            )
    if "attention_mask" in columns and (batch["attention_mask"] < 0).any():
        raise ValueError("`attention_mask` has values below 0; it must be 1 for real tokens and 0 for padding.")
    return columns, decoder_columns


def _check_columns(key: str, value: object, shape: torch.Size | None = None) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f'`{key}` is a {type(value).__name__}; it must be a padded tensor, as with `return_tensors="pt"`.'
        )
    if value.dim() != 2:
        raise NotImplementedError(
            f"`{key}` has shape {tuple(value.shape)}; only (rows, columns) is supported. Use the collator as it is."
        )
    if shape not in (None, value.shape):
        raise ValueError(
            f"`{key}` has shape {tuple(value.shape)}; it must be {tuple(shape)}, as that of what it belongs to."
        )


def _shape(value: object) -> tuple[int, ...]:
    if isinstance(value, list | tuple):
        return (len(value), *max(map(_shape, value), default=()))
    return tuple(getattr(value, "shape", ()))


def _holds_several_sequences(batch: Mapping[str, object]) -> bool:
    """Whether rows are packed: a mask that numbers sequences, positions that restart, or positions without a mask."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is None:
        return positions is not None
    real, packed = mask.bool(), mask > 1
    if positions is not None:
        packed[:, 1:] |= (positions.diff(dim=1) <= 0) & real[:, 1:] & real[:, :-1]
    return bool(packed.any())


def _without_unmasked_tail(
    alive: torch.Tensor, scored: torch.Tensor, ids: torch.Tensor, pad: PadToken
) -> torch.Tensor:
    """Takes the pad tokens at the end of a row that are not scored for dead; all are `(B, L)`."""
    tail = ((ids == pad.id) & ~scored).flip(1).cumprod(dim=1).flip(1).bool()
    if pad.may_be_eos:
        tail = tail & torch.nn.functional.pad(tail[:, :-1], (1, 0))
    spans = [end - first for first, end in map(_ends, (alive & ~tail, alive))]
    if spans[0].max() < spans[1].max():
        logger.warning_once(
            "The attention mask is not the data set's, so pad tokens may be marked as real. Those at the end of a row "
            f"(id {pad.id}, `labels` -100) are taken for padding. To be sure, tokenize the data set without padding."
        )
    return alive & ~tail


def _ends(alive: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first column of each row that is alive and the one behind its last, `(B, 1)`; `L` and 0 without any."""
    columns = torch.arange(alive.size(1), device=alive.device)
    first = torch.where(alive, columns, alive.size(1)).amin(dim=1, keepdim=True)
    end = torch.where(alive, columns + 1, 0).amax(dim=1, keepdim=True)
    return first, end


def _kept(
    first: torch.Tensor, end: torch.Tensor, width: int, multiple: int | None, *, move: bool, cut_left: bool
) -> torch.Tensor:
    """The columns that each row keeps, in order, `(B, W)`."""
    start = int(first.min()) if cut_left and not move else 0
    needed = int((end - first).max()) if move else int(end.max()) - start
    multiple = multiple or 1
    # At least 2, because a score needs a token and its successor.
    kept = min(width, -(-max(2, needed) // multiple) * multiple)
    start = min(start, width - kept)
    columns = torch.arange(start, start + kept, device=end.device).expand(len(end), kept)
    # Rotating a row up to its last token puts its padding on the left behind that, as the sort of `TokensFirst` does.
    return torch.where(columns < end, (columns + first) % end.clamp(min=1), columns) if move else columns
