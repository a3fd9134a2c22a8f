"""The pictures of rows: taken apart so that rows can be regrouped, and joined again for the model.

TRL keeps the pictures of a batch joined in one tensor per kind, indexed by patch (Qwen-VL), by tile (InternVL and
LFM2-VL), by image (LLaVA, Gemma) or by row (Idefics). Only TRL knows which, so it takes them apart; the rest needs no
model's name.
"""

from collections.abc import Mapping, Sequence

import torch

from . import compat
from .layout import IMAGE_KEYS, has_images


COUNTS = ("num_images", "num_tiles")  # one number per row


def images_by_row(batch: Mapping[str, object], rows: int) -> dict[str, object]:
    """The same batch with one entry per row under every image key; without images, as it is.

    Equals one call per row with the pictures of that row.

    Raises:
        `ValueError`: the pictures do not come with as many entries as there are rows, in any layout that TRL knows.
    """
    if not has_images(batch):
        return dict(batch)
    present = {key: batch[key] for key in IMAGE_KEYS if batch.get(key) is not None}
    if "num_images" not in present:
        raise ValueError(
            f"`{sorted(present)[0]}` comes without `num_images`, so its entries cannot be told apart by row. Add one "
            "number of images per row to the batch, or set `padding_minimization=False`."
        )
    by_row = compat.split_images(present)
    for key, value in by_row.items():
        if len(value) != rows:
            raise ValueError(
                f"`{key}` has {len(value)} entries for {rows} rows with {sum(present['num_images'])} images; TRL does "
                "not tell how it belongs to rows. Install a newer TRL, or set `padding_minimization=False`."
            )
    return dict(batch) | by_row


def join_images(batch: Mapping[str, object]) -> dict[str, object]:
    """The batch as TRL hands it to a model. Where no row has a picture there is none, rather than an empty tensor."""
    if not has_images(batch):
        return dict(batch)
    joined = dict(batch)
    indexed = {key for key in IMAGE_KEYS if isinstance(batch.get(key), list) and key not in COUNTS}
    is_empty = not sum(batch["num_images"])
    for key in IMAGE_KEYS & batch.keys() - set(COUNTS):
        if is_empty:
            joined[key] = None
        elif key in indexed:
            joined[key] = torch.cat(batch[key])
    return joined


def pick_images(by_row: Mapping[str, object], rows: Sequence[int]) -> dict[str, object]:
    """The pictures of the given rows, in the given order, joined."""
    picked = {}
    for key in IMAGE_KEYS & by_row.keys():
        value = by_row[key]
        if isinstance(value, torch.Tensor):
            picked[key] = value[torch.tensor(rows, device=value.device)]
        else:
            picked[key] = None if value is None else [value[row] for row in rows]
    return join_images(picked)
