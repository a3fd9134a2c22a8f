"""Where rows and rewards come from changes nothing: streams, generation back ends, several rewards, tools.

Each run is compared with stock TRL's on the same rows. What this does not exercise: vLLM, conversations with tools as
TRL itself runs them (masks of tool tokens are in `test_parity.py`).
"""

import dataclasses
import math

import pytest
from datasets import Dataset
from harness import COMPLETIONS, make_rows, relative_error, reward, run, tiny_model
from trl import GRPOConfig, GRPOTrainer

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer


def compare(arguments, **options):
    """Stock and ours, with other arguments of the trainer than the harness gives."""

    class Changed:
        def __init__(self, **kwargs):
            super().__init__(**kwargs | arguments())

    rows = make_rows(COMPLETIONS * 2, [3, 11, 5, 7] * 4)
    stock = run(type("Stock", (Changed, GRPOTrainer), {}), rows, tiny_model(), **options)
    own = {"config_class": PadminGRPOConfig, "overhead_tokens": 5}
    ours = run(type("Ours", (Changed, PadminGRPOTrainer), {}), rows, tiny_model(), **options, **own)
    assert len(ours.gradients) == len(stock.gradients) > 0
    assert any(gradient.abs().max() > 0 for gradient in stock.gradients[0].values())
    error = max(relative_error(mine, theirs) for mine, theirs in zip(ours.gradients, stock.gradients, strict=True))
    return stock, ours, error


def policy_groups(result):
    return [len(forward["ids"]) for forward in result.forwards if forward["grad"]]


def test_a_streamed_dataset(float64_head):
    def stream():
        return {
            "train_dataset": Dataset.from_dict({"prompt": [str(2 + i % 50) for i in range(64)]}).to_iterable_dataset()
        }

    try:
        stock, ours, error = compare(stream, optimizer_steps=3, beta=0.1, num_iterations=2)
    except NotImplementedError as refused:
        pytest.skip(f"this TRL: {refused}")
    assert error <= 1e-9 and policy_groups(ours) != policy_groups(stock)


def sometimes(completion_ids, **kwargs):
    """Does not apply to every completion."""
    return [None if len(ids) % 2 else float(len(ids)) for ids in completion_ids]


def never(completion_ids, **kwargs):
    return [None] * len(completion_ids)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_several_rewards_some_of_which_do_not_apply(float64_head, aggregation):
    def rewards():
        return {"reward_funcs": [reward, sometimes, never]}

    stock, ours, error = compare(
        rewards, optimizer_steps=2, reward_weights=[1.0, 0.5, 2.0], multi_objective_aggregation=aggregation
    )
    assert error <= 1e-9 and policy_groups(ours) != policy_groups(stock)
    for name in ("rewards/sometimes/mean", "rewards/never/mean", "reward", "reward_std"):
        mine, theirs = (each.logs[0][name] for each in (ours, stock))
        assert mine == theirs or (math.isnan(mine) and math.isnan(theirs))


# By default the cache takes half of the memory.
CONTINUOUS = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
}


@pytest.mark.parametrize("options", [{}, CONTINUOUS], ids=["generate", "continuous"])
def test_the_trainer_generates_by_itself(float64_head, options):
    """Same random state, same completions, same gradients."""
    if options.keys() - {field.name for field in dataclasses.fields(GRPOConfig)}:
        pytest.skip("this TRL has no continuous batching")
    own_generation = {"rollout_func": None}
    stock, ours, error = compare(lambda: own_generation, max_completion_length=24, optimizer_steps=2, **options)
    assert error <= 1e-9
    seen = [
        sorted(
            tuple(ids[mask.bool()].tolist())
            for forward in each.forwards
            if forward["grad"]
            for ids, mask in zip(forward["ids"], forward["mask"], strict=True)
        )
        for each in (stock, ours)
    ]
    assert seen[0] == seen[1] and len({len(row) for row in seen[0]}) > 1
