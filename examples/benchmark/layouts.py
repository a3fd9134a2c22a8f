"""The layouts that are compared: which rows share a micro-batch, and how wide it is. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass

from profiles import Profile, Row

from trl_padmin import plan_micro_batches
from trl_padmin.planning import DEFAULT_OVERHEAD_TOKENS


GREEDY_TOKENS = 16384

# Name: what it does. In the order of the tables.
LAYOUTS = {
    "config_max": "rows padded to the configured maximum, prompt and completion apart",
    "stock": "stock TRL: every row padded to the longest prompt plus the longest completion of the generation batch",
    "truncate": "stock micro-batches with left padding moved and cut: each as wide as its longest row",
    "sorted_fixed": "rows sorted by length into micro-batches of as many rows as TRL's (what `group_by_length` gives)",
    "greedy": "rows sorted by length and filled into micro-batches of up to 16k tokens (the blog post's method)",
    "ours": "trl_padmin",
    "row_by_row": "each row alone: no padding at all, as many micro-batches as rows",
}
PACKED = {"packed": "rows joined end to end up to TRL's micro-batch size, FlashAttention: no padding at all"}

Groups = list[tuple[int, ...]]


@dataclass(frozen=True)
class Setting:
    """What a layout depends on besides lengths.

    Args:
        batch_size (`int`): Rows of one of TRL's micro-batches.
        scale (`int`, *optional*, defaults to 1): What lengths were divided by.
        overhead_tokens (`int`, *optional*, defaults to the planner's): The planner's, before scaling.
    """

    batch_size: int
    scale: int = 1
    overhead_tokens: int = DEFAULT_OVERHEAD_TOKENS

    @property
    def scaled_overhead(self) -> int:
        return round(self.overhead_tokens / self.scale)


def group_rows(
    layout: str, lengths: Sequence[int], stock_width: int, setting: Setting, at_least: int | None = None
) -> Groups:
    """The micro-batches of a pass over a window.

    Args:
        layout (`str`): A key of `LAYOUTS` or `PACKED`.
        lengths (`Sequence[int]`): Real tokens of each row.
        stock_width (`int`): Tokens to which TRL pads every row.
        setting ([`Setting`]): Batch size and scale.
        at_least (`int`, *optional*): Least number of micro-batches of `ours`; in the policy pass, the default, as many
            as TRL's.
    """
    size, ascending = setting.batch_size, sorted(range(len(lengths)), key=lengths.__getitem__)
    if layout in ("config_max", "stock", "truncate"):
        return _chunks(range(len(lengths)), size)
    if layout == "sorted_fixed":
        return _chunks(ascending, size)
    if layout == "greedy":
        budget = GREEDY_TOKENS // setting.scale
        return _fill(ascending, lambda rows: len(rows) * max(lengths[row] for row in rows) <= budget)
    if layout == "packed":
        return _fill(ascending, lambda rows: sum(lengths[row] for row in rows) <= size * stock_width)
    if layout == "row_by_row":
        return [(row,) for row in reversed(ascending)]
    plan = plan_micro_batches(
        lengths,
        size * stock_width,
        overhead_tokens=setting.scaled_overhead,
        min_micro_batches=at_least or -(-len(lengths) // size),
    )
    return list(plan)


def count_tokens(layout: str, rows: Sequence[Row], profile: Profile, setting: Setting) -> dict[str, int]:
    """Forwarded tokens of a window, its micro-batches, and the largest of them in tokens."""
    lengths = [sum(row) for row in rows]
    stock_width = sum(map(max, zip(*rows, strict=True)))
    groups = group_rows(layout, lengths, stock_width, setting)
    if layout == "config_max":
        caps = profile.prompt_cap, profile.completion_cap
        sizes = [len(group) * sum(max(2, round(cap / setting.scale)) for cap in caps) for group in groups]
    elif layout == "stock":
        sizes = [len(group) * stock_width for group in groups]
    elif layout == "packed":
        sizes = [sum(lengths[row] for row in group) for group in groups]
    else:
        sizes = [len(group) * max(lengths[row] for row in group) for group in groups]
    return {"forwarded_tokens": sum(sizes), "micro_batches": len(groups), "largest_tokens": max(sizes)}


def _chunks(rows: Sequence[int], size: int) -> Groups:
    return [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]


def _fill(rows: Sequence[int], fits) -> Groups:
    """Puts rows in turn into a micro-batch until one does not fit."""
    groups = []
    for row in rows:
        if groups and fits((*groups[-1], row)):
            groups[-1] = (*groups[-1], row)
        else:
            groups.append((row,))
    return groups[::-1]  # the longest first, as in all other layouts
