"""The invariants in the docstring of `planning.py`, one by one."""

import random
import time
from itertools import chain

import pytest
from reference import least_cost

from trl_padmin import plan_micro_batches


def random_case(rng, most_rows=64):
    length = rng.choice([lambda: rng.randint(1, 6), lambda: rng.randint(1, 90), lambda: int(rng.lognormvariate(4, 1))])
    return {
        "lengths": [length() for _ in range(rng.randint(1, most_rows))],
        "token_budget": rng.choice([None, rng.randint(64, 400), rng.randint(1000, 5000)]),
        "overhead_tokens": rng.choice([0, 1, 5, 30, 128, 1000]),
        "pad_to_multiple_of": rng.choice([None, 1, 8, 64]),
        "min_micro_batches": rng.randint(1, 12),
    }


def cases(count, seed=0, most_rows=64):
    rng = random.Random(seed)
    return [random_case(rng, most_rows) for _ in range(count)]


def padded(lengths, multiple):
    return [-(-length // (multiple or 1)) * (multiple or 1) for length in lengths]


def check_rows(plan, rows):
    """Invariant 1. Multisets: a row that is placed twice must not pass."""
    assert sorted(chain(*plan)) == list(range(rows))


def check_budget(plan, case):
    """Invariant 2."""
    widths = padded(case["lengths"], case["pad_to_multiple_of"])
    for rows in plan:
        tokens = len(rows) * max(widths[row] for row in rows)
        assert len(rows) == 1 or case["token_budget"] is None or tokens <= case["token_budget"]


@pytest.mark.parametrize("seed", range(4))
def test_invariants_1_to_5_on_random_rows(seed):
    for case in cases(500, seed):
        plan = plan_micro_batches(**case)
        widths = padded(case["lengths"], case["pad_to_multiple_of"])
        check_rows(plan, len(case["lengths"]))
        check_budget(plan, case)
        oversized = [row for row, width in enumerate(widths) if width > (case["token_budget"] or max(widths))]
        assert plan.oversized_rows == len(oversized)
        assert all((row,) in plan.micro_batches for row in oversized)
        assert len(plan) >= min(case["min_micro_batches"], len(case["lengths"]))
        assert plan == plan_micro_batches(**case)
        assert list(plan.padded_lengths) == sorted(plan.padded_lengths, reverse=True)
        assert list(plan.padded_lengths) == [max(widths[row] for row in rows) for rows in plan]
        assert plan.real_tokens == sum(case["lengths"])
        assert plan.forwarded_tokens == sum(len(rows) * max(widths[row] for row in rows) for rows in plan)


def test_checkers_see_a_broken_plan():
    """Negative control: a row placed twice, a row lost, a micro-batch over the budget."""
    case = {"lengths": [7, 7, 3], "token_budget": 14, "pad_to_multiple_of": None}
    for broken in ([(0, 1), (1, 2)], [(0, 1)]):
        with pytest.raises(AssertionError):
            check_rows(broken, 3)
    with pytest.raises(AssertionError):
        check_budget([(0, 1, 2)], case)


def test_invariant_6_cost_is_least_of_all_partitions():
    """Every partition is tried, contiguous or not: up to nine rows have 21147 of them."""
    rng = random.Random(7)
    for index in range(400):
        case = random_case(rng, most_rows=9 if index % 40 == 0 else 6)
        plan = plan_micro_batches(**case)
        cost = plan.forwarded_tokens + case["overhead_tokens"] * len(plan)
        assert cost == least_cost(**case), case


def test_invariant_6_where_greedy_is_four_times_worse():
    plan = plan_micro_batches([100, 100, 100, 4000], 16_000, overhead_tokens=0)
    assert plan.forwarded_tokens == plan.real_tokens == 4300


@pytest.mark.parametrize("min_micro_batches", [1, 64, 512, 4000])
@pytest.mark.parametrize("token_budget", [None, 16_384])
def test_invariant_7_speed(token_budget, min_micro_batches):
    rng = random.Random(0)
    lengths = [int(rng.lognormvariate(6.5, 0.8)) + 1 for _ in range(4096)]
    seconds = []
    for _ in range(5):
        start = time.process_time()
        plan_micro_batches(lengths, token_budget, overhead_tokens=128, min_micro_batches=min_micro_batches)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize("multiple", [None, 1])
def test_eight_rows_of_seven_with_a_budget_of_eight(multiple):
    plan = plan_micro_batches([7] * 8, 8, overhead_tokens=128, pad_to_multiple_of=multiple)
    assert len(plan) == 8


def test_equal_lengths_give_even_micro_batches():
    """Where cost does not decide, the largest micro-batch is as small as can be."""
    assert {len(rows) for rows in plan_micro_batches([5] * 12, None, overhead_tokens=3, min_micro_batches=4)} == {3}
    sizes = [len(rows) for rows in plan_micro_batches([5] * 11, 1000, overhead_tokens=3, min_micro_batches=4)]
    assert sorted(sizes) == [2, 3, 3, 3]


def test_no_rows_and_zero_lengths():
    assert list(plan_micro_batches([], 10, overhead_tokens=1)) == []
    plan = plan_micro_batches([0, 0, 3], 10, overhead_tokens=1)
    check_rows(plan, 3)
    assert plan.forwarded_tokens <= 9


def test_plan_is_frozen():
    plan = plan_micro_batches([1, 2], 4, overhead_tokens=0)
    with pytest.raises(AttributeError):
        plan.real_tokens = 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"token_budget": 0}, ValueError, "`token_budget`=0"),
        ({"token_budget": -5}, ValueError, "`token_budget`=-5"),
        ({"token_budget": 8.0}, TypeError, "`token_budget`=8.0"),
        ({"token_budget": True}, TypeError, "`token_budget`=True"),
        ({"token_budget": 32, "pad_to_multiple_of": 64}, ValueError, "`token_budget`=32.*`pad_to_multiple_of`=64"),
        ({"overhead_tokens": -1}, ValueError, "`overhead_tokens`=-1"),
        ({"overhead_tokens": 1.5}, TypeError, "`overhead_tokens`=1.5"),
        ({"pad_to_multiple_of": 0}, ValueError, "`pad_to_multiple_of`=0"),
        ({"min_micro_batches": 0}, ValueError, "`min_micro_batches`=0"),
        ({"lengths": [3, -1]}, ValueError, "`length`=-1"),
        ({"lengths": [3, 2.5]}, TypeError, "`length`=2.5"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        plan_micro_batches(**{"lengths": [3, 4], "token_budget": 100, "overhead_tokens": 1} | arguments)
