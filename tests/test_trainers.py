"""Trainers other than `GRPOTrainer` behind the mixin: TRL's experimental ones and a user's own.

What this does not exercise: RLOO, which has tests of its own (`test_rloo.py`).
"""

import inspect
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from harness import make_rows, relative_error, run, tiny_model
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from trl_padmin import PaddingMinimizationMixin, PadminGRPOTrainer, compat


try:
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
except ImportError:  # not in every TRL 1.x
    GMPOConfig = GMPOTrainer = None

STAYS = "Rows stay in stock TRL's micro-batches"


def padmin(trainer_class):
    return type(f"Padmin{trainer_class.__name__}", (PaddingMinimizationMixin, trainer_class), {})


def compare(trainer_class, config_class=GRPOConfig, **options):
    """A plain config: our options have their defaults."""
    options = {"beta": 0.1, "num_iterations": 2, "optimizer_steps": 2, "learning_rate": 0.1} | options
    classes = trainer_class, padmin(trainer_class)
    return [run(each, make_rows(), tiny_model(), config_class=config_class, **options) for each in classes]


def worst_error(stock, ours):
    assert len(ours.gradients) == len(stock.gradients) > 0
    assert any(gradient.abs().max() > 0 for gradient in stock.gradients[0].values())
    return max(relative_error(mine, theirs) for mine, theirs in zip(ours.gradients, stock.gradients, strict=True))


def policy_rows(result):
    return [len(forward["ids"]) for forward in result.forwards if forward["grad"]]


def tokens(result):
    return sum(forward["ids"].numel() for forward in result.forwards + result.reference_forwards)


class WorstRow(GRPOTrainer):
    """A loss with a term that is no sum over rows: the least likely completion of a micro-batch."""

    def _compute_loss(self, model, inputs):
        ids, mask = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        logps, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        per_row = (logps * inputs["completion_mask"]).sum(dim=1)
        return super()._compute_loss(model, inputs) + 1e-3 * per_row.min()


class OuterTerm(GRPOTrainer):
    """Adds to the loss where it passes through `compute_loss`."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss * (1 + inputs["advantages"].max() ** 2)


class ArgumentsPassedOn(GRPOTrainer):
    """A subclass that leaves the loss alone and takes any arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


LOSSES_OF_ONES_OWN = {"_compute_loss": WorstRow, "compute_loss": OuterTerm}
LOSSES_OF_ONES_OWN |= {"GMPO": GMPOTrainer} if GMPOTrainer else {}
CONFIGS = {"GMPO": GMPOConfig}


@pytest.mark.parametrize("name", LOSSES_OF_ONES_OWN)
def test_a_loss_that_is_not_trls_keeps_stock_micro_batches_and_says_so_once(float64_head, caplog, name):
    stock, ours = compare(LOSSES_OF_ONES_OWN[name], CONFIGS.get(name, GRPOConfig))
    assert worst_error(stock, ours) <= 1e-9
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6, abs=1e-6)
    assert policy_rows(ours) == policy_rows(stock)
    assert tokens(ours) < 0.9 * tokens(stock)  # scoring passes are regrouped, and padding is cut
    said = [record.getMessage() for record in caplog.records if STAYS in record.getMessage()]
    assert len(said) == 1 and LOSSES_OF_ONES_OWN[name].__name__ in said[0]


def test_experimental_trainers_of_trl_keep_stock_micro_batches_where_they_change_the_loss():
    folder = Path(trl.__file__).parent / "experimental"
    files = [file for file in folder.rglob("*.py") if "(GRPOTrainer)" in file.read_text(encoding="utf-8")]
    assert files
    for file in files:
        module = import_module(".".join(["trl", *file.relative_to(folder.parent).with_suffix("").parts]))
        for trainer_class in vars(module).values():
            if inspect.isclass(trainer_class) and GRPOTrainer in trainer_class.__bases__:
                compat.check_trainer_class(trainer_class)
                is_own = compat.loss_denominator(trainer_class, SimpleNamespace(loss_type="dapo")) is None
                assert is_own == ("_compute_loss" in vars(trainer_class)), trainer_class


def test_a_subclass_that_leaves_the_loss_alone_is_regrouped(float64_head, caplog):
    stock, ours = compare(ArgumentsPassedOn)
    assert worst_error(stock, ours) <= 1e-9
    assert policy_rows(ours) != policy_rows(stock)
    assert not any(STAYS in record.getMessage() for record in caplog.records)


def test_options_reach_a_subclass_that_takes_any_arguments():
    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    args.token_budget = -3
    with pytest.raises(ValueError, match="`token_budget`=-3"):
        padmin(ArgumentsPassedOn)("no/such/model", len, args)


def test_a_loss_type_of_ones_own_is_not_refused(float64_head):
    """TRL's check is asked for TRL's losses only."""

    class Novel(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            self.loss_type, novel = "dapo", self.loss_type
            try:
                return super()._compute_loss(model, inputs)
            finally:
                self.loss_type = novel

    stock, ours = compare(Novel, loss_type="novel")
    assert worst_error(stock, ours) <= 1e-9


@pytest.mark.parametrize("name", LOSSES_OF_ONES_OWN)
def test_control_regrouping_them_is_seen(monkeypatch, float64_head, name):
    monkeypatch.setattr(compat, "why_not_separable", lambda trainer: None)
    monkeypatch.setattr(compat, "loss_denominator", lambda trainer_class, config: "window")
    stock, ours = compare(LOSSES_OF_ONES_OWN[name], CONFIGS.get(name, GRPOConfig), loss_type="dapo")
    assert worst_error(stock, ours) > 1e-3


@pytest.mark.parametrize("order", ["mixin in front", "mixin behind"])
def test_overrides_are_found_on_either_side_of_the_mixin(order):
    class Override:
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    bases = {
        "mixin in front": (PaddingMinimizationMixin, Override, GRPOTrainer),
        "mixin behind": (Override, PadminGRPOTrainer),
    }[order]
    stock = (GRPOTrainer, Trainer)
    assert compat.overriding_class(type("Both", bases, {}), "compute_loss", stock) is Override
    assert compat.overriding_class(PadminGRPOTrainer, "compute_loss", stock) is None
