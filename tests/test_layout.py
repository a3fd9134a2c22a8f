import pytest
import torch

from trl_padmin import layout
from trl_padmin.layout import RowLengths, TokensFirst, row_lengths


P, C = 6, 5
PROMPTS = (2, 6, 1, 3)
COMPLETIONS = (5, 1, 0, 3)


def left_padded(prompts=PROMPTS, completions=COMPLETIONS):
    """Ids that name their place: row x 100 + position among the row's real tokens; padding is -1."""
    ids = torch.full((len(prompts), P + C), -1)
    mask = torch.zeros_like(ids)
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids[row, P - p : P + c] = 100 * row + torch.arange(p + c)
        mask[row, P - p : P + c] = 1
    return ids, mask


def test_lengths_come_from_the_mask():
    _, mask = left_padded()
    assert row_lengths(mask, C) == RowLengths(PROMPTS, COMPLETIONS)
    assert row_lengths(mask, C).total == (7, 7, 1, 6)


@pytest.mark.parametrize("multiple", [None, 4, 16])
def test_tokens_come_first_and_width_is_the_longest_row(multiple):
    ids, mask = left_padded()
    moved = TokensFirst(mask, C, row_lengths(mask, C), multiple)
    width = {None: 7, 4: 8, 16: 16}[multiple]
    assert moved.attention_mask.shape == moved.apply(ids).shape == (4, width)
    for row, length in enumerate((7, 7, 1, 6)):
        assert moved.apply(ids)[row, :length].tolist() == [100 * row + i for i in range(length)]
        assert moved.attention_mask[row].tolist() == [1] * length + [0] * (width - length)
    assert moved.is_completion.sum(1).tolist() == list(COMPLETIONS)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [0], [1, 2], [3, 0]])
def test_scores_come_back_to_where_they_were(rows):
    ids, mask = left_padded()
    ids, mask = ids[rows], mask[rows]
    moved = TokensFirst(mask, C, row_lengths(mask, C))
    scores = moved.apply(ids)[:, -moved.logits_to_keep :].double()  # the score of a token is its id
    expected = torch.where(mask[:, P:] == 1, ids[:, P:], 0).double()
    assert torch.equal(moved.restore(scores), expected)
    assert 1 <= moved.logits_to_keep < moved.attention_mask.size(1)


def test_fewest_columns_are_scored():
    _, mask = left_padded((2, 5), (5, 2))
    assert TokensFirst(mask, C, row_lengths(mask, C)).logits_to_keep == 5
    _, mask = left_padded((2, 5), (0, 0))
    assert TokensFirst(mask, C, row_lengths(mask, C)).logits_to_keep == 1


def test_gradients_reach_scored_tokens_only_and_a_row_without_any_is_differentiable():
    _, mask = left_padded()
    moved = TokensFirst(mask, C, row_lengths(mask, C))
    scores = torch.zeros(4, moved.logits_to_keep, requires_grad=True)
    moved.restore(scores).sum().backward()
    assert scores.grad.sum(1).tolist() == [float(c) for c in COMPLETIONS]
    _, mask = left_padded((2, 5), (0, 0))
    moved = TokensFirst(mask, C, row_lengths(mask, C))
    scores = torch.ones(2, 1, requires_grad=True)
    moved.restore(scores).sum().backward()
    assert scores.grad.tolist() == [[0.0], [0.0]]


def test_masks_with_holes():
    """A mask need not be one run of ones: a stable sort keeps the order of what is real."""
    ids = torch.arange(8)[None]
    mask = torch.tensor([[0, 1, 0, 1, 1, 0, 1, 1]])
    moved = TokensFirst(mask, 4, row_lengths(mask, 4))
    assert moved.apply(ids)[0].tolist() == [1, 3, 4, 6, 7]
    scores = moved.apply(ids)[:, -moved.logits_to_keep :].double()
    assert moved.restore(scores).tolist() == [[4.0, 0.0, 6.0, 7.0]]


def test_rows_are_picked_from_every_shape():
    batch = {
        "prompt_ids": torch.arange(6).view(3, 2),
        "advantages": torch.tensor([0.1, 0.2, 0.3]),
        "importance_sampling_ratio": torch.tensor([[1.0], [2.0], [3.0]]),
        "num_items_in_batch": torch.tensor(7),
        "tool_mask": None,
    }
    picked = layout.select_rows(batch, (2, 0))
    assert picked["prompt_ids"].tolist() == [[4, 5], [0, 1]]
    assert picked["importance_sampling_ratio"].tolist() == [[3.0], [1.0]]
    assert picked["num_items_in_batch"] == 7 and picked["tool_mask"] is None
    joined = layout.concatenate_rows([batch, batch])
    assert joined["advantages"].shape == (6,) and joined["num_items_in_batch"] == 7
    assert layout.unknown_keys(batch | {"surprise": 1}) == ["surprise"]


def test_a_value_without_one_entry_per_row_is_refused():
    batch = {"prompt_ids": torch.zeros(3, 2), "advantages": torch.zeros(2)}
    with pytest.raises(ValueError, match="`advantages` has 2 entries for 3 rows"):
        layout.concatenate_rows([batch])


def test_groups_are_joined_in_the_order_of_rows():
    groups = [(2, 0), (1,), (1,)]
    scores = [[torch.tensor([[2.0], [0.0]]), None], [torch.tensor([[1.0]]), None], [torch.tensor([[9.0]]), None]]
    logps, nothing = layout.restore_rows(scores, groups)
    assert logps.tolist() == [[0.0], [1.0], [2.0]] and nothing is None
