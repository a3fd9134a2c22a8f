"""Ranks in step: how many micro-batches each runs, which rows, and one reduction of what a window logs."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .layout import SCALARS, RowLengths
from .stats import PaddingStats


_REGROUPS, _KEEPS_STOCK, _FAILED = range(3)  # what a rank proposes; the highest of all ranks is what happens


@dataclass(frozen=True)
class RowTable:
    """Rows and how long they are, on one rank or on all, rank by rank.

    Args:
        prompt_width (`int`): Columns of the prompts; the most of all ranks.
        completion_width (`int`): Columns of the completions; the most of all ranks.
        stock_width (`int`): Tokens to which stock pads a row; the most of all ranks.
        lengths ([`RowLengths`]): Real tokens of each row.
        scored_tokens (`tuple[int, ...]`): Tokens of each row that enter the loss.
    """

    prompt_width: int
    completion_width: int
    stock_width: int
    lengths: RowLengths
    scored_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """What all ranks have agreed on.

    Args:
        groups (`list` or `None`): What this rank proposed; `None` if any rank keeps stock's micro-batches.
        counts (`list[int]`): How many groups each pool must have.
        table ([`RowTable`] or `None`): The rows of all ranks, where they may move between ranks.
    """

    groups: list | None
    counts: list[int]
    table: RowTable | None = None


def agree_on_groups(
    propose: Callable[[], list | None],
    pools: int,
    accelerator: Accelerator,
    *,
    offer: Callable[[], tuple[Mapping[str, object], RowTable]] | None = None,
    offered_rows: int = 0,
) -> Agreement:
    """Lets all ranks run the same number of micro-batches, or fail together. Communicates once.

    Args:
        propose (`Callable`): Returns this rank's groups of rows, one list per pool, or `None` to keep stock's
            micro-batches; may raise.
        pools (`int`): How many pools there are, the same on every rank.
        accelerator (`Accelerator`): Gathers over the ranks.
        offer (`Callable`, *optional*): Returns the batch whose rows may move between ranks, and its table.
        offered_rows (`int`, *optional*): How many rows each rank should have to offer, the same on every rank. Rows
            stay where they are if a rank has another number of them, or batches differ in more than their columns.

    Returns:
        [`Agreement`]: the same counts and table on every rank.

    Raises:
        Whatever `propose` or `offer` raised on any rank, on all ranks.
    """
    if accelerator.num_processes == 1:
        groups = propose()
        return Agreement(groups, [] if groups is None else [len(pool) for pool in groups])
    groups, error, offered = None, None, [0] * _size(offered_rows)
    try:
        groups = propose()
        if offer is not None and groups is not None:
            offered = _as_numbers(*offer(), offered_rows)
    except Exception as caught:  # raised again below, on every rank
        error = caught
    status = _FAILED if error is not None else _KEEPS_STOCK if groups is None else _REGROUPS
    local = [status, *([0] * pools if groups is None else [len(pool) for pool in groups]), *offered]
    ranks = accelerator.gather(torch.tensor(local, device=accelerator.device)).view(-1, len(local)).tolist()
    status, *counts = map(max, zip(*(rank[: 1 + pools] for rank in ranks), strict=True))
    if status == _FAILED:
        raise next(caught for caught in gather_object([error]) if caught is not None)
    if status == _KEEPS_STOCK:
        return Agreement(None, counts)
    return Agreement(groups, counts, _join([rank[1 + pools :] for rank in ranks], offered_rows))


def can_exchange_rows(accelerator: Accelerator) -> bool:
    """Whether there are ranks to exchange rows with, each with rows of its own."""
    if accelerator.num_processes == 1 or not torch.distributed.is_initialized():
        return False
    parallelism = getattr(accelerator, "parallelism_config", None)
    return getattr(parallelism, "non_data_parallel_size", 1) == 1


def _size(rows: int) -> int:
    """How many numbers a rank tells the others of the rows that it offers: a signature, three widths, the lengths."""
    return 4 + 3 * rows if rows else 0


def _as_numbers(batch: Mapping[str, object], table: RowTable, rows: int) -> list[int]:
    """What the other ranks must know of a batch to run its rows; the first number is 0 if they cannot move."""
    entries = {key: value for key, value in batch.items() if value is not None and key not in SCALARS}
    can_move = len(table.scored_tokens) == rows and all(isinstance(value, torch.Tensor) for value in entries.values())
    if not can_move:
        return [0] * _size(rows)
    # Batches can be exchanged if they agree in this. A ratio `(B, 1)` has one value per row, or per token if `C` is 1.
    kinds = [(key, str(value.dtype), value.dim()) for key, value in sorted(entries.items())]
    signature = 1 + zlib.crc32(repr((kinds, table.completion_width == 1)).encode())
    widths = [table.prompt_width, table.completion_width, table.stock_width]
    return [signature, *widths, *table.lengths.prompt, *table.lengths.completion, *table.scored_tokens]


def _join(ranks: Sequence[Sequence[int]], rows: int) -> RowTable | None:
    """The table of all ranks from the numbers of each, or `None` if their rows cannot move."""
    if rows == 0 or ranks[0][0] == 0 or len({rank[0] for rank in ranks}) > 1:
        return None
    widths = (max(rank[index] for rank in ranks) for index in (1, 2, 3))
    start = 4
    columns = [[n for rank in ranks for n in rank[start + i * rows : start + (i + 1) * rows]] for i in range(3)]
    prompt, completion, scored = map(tuple, columns)
    return RowTable(*widths, RowLengths(prompt, completion), scored)


class RowExchange:
    """Moves rows to the ranks that run them, with all that belongs to them, and results back home.

    Args:
        groups (`Sequence`): For each rank the groups of rows that it runs, indices into the rows of all ranks, rank by
            rank; the same on every rank.
        rows_per_rank (`int`): Rows that each rank brings.
        rank (`int`): This process.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[int, ...]]], rows_per_rank: int, rank: int):
        placed = [sorted(set(chain(*of_rank))) for of_rank in groups]
        self.runs = placed[rank]  # rows of all ranks that this one runs, in the order in which they arrive
        arrival = {row: position for position, row in enumerate(self.runs)}
        self.groups = [tuple(arrival[row] for row in group) for group in groups[rank]]
        own = range(rank * rows_per_rank, (rank + 1) * rows_per_rank)
        leaving = [[row - own.start for row in rows if row in own] for rows in placed]
        self._sends = list(chain(*leaving))
        self._send_counts = [len(rows) for rows in leaving]
        self._receive_counts = [0] * len(groups)
        for row in self.runs:
            self._receive_counts[row // rows_per_rank] += 1

    def deliver(self, batch: Mapping[str, object]) -> dict[str, object]:
        """The rows of `batch` that this rank runs; scalars and `None` stay. Columns must agree between ranks.

        Communicates once.
        """
        moving = [key for key, value in batch.items() if value is not None and key not in SCALARS]
        index = torch.tensor(self._sends, device=batch[moving[0]].device)
        received = _all_to_all([batch[key][index] for key in moving], self._send_counts, self._receive_counts)
        return {**batch, **dict(zip(moving, received, strict=True))}

    def bring_home(self, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Results of the rows that this rank brought, in their order. Communicates once."""
        returned = _all_to_all(list(results), self._receive_counts, self._send_counts)
        home = torch.tensor(self._sends, device=returned[0].device).argsort()
        return [value[home] for value in returned]


def _all_to_all(tensors: Sequence[torch.Tensor], sends: list[int], receives: list[int]) -> list[torch.Tensor]:
    """Exchanges the rows of several tensors in one collective, as bytes, so that every type arrives as it was."""
    rows = len(tensors[0])
    packed = [tensor.contiguous().view(rows, -1).view(torch.uint8) for tensor in tensors]
    received = packed[0].new_empty(sum(receives), sum(part.size(1) for part in packed))
    torch.distributed.all_to_all_single(received, torch.cat(packed, dim=1), receives, sends)
    parts = received.split([part.size(1) for part in packed], dim=1)
    return [  # copied, so that they start where a value of their type may
        part.clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(tensor.dtype)
        .view(len(received), *tensor.shape[1:])
        for part, tensor in zip(parts, tensors, strict=True)
    ]


@dataclass(frozen=True)
class Observation:
    """What TRL's loss logged for one micro-batch.

    Args:
        metrics (`Mapping[str, Sequence]`): Values by metric name, floats or tensors on the device.
        rows (`int`): Rows of the micro-batch.
        tokens (`int`): Its tokens that enter the loss.
    """

    metrics: Mapping[str, Sequence]
    rows: int
    tokens: int


def pool_window(
    observations: Sequence[Observation],
    stats: Sequence[PaddingStats],
    kind_of: Callable[[str], str],
    accelerator: Accelerator,
) -> tuple[dict[str, float], list[PaddingStats]]:
    """Pools what the micro-batches of all ranks logged in one window.

    Token means are weighted by tokens, row means by rows, minima are minima and maxima maxima. Waits for the device
    twice (once on one rank) and communicates once, whatever the number of micro-batches.

    Args:
        observations (`Sequence` of [`Observation`]): One per micro-batch of this rank; every rank logs the same names.
        stats (`Sequence` of [`PaddingStats`]): Counts of this rank; as many on every rank.
        kind_of (`Callable`): `"min"`, `"max"`, `"rows"` or `"tokens"` for a metric name.
        accelerator (`Accelerator`): Gathers over the ranks.

    Returns:
        The metrics, and the stats summed over ranks.
    """
    names = sorted({name for observation in observations for name in observation.metrics})
    values = _to_host(
        [observation.metrics.get(name, []) for name in names for observation in observations], accelerator
    )
    local = []
    for index, name in enumerate(names):
        per_micro_batch = values[index * len(observations) : (index + 1) * len(observations)]
        local += _pool_rank(kind_of(name), per_micro_batch, observations)
    counts = [count for entry in stats for count in astuple(entry)]
    ranks = _gather(local + counts, accelerator)

    metrics = {}
    for index, name in enumerate(names):
        kind = kind_of(name)
        pairs = [rank[2 * index : 2 * index + 2] for rank in ranks]
        if kind in ("min", "max"):
            metrics[name] = _extremum(kind, [value for value, _ in pairs])
        else:
            weight = math.fsum(weight for _, weight in pairs)
            metrics[name] = math.fsum(total for total, _ in pairs) / weight if weight else 0.0
    return metrics, [_sum_stats([rank[len(local) :] for rank in ranks], index) for index in range(len(stats))]


def _pool_rank(kind: str, values: Sequence[Sequence[float]], observations: Sequence[Observation]) -> list[float]:
    """`[extremum, 0]`, or `[sum of value x weight, sum of weights]`. NaN is TRL's word for "nothing to observe"."""
    if kind in ("min", "max"):
        return [_extremum(kind, [value for entry in values for value in entry]), 0.0]
    weighted = [
        (value, observation.rows if kind == "rows" else observation.tokens)
        for entry, observation in zip(values, observations, strict=True)
        for value in entry
        if not math.isnan(value)
    ]
    return [math.fsum(value * weight for value, weight in weighted), math.fsum(weight for _, weight in weighted)]


def _extremum(kind: str, values: Sequence[float]) -> float:
    return {"min": min, "max": max}[kind]((v for v in values if not math.isnan(v)), default=math.nan)


def _to_host(entries: Sequence[Sequence], accelerator: Accelerator) -> list[list[float]]:
    """Fetches all values at once, and returns them in the shape they came in."""
    flat = [torch.as_tensor(value) for entry in entries for value in entry]
    if not flat:
        return [[] for _ in entries]
    fetched = iter(torch.stack([value.to(accelerator.device, _dtype(accelerator)) for value in flat]).tolist())
    return [[next(fetched) for _ in entry] for entry in entries]


def _gather(values: list[float], accelerator: Accelerator) -> list[list[float]]:
    if accelerator.num_processes == 1:
        return [values]
    local = torch.tensor(values, device=accelerator.device, dtype=_dtype(accelerator))
    return accelerator.gather(local).view(accelerator.num_processes, -1).tolist()


def _dtype(accelerator: Accelerator) -> torch.dtype:
    return torch.float32 if accelerator.device.type == "mps" else torch.float64  # counts are exact up to 2**53


def _sum_stats(ranks: Sequence[Sequence[float]], index: int) -> PaddingStats:
    """Sums one entry of the stats over ranks; the slowest rank sets the pace of all."""
    size = len(astuple(PaddingStats()))
    per_rank = [PaddingStats(*map(int, rank[index * size : (index + 1) * size])) for rank in ranks]
    total = sum(per_rank, PaddingStats())
    return replace(total, critical_tokens=len(ranks) * max(rank.critical_tokens for rank in per_rank))
