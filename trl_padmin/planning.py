"""Which rows share a micro-batch: the planner. Pure Python, deterministic, no logging.

A plan is made from row lengths alone, so that every rank and every run that sees the same lengths makes the same plan.

Invariants (`tests/test_planning.py` checks them one by one):

1. every row is in exactly one micro-batch;
2. rows x padded length <= `token_budget` for every micro-batch with more than one row;
3. a row longer than the budget runs alone, it is never dropped and never an error;
4. there are at least `min_micro_batches` micro-batches, whenever there are as many rows;
5. the same input gives the same plan; longest micro-batch first;
6. no partition that obeys 1 to 4 costs less, where the cost is forwarded tokens + `overhead_tokens` x micro-batches;
7. 4,096 rows plan in under 50 ms.

Why sorting loses nothing: in any partition, exchanging rows so that the longer micro-batch holds the longer rows
widens no micro-batch. So some optimum is contiguous in the length-sorted rows, and the search is over cut positions.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise, zip_longest


DEFAULT_OVERHEAD_TOKENS = 128  # an estimate for GPUs; examples/benchmark/README.md says from what


@dataclass(frozen=True)
class MicroBatchPlan:
    """Rows grouped into micro-batches.

    Iterating gives one tuple of row indices per micro-batch, the longest micro-batch first.

    Args:
        micro_batches (`tuple[tuple[int, ...], ...]`): Row indices of each micro-batch, longest row first.
        padded_lengths (`tuple[int, ...]`): Width of each micro-batch in tokens.
        real_tokens (`int`): Sum of the row lengths in tokens.
        oversized_rows (`int`): Rows that alone exceed the token budget.

    Example:

    ```python
    >>> plan = plan_micro_batches([3, 9, 2, 8], token_budget=18, overhead_tokens=3)
    >>> list(plan)
    [(1, 3), (0, 2)]
    >>> plan.forwarded_tokens, plan.real_tokens
    (24, 22)

    ```
    """

    micro_batches: tuple[tuple[int, ...], ...]
    padded_lengths: tuple[int, ...]
    real_tokens: int
    oversized_rows: int = 0

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return self.micro_batches[index]

    @property
    def forwarded_tokens(self) -> int:
        """Rows x width summed over the micro-batches: every cell that a forward computes, pad tokens included."""
        return sum(len(rows) * width for rows, width in zip(self.micro_batches, self.padded_lengths, strict=True))


def plan_micro_batches(
    lengths: Sequence[int],
    token_budget: int | None,
    *,
    overhead_tokens: int,
    pad_to_multiple_of: int | None = None,
    min_micro_batches: int = 1,
) -> MicroBatchPlan:
    """Groups rows into micro-batches at the least cost in forwarded tokens.

    Equals trying every partition of the rows that obeys the budget and the least number of micro-batches, and keeping
    the cheapest.

    Args:
        lengths (`Sequence[int]`): Real tokens of each row.
        token_budget (`int` or `None`): Most forwarded tokens in one micro-batch of several rows; `None` is no cap.
        overhead_tokens (`int`): What one more micro-batch costs, in forwarded tokens that take as long.
        pad_to_multiple_of (`int`, *optional*): Widths are rounded up to a multiple of this many tokens.
        min_micro_batches (`int`, *optional*, defaults to `1`): Least number of micro-batches; with fewer rows than
            that, one micro-batch per row.

    Returns:
        [`MicroBatchPlan`]: the plan; empty when there are no rows.

    Raises:
        `TypeError`: an argument, or a length, is not an integer.
        `ValueError`: an argument is out of its range, or a length is negative.
    """
    check_int("overhead_tokens", overhead_tokens, at_least=0)
    check_int("min_micro_batches", min_micro_batches, at_least=1)
    if pad_to_multiple_of is not None:
        check_int("pad_to_multiple_of", pad_to_multiple_of, at_least=1)
    check_token_budget(token_budget, pad_to_multiple_of)
    for length in lengths:
        check_int("length", length, at_least=0)

    multiple = pad_to_multiple_of or 1
    padded = [-(-length // multiple) * multiple for length in lengths]
    rows = sorted(range(len(lengths)), key=lambda row: padded[row])  # stable: equal lengths keep their order
    widths = [padded[row] for row in rows]

    cuts = _least_cost_cuts(widths, token_budget, overhead_tokens, min(min_micro_batches, len(rows)))
    spans = list(pairwise(cuts))[::-1]
    return MicroBatchPlan(
        micro_batches=tuple(tuple(reversed(rows[start:end])) for start, end in spans),
        padded_lengths=tuple(widths[end - 1] for _, end in spans),
        real_tokens=sum(lengths),
        oversized_rows=0 if token_budget is None else sum(width > token_budget for width in widths),
    )


def plan_ranks(
    lengths: Sequence[int],
    ranks: int,
    token_budget: int | None,
    *,
    overhead_tokens: int,
    pad_to_multiple_of: int | None = None,
    min_micro_batches: int = 1,
) -> tuple[MicroBatchPlan, ...]:
    """Spreads rows over ranks that run their micro-batches in lockstep: all wait for the slowest one at each position.

    Micro-batches are planned over the rows of all ranks, sorted by their forwarded tokens and dealt, so that those at
    one position cost alike. How much is waited then depends on how far the costs lie apart, so plans are made under
    several caps up to the budget and the one with the shortest critical path is kept.

    Args:
        lengths (`Sequence[int]`): Real tokens of each row of all ranks.
        ranks (`int`): Number of ranks; must divide the number of rows.
        token_budget, overhead_tokens, pad_to_multiple_of: As in [`plan_micro_batches`].
        min_micro_batches (`int`, *optional*, defaults to `1`): Least number of micro-batches of each rank.

    Returns:
        `tuple` of [`MicroBatchPlan`]: one per rank, with indices into `lengths`, all with as many micro-batches.

    Raises:
        `TypeError`, `ValueError`: as [`plan_micro_batches`]; also if `ranks` does not divide the number of rows.
    """
    check_int("ranks", ranks, at_least=1)
    if len(lengths) % ranks:
        raise ValueError(f"`ranks`={ranks} does not divide the {len(lengths)} rows; every rank must bring as many.")
    if not lengths:
        return (MicroBatchPlan((), (), 0),) * ranks
    multiple = pad_to_multiple_of or 1
    longest = -(-max(lengths) // multiple) * multiple
    cap = float(sum(lengths) * multiple if token_budget is None else token_budget)

    candidates = []
    for _ in range(8):
        at_least = ranks * min_micro_batches
        while True:
            plan = plan_micro_batches(
                lengths,
                int(cap),
                overhead_tokens=overhead_tokens,
                pad_to_multiple_of=pad_to_multiple_of,
                min_micro_batches=min(at_least, len(lengths)),
            )
            if len(plan) % ranks == 0:
                break
            at_least = -(-len(plan) // ranks) * ranks
        dealt = _deal(plan, lengths, ranks)
        candidates.append((critical_path_tokens(dealt) + overhead_tokens * len(dealt[0]), len(candidates), dealt))
        if cap <= longest:
            break
        cap = max(longest, cap / 2**0.5)
    plans = min(candidates)[2]
    if token_budget is None:
        return plans
    oversized = [sum(width > token_budget for width in plan.padded_lengths) for plan in plans]
    return tuple(replace(plan, oversized_rows=rows) for plan, rows in zip(plans, oversized, strict=True))


def critical_path_tokens(plans: Sequence[MicroBatchPlan]) -> int:
    """Forwarded tokens of the slowest rank at each position, summed: how long ranks in lockstep take."""
    costs = [[len(rows) * width for rows, width in zip(p, p.padded_lengths, strict=True)] for p in plans]
    return sum(max(position) for position in zip_longest(*costs, fillvalue=0))


def _deal(plan: MicroBatchPlan, lengths: Sequence[int], ranks: int) -> tuple[MicroBatchPlan, ...]:
    """Micro-batches of like cost to all ranks at once, the larger ones to the rank that has least so far."""
    dealt = sorted(
        zip(plan.micro_batches, plan.padded_lengths, strict=True),
        key=lambda item: len(item[0]) * item[1],
        reverse=True,
    )
    hands = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for first in range(0, len(dealt), ranks):
        order = sorted(range(ranks), key=totals.__getitem__)
        for rank, (rows, width) in zip(order, dealt[first : first + ranks], strict=True):
            hands[rank].append((rows, width))
            totals[rank] += len(rows) * width
    return tuple(
        MicroBatchPlan(
            micro_batches=tuple(rows for rows, _ in hand),
            padded_lengths=tuple(width for _, width in hand),
            real_tokens=sum(lengths[row] for rows, _ in hand for row in rows),
        )
        for hand in hands
    )


def check_token_budget(token_budget: int | None, pad_to_multiple_of: int | None = None) -> None:
    """Raises `TypeError` or `ValueError` unless `token_budget` is `None` or a usable number of tokens."""
    if token_budget is None:
        return
    check_int("token_budget", token_budget, at_least=1)
    if pad_to_multiple_of is not None and token_budget < pad_to_multiple_of:
        raise ValueError(
            f"`token_budget`={token_budget} is smaller than `pad_to_multiple_of`={pad_to_multiple_of}: no row fits. "
            f"Raise `token_budget` to at least {pad_to_multiple_of}, or lower `pad_to_multiple_of`."
        )


def check_int(name: str, value: int, *, at_least: int) -> None:
    """Raises `TypeError` or `ValueError` unless `value` is an integer of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}`={value!r} is a {type(value).__name__}; it must be an integer number.")
    if value < at_least:
        raise ValueError(f"`{name}`={value} is too small; it must be at least {at_least}.")


def _least_cost_cuts(widths: list[int], token_budget: int | None, overhead_tokens: int, at_least: int) -> list[int]:
    """Cut positions `[0, ..., n]` of the cheapest partition of ascending `widths` into at least `at_least` spans.

    The cost of the best partition into exactly `k` spans is convex in `k`, because the cost of a span is Monge: so if
    the unconstrained optimum has too few spans, the constrained one has exactly `at_least`, and charging less per span
    leads to it (the Lagrangian of Aggarwal, Schieber and Tokuyama, "Finding a minimum-weight k-link path in graphs
    with the concave Monge property", 1994). All costs are integers, hence so is the charge where the count steps over
    `at_least`; the two optima on either side of that step are spliced into one with the exact count.
    """
    earliest_starts = _earliest_starts(widths, token_budget)
    fewest = _cheapest_cuts(widths, earliest_starts, overhead_tokens)
    if len(fewest) - 1 >= at_least:
        return _even_out(fewest, widths)
    most = list(range(len(widths) + 1))  # splitting never forwards more tokens, so at charge 0 all rows alone is best
    low, high = 0, overhead_tokens
    charge, cuts = overhead_tokens, fewest
    for probe in count():
        if high - low <= 1:
            break
        # The count of spans falls about as the root of the charge. Bisection bounds the search where that misleads.
        guess = charge * (len(cuts) - 1) ** 2 // at_least**2
        charge = min(max(guess, low + 1), high - 1) if probe < 6 else (low + high) // 2
        cuts = _cheapest_cuts(widths, earliest_starts, charge)
        if len(cuts) - 1 >= at_least:
            low, most = charge, cuts
        else:
            high, fewest = charge, cuts
        if len(most) - 1 == at_least:
            return _even_out(most, widths)
    return _even_out(_splice(fewest, most, at_least), widths)


def _earliest_starts(widths: list[int], token_budget: int | None) -> list[int]:
    """For each `end`, the earliest `start` such that rows `[start, end)` fit the budget, or are one row."""
    if token_budget is None:
        return [0] * (len(widths) + 1)
    return [0] + [max(0, end - max(1, token_budget // width)) if width else 0 for end, width in enumerate(widths, 1)]


def _cheapest_cuts(widths: list[int], earliest_starts: list[int], charge: int) -> list[int]:
    """The cheapest partition when every span is charged `charge` tokens; the one with most spans among equals.

    `best[end] = min over start of best[start] + (end - start) * widths[end - 1] + charge`. Seen from `end`, a start is
    a line in the width, `best[start] - start * width`. Widths ascend, so a later start that is as good as an earlier
    one stays as good, also where the budget rules the earlier one out. The queue holds the starts that are best next,
    each with the first end at which it is, and that end is found by bisection.
    """
    n = len(widths)
    scale = n + 1  # a token outweighs any number of spans, and each span earns 1
    charge = charge * scale - 1
    scaled = [width * scale for width in widths]
    best, previous = [0] * (n + 1), [0] * (n + 1)
    starts, best_from = [0], [1]
    head = 0
    for end in range(1, n + 1):
        if head + 1 < len(starts) and best_from[head + 1] == end:
            head += 1
        start = previous[end] = starts[head]
        cost = best[end] = best[start] + (end - start) * scaled[end - 1] + charge
        first = best_from[head] = end + 1
        while len(starts) > head:
            rival = starts[-1]
            rival_is_dearer = bisect_left(scaled, -(-(cost - best[rival]) // (end - rival)), end) + 1
            rival_is_too_early = bisect_left(earliest_starts, rival + 1, end + 1)
            first = rival_is_dearer if rival_is_dearer < rival_is_too_early else rival_is_too_early
            if first > best_from[-1]:
                break
            starts.pop()
            best_from.pop()
            first = end + 1
        if first <= n:
            starts.append(end)
            best_from.append(first)
    cuts = [n]
    while cuts[-1]:
        cuts.append(previous[cuts[-1]])
    return cuts[::-1]


def _splice(fewer: list[int], more: list[int], spans: int) -> list[int]:
    """Joins two partitions that are optimal at one charge into an optimal one with exactly `spans` spans."""
    offset = len(more) - 1 - spans
    head = next(i for i in range(len(fewer) - 1) if more[i + 1 + offset] <= fewer[i + 1])
    return fewer[: head + 1] + more[head + 1 + offset :]


def _even_out(cuts: list[int], widths: list[int]) -> list[int]:
    """Spreads rows evenly over neighbouring spans of one width, which costs nothing and lowers the peak."""
    span_widths = [widths[end - 1] for end in cuts[1:]]
    even = [0]
    for span, width in enumerate(span_widths):
        next_wider = bisect_right(span_widths, width)
        share = -(-(cuts[next_wider] - even[-1]) // (next_wider - span))
        even.append(max(even[-1] + share, bisect_left(widths, width) + 1))
    return even
