"""`PadminRLOOTrainer` against stock `RLOOTrainer`: gradients, losses and what is logged.

What this does not exercise: several processes, images; both are the mixin's, which GRPO's tests exercise.
"""

import dataclasses

import pytest
import torch
from harness import COMPLETIONS, make_rows, relative_error, run, tiny_model
from trl import RLOOConfig, RLOOTrainer

from trl_padmin import PadminRLOOConfig, PadminRLOOTrainer, TRLContractError, compat, window


class FedRows:
    """Takes rows from the harness where RLOO, which has no `rollout_func`, would generate them."""

    def __init__(self, *args, rollout_func, **kwargs):
        super().__init__(*args, **kwargs)
        self._rollout = rollout_func

    def _tokenize_prompts(self, prompts):
        self._fed = self._rollout(prompts, self)
        return self._fed["prompt_ids"], None, {}

    def _generate_single_turn(self, *args):
        return self._fed["completion_ids"]


class Stock(FedRows, RLOOTrainer):
    pass


class Ours(FedRows, PadminRLOOTrainer):
    pass


def compare(rows=None, make_model=tiny_model, own=None, **options):
    rows = rows or make_rows()
    own = {"overhead_tokens": 5} if own is None else own
    stock = run(Stock, rows, make_model(), config_class=RLOOConfig, **options)
    return stock, run(Ours, rows, make_model(), config_class=PadminRLOOConfig, **options, **own)


def worst_error(stock, ours):
    assert len(ours.gradients) == len(stock.gradients) > 0
    assert any(gradient.abs().max() > 0 for gradient in stock.gradients[0].values())
    return max(relative_error(mine, theirs) for mine, theirs in zip(ours.gradients, stock.gradients, strict=True))


OPTIONS = {
    "one micro-batch": {"own": {"overhead_tokens": 10_000, "token_budget": 10_000}},
    "every row alone": {"own": {"token_budget": 1, "overhead_tokens": 0}},
    "beta": {"beta": 0.1},
    "num_iterations": {"num_iterations": 2, "learning_rate": 0.5},
    "normalize_advantages": {"normalize_advantages": True, "beta": 0.1},
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "reward_clip_range": {"reward_clip_range": (0.0, 3.0)},
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "steps_per_generation": {"steps_per_generation": 2},
    "steps_per_generation, longer": {"steps_per_generation": 6, "gradient_accumulation_steps": 2},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "temperature": {"temperature": 0.7, "epsilon": 0.001, "num_iterations": 2},
    "mixture of experts, no auxiliary loss": {
        "make_model": lambda: tiny_model("qwen3_moe", output_router_logits=False, router_aux_loss_coef=0.0)
    },
    "hybrid": {"make_model": lambda: tiny_model("mamba2"), "beta": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_and_losses_are_stocks(float64_head, name):
    rows = make_rows(COMPLETIONS * 3, [3, 11, 5, 7, 4, 6] * 4)
    stock, ours = compare(rows, optimizer_steps=2, **OPTIONS[name])
    # Mamba2 scans in float32, and a scan that starts after left padding rounds otherwise
    assert worst_error(stock, ours) <= (1e-6 if name == "hybrid" else 1e-9)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6, abs=1e-6)
    tokens = [sum(forward["ids"].numel() for forward in each.forwards) for each in (stock, ours)]
    assert tokens[1] < 0.9 * tokens[0]


def test_the_auxiliary_loss_keeps_stock_micro_batches(float64_head, caplog):
    if "router_aux_loss_coef" not in {field.name for field in dataclasses.fields(RLOOConfig)}:
        pytest.skip("this TRL has no auxiliary loss")
    stock, ours = compare(make_model=lambda: tiny_model("qwen3_moe", output_router_logits=True), beta=0.1)
    assert worst_error(stock, ours) <= 1e-9
    shapes = [[len(f["ids"]) for f in each.forwards if f["grad"]] for each in (stock, ours)]
    assert shapes[0] == shapes[1]


def test_logged_metrics_are_pooled_over_rows(float64_head):
    """RLOO logs one clip ratio per row. Micro-batches of unequal rows must not weigh alike."""
    options = {"num_iterations": 3, "epsilon": 0.02, "learning_rate": 0.3, "beta": 0.1, "optimizer_steps": 3}
    stock, ours = compare(own={"overhead_tokens": 20}, **options)
    assert {name for log in stock.logs for name in log} <= {name for log in ours.logs for name in log}
    clipped = [log["clip_ratio/region_mean"] for log in stock.logs[:3]]
    assert any(0 < value < 1 for value in clipped)
    for mine, theirs in zip(ours.logs[:3], stock.logs[:3], strict=True):
        for name in theirs:
            if name.startswith("clip_ratio/") and "mean" in name:  # 2 rows in each of stock's micro-batches
                assert mine[name] == pytest.approx(theirs[name], abs=1e-7), name
    sizes = {len(forward["ids"]) for forward in ours.forwards if forward["grad"]}
    assert len(sizes) > 1
    assert compat.ratio_per_row(ours.trainer)


def test_control_naive_mean_is_seen(monkeypatch, float64_head):
    micro_batch = window.MicroBatch
    monkeypatch.setattr(window, "MicroBatch", lambda *args: micro_batch(*args[:4], 1.0))
    assert worst_error(*compare()) > 1e-3


def test_control_lost_old_log_probabilities_are_seen(monkeypatch, float64_head):
    """The old log-probabilities, one per row, follow their rows."""
    select = window.select_rows

    def unmoved(batch, rows):
        return select(batch, rows) | {"old_logps": batch["old_logps"][: len(rows)]}

    monkeypatch.setattr(window, "select_rows", unmoved)
    assert worst_error(*compare(own={"overhead_tokens": 20})) > 1e-3


def test_switched_off_is_stock_bit_for_bit():
    stock, ours = compare(own={"padding_minimization": False}, beta=0.1)
    assert all(torch.equal(mine, stock.gradients[0][name]) for name, mine in ours.gradients[0].items())


def test_contract_is_checked_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(RLOOTrainer, "_prepare_inputs", lambda self, inputs: inputs)
    args = RLOOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    with pytest.raises(TRLContractError, match=r"RLOOTrainer\._prepare_inputs"):
        PadminRLOOTrainer("no/such/model", reward_funcs=len, args=args)
