"""Pooling and agreement, with ranks played by numbers; `test_ranks.py` has real processes."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from trl_padmin import PaddingStats, distributed
from trl_padmin.compat import metric_kind, why_not_movable
from trl_padmin.distributed import Agreement, Observation, RowTable, agree_on_groups, pool_window
from trl_padmin.layout import RowLengths


def kind_of(name):
    return metric_kind(name, sequence_level=False)


class Ranks:
    """An accelerator that gathers from its own process and from what other ranks would send."""

    def __init__(self, others):
        self.others = others
        self.num_processes = 1 + len(others)
        self.device = torch.device("cpu")
        self.gathers = 0

    def gather(self, tensor):
        self.gathers += 1
        return torch.cat([tensor, *(torch.tensor(other, dtype=tensor.dtype) for other in self.others)])


OBSERVATIONS = [
    Observation({"kl": [torch.tensor(1.0)], "clip_ratio/low_min": [torch.tensor(math.nan)]}, rows=3, tokens=10),
    Observation({"kl": [torch.tensor(4.0)], "clip_ratio/low_min": [torch.tensor(0.5)]}, rows=1, tokens=20),
]


def test_token_means_are_weighted_by_tokens_and_minima_are_minima():
    metrics, stats = pool_window(OBSERVATIONS, [PaddingStats(rows=4)], kind_of, Accelerator(cpu=True))
    assert metrics == {"kl": 3.0, "clip_ratio/low_min": 0.5}
    assert stats == [PaddingStats(rows=4)]


def test_over_ranks_in_one_collective():
    # of the other rank: names sorted, (extremum, 0) and (sum of value x weight, weight), then its counts
    counts = [2, 1, 30, 40, 50, 40, 0]
    ranks = Ranks([[0.25, 0.0, 30.0, 30.0, *counts]])
    mine = PaddingStats(1, 1, 10, 20, 50, 20, 0)
    metrics, (stats,) = pool_window(OBSERVATIONS, [mine], kind_of, ranks)
    assert metrics == {"kl": (90 + 30) / 60, "clip_ratio/low_min": 0.25}
    assert stats == PaddingStats(3, 2, 40, 60, 100, 80, 0)
    assert stats.rank_imbalance == pytest.approx(40 / 30)
    assert ranks.gathers == 1


def test_nothing_observed():
    metrics, _ = pool_window([], [PaddingStats()], kind_of, Accelerator(cpu=True))
    assert metrics == {}
    empty = [Observation({"kl": [torch.tensor(0.0)], "x_max": [math.nan]}, rows=2, tokens=0)]
    metrics, _ = pool_window(empty, [PaddingStats()], kind_of, Accelerator(cpu=True))
    assert metrics["kl"] == 0.0 and math.isnan(metrics["x_max"])


def test_the_rank_with_most_groups_decides_and_one_that_keeps_stock_too():
    assert agree_on_groups(lambda: [[(0,), (1,)]], 1, Ranks([[0, 5]])) == Agreement([[(0,), (1,)]], [5])
    assert agree_on_groups(lambda: [[(0,), (1,)]], 1, Ranks([[0, 1]])) == Agreement([[(0,), (1,)]], [2])
    assert agree_on_groups(lambda: [[(0,), (1,)]], 1, Ranks([[1, 0]])).groups is None
    assert agree_on_groups(lambda: None, 1, Ranks([[0, 3]])).groups is None


def test_an_error_on_any_rank_is_an_error_on_all(monkeypatch):
    def fail():
        raise ValueError("mine")

    monkeypatch.setattr(distributed, "gather_object", lambda errors: [*errors, ValueError("theirs")])
    with pytest.raises(ValueError, match="theirs"):
        agree_on_groups(lambda: [[(0,)]], 1, Ranks([[2, 0]]))
    with pytest.raises(ValueError, match="mine"):
        agree_on_groups(fail, 1, Ranks([[0, 1]]))


def test_one_process_does_not_communicate():
    alone = SimpleNamespace(num_processes=1)
    assert agree_on_groups(lambda: [[(0, 1)]], 1, alone) == Agreement([[(0, 1)]], [1])
    assert agree_on_groups(lambda: None, 1, alone) == Agreement(None, [])


def rows_of_two(completion_width=6, **entries):
    mask = torch.ones(2, completion_width, dtype=torch.long)
    batch = {"completion_ids": mask, "completion_mask": mask, "num_items_in_batch": 9, "old": None, **entries}
    return batch, RowTable(4, completion_width, 4 + completion_width, RowLengths((4, 2), (5, 1)), (5, 0))


class Echo:
    """Two ranks that send the same, but for what `change` makes of it on the second."""

    num_processes = 2
    device = torch.device("cpu")

    def __init__(self, change=lambda numbers: numbers):
        self.change = change

    def gather(self, tensor):
        return torch.cat([tensor, torch.tensor(self.change(tensor.tolist()))])


def agreed_table(offered, accelerator, rows=2):
    return agree_on_groups(lambda: [[(0, 1)]], 1, accelerator, offer=lambda: offered, offered_rows=rows).table


def test_the_table_of_all_ranks():
    def other(numbers):
        status, count, signature, *_ = numbers
        return [status, count, signature, 9, 3, 12, 8, 9, 2, 3, 2, 3]

    table = agreed_table(rows_of_two(), Echo(other))
    assert table == RowTable(9, 6, 12, RowLengths((4, 2, 8, 9), (5, 1, 2, 3)), (5, 0, 2, 3))


def test_rows_stay_where_they_are_unless_all_ranks_can_exchange_them():
    def other_signature(numbers):
        return [number + (index == 2) for index, number in enumerate(numbers)]

    assert agreed_table(rows_of_two(), Echo()) is not None
    assert agreed_table(rows_of_two(), Echo(other_signature)) is None
    assert agreed_table(rows_of_two(), Echo(), rows=3) is None  # a rank has not as many rows as it should
    assert agreed_table(rows_of_two(captions=["a", "b"]), Echo()) is None


def test_a_ratio_of_one_column_is_not_taken_for_a_ratio_of_the_row():
    sent = []
    for width in (1, 6):
        agreed_table(
            rows_of_two(width, importance_sampling_ratio=torch.ones(2, 1)), Echo(lambda n: sent.append(n) or n)
        )
    assert sent[0][2] != sent[1][2]


def test_losses_that_keep_rows_on_their_ranks(monkeypatch):
    grpo, luspo = SimpleNamespace(loss_type="grpo"), SimpleNamespace(loss_type="luspo")
    assert "tokens" in why_not_movable(grpo, "tokens")
    assert why_not_movable(grpo, "rows") is None
    for installed, moves in (("1.9.2", False), ("1.10.0", True)):
        monkeypatch.setattr("trl_padmin.compat.version", lambda name, installed=installed: installed)
        assert (why_not_movable(luspo, "rows") is None) == moves
