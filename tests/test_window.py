from itertools import chain

import pytest
import torch

from trl_padmin.layout import RowLengths
from trl_padmin.window import GenerationBatch, Limits, Segment, padding_stats, split_up_to


def stock(steps=3, rows=2, tool_mask=False):
    batches = []
    for step in range(steps):
        completion_mask = torch.tensor([[1] * (1 + step + row) + [0] * (5 - step - row) for row in range(rows)])
        batch = {
            "prompt_ids": 10 * step + torch.arange(rows)[:, None].expand(rows, 4),
            "prompt_mask": torch.tensor([[0] * row + [1] * (4 - row) for row in range(rows)]),
            "completion_ids": completion_mask,
            "completion_mask": completion_mask,
            "num_items_in_batch": torch.tensor(21),
        }
        if tool_mask:
            batch["tool_mask"] = torch.tensor([[0] + [1] * 5] * rows)
        batches.append(batch)
    return batches


def test_lengths_of_a_generation_batch():
    generation = GenerationBatch(stock(tool_mask=True))
    assert generation.lengths[1] == RowLengths((4, 3), (2, 3))
    assert generation.scored_tokens == [[0, 1], [1, 2], [2, 3]]


@pytest.mark.parametrize(
    ("denominator", "groups", "weights"),
    [
        ("window", [[(5, 0, 1), (2,), (3, 4)]], [1.0, 1.0, 1.0]),
        ("rows", [[(5, 0, 1), (2,), (3, 4)]], [1.5, 0.5, 1.0]),
        ("tokens", [[(0,), (1,)], [(1, 0)], [(1,), (0,)]], [1 / 3, 2 / 3, 1.0, 4 / 7, 3 / 7]),
    ],
)
def test_weights_are_shares_of_what_divides_the_loss(denominator, groups, weights):
    segment = Segment(GenerationBatch(stock()), 0, 3, denominator)
    steps = segment.micro_batches(groups)
    micro_batches = list(chain(*steps))
    assert [mb.loss_weight for mb in micro_batches] == pytest.approx(weights)
    assert len(steps) == 3 and all(steps)
    assert sum(mb.scored_tokens for mb in micro_batches) == sum(segment.scored_tokens)


def test_rows_are_those_of_the_segment():
    segment = Segment(GenerationBatch(stock()), 1, 2, "window")
    ((first,), (second,)) = segment.micro_batches([[(3, 0), (2, 1)]])
    assert first.inputs()["prompt_ids"][:, 0].tolist() == [21, 10]
    assert second.inputs()["prompt_ids"][:, 0].tolist() == [20, 11]
    assert (first.lengths, first.scored_tokens) == (RowLengths((3, 4), (4, 2)), 6)


def test_kept_micro_batches_are_stocks_own():
    batches = stock()
    segment = Segment(GenerationBatch(batches), 0, 3, None)
    assert [step[0].inputs() is batch for step, batch in zip(segment.micro_batches(None), batches, strict=True)]
    assert not any(step[0].is_regrouped for step in segment.micro_batches(None))


def test_images_are_seen_and_follow_their_rows():
    batches = stock()
    for index, batch in enumerate(batches):
        batch |= {"num_images": [index, 1], "pixel_values": 10.0 * index + torch.arange(index + 1.0)}
    segment = Segment(GenerationBatch(batches), 0, 3, "rows")
    assert segment.has_images and not Segment(GenerationBatch(stock()), 0, 3, "rows").has_images
    micro_batches = [each for step in segment.micro_batches([[(4, 3), (0,), (5, 2, 1)]]) for each in step]
    values = [each.inputs()["pixel_values"] for each in micro_batches]
    assert [None if v is None else v.tolist() for v in values] == [[20.0, 21.0, 11.0], None, [22.0, 10.0, 0.0]]


def test_a_repeated_row_weighs_nothing():
    segment = Segment(GenerationBatch(stock(1)), 0, 1, "rows")
    ((one, two, repeated),) = segment.micro_batches([[(1,), (0,), (0,)]])
    assert (repeated.loss_weight, repeated.scored_tokens) == (0.0, 0)
    assert (one.loss_weight, two.loss_weight) == (0.5, 0.5)


def test_splitting_halves_what_forwards_most():
    lengths = RowLengths((1,) * 6, (9, 9, 9, 9, 1, 1))
    assert split_up_to(3, [(0, 1, 2, 3), (4, 5)], lengths) == [(0, 1), (2, 3), (4, 5)]
    assert split_up_to(2, [(0, 1, 2, 3), (4, 5)], lengths) == [(0, 1, 2, 3), (4, 5)]
    six = split_up_to(6, [(0, 1, 2, 3, 4, 5)], lengths)
    assert sorted(six) == [(row,) for row in range(6)]


def test_where_rows_run_out_the_shortest_is_repeated():
    assert split_up_to(4, [(0,), (1,)], RowLengths((1, 1), (9, 2))) == [(0,), (1,), (1,), (1,)]


def test_logits_are_capped_where_they_are_held_in_memory():
    """Many rows with short prompts and completions fit the token budget, but their logits may not fit the memory."""
    lengths = RowLengths((4,) * 8, (4,) * 8)
    limits = Limits(token_budget=1000, most_logits=16, overhead_tokens=128, pad_to_multiple_of=None)
    groups = limits.groups(lengths)
    assert sorted(chain(*groups)) == list(range(8))
    assert all(len(group) * 4 <= 16 for group in groups)
    assert len(Limits(1000, None, 128, None).groups(lengths)) == 1
    assert all(len(group) == 1 for group in Limits(1000, 1, 128, None).groups(lengths))


def test_stats_of_groups():
    groups = [RowLengths((3, 2), (5, 1)), RowLengths((1,), (0,))]
    stats = padding_stats(groups, 36, None, 7)
    assert (stats.rows, stats.micro_batches, stats.real_tokens, stats.forwarded_tokens) == (3, 2, 12, 18)
    assert (stats.stock_tokens, stats.oversized_rows) == (36, 1)
    assert padding_stats(groups, 36, 8, None).forwarded_tokens == 24
