"""Plans over several ranks: `plan_ranks`, and the critical path of ranks in lockstep."""

import random
import time
from itertools import chain

import pytest
from test_planning import padded, random_case

from trl_padmin.planning import (
    DEFAULT_OVERHEAD_TOKENS,
    MicroBatchPlan,
    critical_path_tokens,
    plan_micro_batches,
    plan_ranks,
)


RANKS, ROWS_PER_RANK = 8, 64


def benchmark_rows(seed):
    """The lengths of the benchmark in TRL #6092: completions log-normal, one in ten at the cap; prompts as well."""
    rng = random.Random(seed)

    def completion():
        return 4096 if rng.random() < 0.1 else min(4096, int(rng.lognormvariate(0, 0.9) * 700) + 1)

    return [int(rng.lognormvariate(0, 0.4) * 256) + 1 + completion() for _ in range(RANKS * ROWS_PER_RANK)]


def path_to_real(lengths, plans):
    return critical_path_tokens(plans) / (sum(lengths) / RANKS)


def greedy(rows, lengths, token_budget):
    """Rows in the order of their length, into the micro-batch at hand as long as they fit; what blog posts do."""
    groups = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    widths = tuple(lengths[group[0]] for group in groups)
    return MicroBatchPlan(tuple(map(tuple, groups)), widths, sum(lengths[row] for row in rows))


@pytest.mark.parametrize("seed", range(3))
def test_invariants_on_random_rows(seed):
    rng = random.Random(seed)
    for _ in range(150):
        case = random_case(rng)
        ranks = rng.choice([1, 2, 3, 4, 8])
        lengths = case.pop("lengths") * ranks
        plans = plan_ranks(lengths, ranks, **case)
        widths = padded(lengths, case["pad_to_multiple_of"])
        assert len(plans) == ranks
        assert sorted(chain.from_iterable(map(tuple, chain(*plans)))) == list(range(len(lengths)))
        assert len({len(plan) for plan in plans}) == 1
        assert len(plans[0]) >= min(case["min_micro_batches"], len(lengths) // ranks)
        assert sum(plan.real_tokens for plan in plans) == sum(lengths)
        for plan in plans:
            assert list(plan.padded_lengths) == [max(widths[row] for row in rows) for rows in plan]
            tokens = [len(rows) * width for rows, width in zip(plan, plan.padded_lengths, strict=True)]
            budget = case["token_budget"] or sum(tokens)
            assert all(len(rows) == 1 or cells <= budget for rows, cells in zip(plan, tokens, strict=True))
            assert plan.oversized_rows == sum(width > budget for width in plan.padded_lengths)
        assert plans == plan_ranks(lengths, ranks, **case)


def test_one_rank_waits_for_nobody():
    lengths = [5, 90, 7, 30, 31, 8]
    plans = plan_ranks(lengths, 1, None, overhead_tokens=0)
    assert critical_path_tokens(plans) == plans[0].forwarded_tokens


def test_critical_path_is_the_slowest_rank_at_each_position():
    fast = MicroBatchPlan(((0,), (1,)), (10, 5), 15)
    slow = MicroBatchPlan(((2, 3), (4,), (5,)), (4, 6, 7), 21)
    assert critical_path_tokens([fast, slow]) == max(10, 8) + max(5, 6) + 7


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("overhead_tokens", [0, 128])
def test_critical_path_over_eight_ranks(seed, overhead_tokens):
    lengths = benchmark_rows(seed)
    balanced = path_to_real(lengths, plan_ranks(lengths, RANKS, 16_384, overhead_tokens=overhead_tokens))
    assert balanced <= 1.08
    # What others do on the same rows, so that the bound is known to be one: each rank its own rows, and every rank
    # every eighth of the sorted rows, both filled greedily.
    own = [range(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK) for rank in range(RANKS)]
    by_length = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    strided = [by_length[rank::RANKS] for rank in range(RANKS)]
    of_ranks, of_strides = (
        path_to_real(lengths, [greedy(rows, lengths, 16_384) for rows in placed]) for placed in (own, strided)
    )
    assert balanced < of_strides < of_ranks
    assert of_strides > 1.08


def test_planning_is_fast_enough_for_every_rank():
    lengths = benchmark_rows(0)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        plan_ranks(lengths, RANKS, 16_384, overhead_tokens=128, min_micro_batches=8)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


def test_a_plan_per_rank_is_not_enough():
    """Negative control: planned one by one, ranks have other numbers of micro-batches, and wait."""
    lengths = benchmark_rows(0)
    own = [lengths[rank * ROWS_PER_RANK : (rank + 1) * ROWS_PER_RANK] for rank in range(RANKS)]
    plans = [plan_micro_batches(rows, 16_384, overhead_tokens=128) for rows in own]
    assert len({len(plan) for plan in plans}) > 1
    assert path_to_real(lengths, plans) > 1.08


def test_errors():
    with pytest.raises(ValueError, match="`ranks`=2 does not divide the 3 rows"):
        plan_ranks([1, 2, 3], 2, None, overhead_tokens=0)
    assert plan_ranks([], 2, None, overhead_tokens=0) == (MicroBatchPlan((), (), 0),) * 2


def print_table() -> None:
    """README's figures: `python tests/test_planning_ranks.py`."""
    print("critical path / mean real tokens; 8 ranks x 64 rows, token budget 16,384")
    for seed in range(5):
        lengths = benchmark_rows(seed)
        by_rank = [range(rank * ROWS_PER_RANK, (rank + 1) * ROWS_PER_RANK) for rank in range(RANKS)]
        of_ranks = path_to_real(lengths, [greedy(rows, lengths, 16_384) for rows in by_rank])
        ours = path_to_real(lengths, plan_ranks(lengths, RANKS, 16_384, overhead_tokens=DEFAULT_OVERHEAD_TOKENS))
        print(f"draw {seed}: greedy rank by rank {of_ranks:.2f}, trl_padmin {ours:.2f}")


if __name__ == "__main__":
    print_table()
