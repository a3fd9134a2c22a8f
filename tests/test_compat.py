import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from harness import make_rows, run, tiny_model
from trl import GRPOTrainer

from trl_padmin import TRLContractError, compat


def test_contract_holds_for_this_trl():
    compat.check_trainer_class(GRPOTrainer)


def test_contract_error_names_the_missing_member_versions_and_what_to_do():
    class Changed:
        _get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies

    with pytest.raises(TRLContractError, match=r"`Changed\._compute_loss` is missing.*1\.0 to 1\.16.*trl \d"):
        compat.check_trainer_class(Changed)


def test_contract_error_names_a_changed_parameter():
    class Changed(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, tokens, attention_mask, logits_to_keep):
            return None

    with pytest.raises(TRLContractError, match="does not take 'input_ids', 'batch_size', 'compute_entropy'"):
        compat.check_trainer_class(Changed)


@pytest.mark.parametrize("name", compat._ATTRIBUTES)
def test_contract_covers_what_we_read(name):
    trainer = SimpleNamespace(**{attribute: None for attribute in compat._ATTRIBUTES if attribute != name})
    with pytest.raises(TRLContractError, match=name):
        compat.check_trainer(trainer)


def test_contract_of_a_batch():
    trainer = run(GRPOTrainer, make_rows(), tiny_model(), beta=0.1, num_iterations=2).trainer
    compat.check_batch(trainer._buffered_inputs[0])
    with pytest.raises(TRLContractError, match=r"'novel'.*novel, surprise"):
        compat.check_batch(trainer._buffered_inputs[0] | {"surprise": 1, "novel": 2})


def test_metrics_are_captured_without_waiting_and_put_back():
    accelerator = SimpleNamespace(gather=None, reduce=None, num_processes=3)
    trainer = SimpleNamespace(accelerator=accelerator, _metrics={"train": {"kept": [1]}})
    with compat.metrics_captured(trainer) as captured:
        assert trainer.accelerator.num_processes == 3
        total = trainer.accelerator.reduce(torch.tensor([6.0, 2.0]), reduction="sum")
        item = (total[0] / total[1].clamp(min=1.0)).item()
        assert type(item) is torch.Tensor
        trainer._metrics["train"]["kl"].append(item)
        trainer._metrics["train"]["max"].append(trainer.accelerator.gather(torch.tensor([1.0, 5.0])).max().item())
    assert {name: [float(v) for v in values] for name, values in captured.items()} == {"kl": [3.0], "max": [5.0]}
    assert trainer.accelerator is accelerator and trainer._metrics["train"] == {"kept": [1]}


@pytest.mark.parametrize(
    ("name", "token_level", "sequence_level"),
    [
        ("kl", "tokens", "tokens"),
        ("entropy", "tokens", "tokens"),
        ("clip_ratio/region_mean", "tokens", "rows"),
        ("clip_ratio/low_min", "min", "min"),
        ("clip_ratio/high_max", "max", "max"),
        ("cispo_clip_ratio", "tokens", "rows"),
        ("vespo/phi_seq_mean", "rows", "rows"),
    ],
)
def test_how_metrics_are_pooled(name, token_level, sequence_level):
    assert compat.metric_kind(name, sequence_level=False) == token_level
    assert compat.metric_kind(name, sequence_level=True) == sequence_level


def test_gradient_sync_is_deferred_only_in_the_synchronizing_step():
    calls = []

    class State:
        sync_gradients = True
        plugin_kwargs = {}

        def _set_sync_gradients(self, value):
            self.sync_gradients = value
            calls.append(value)

    class NoSync:
        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *_):
            calls.append("exit")

    state = State()
    accelerator = SimpleNamespace(gradient_state=state, no_sync=lambda model: NoSync())
    trainer = SimpleNamespace(accelerator=accelerator, model=torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError), compat.gradient_sync_deferred(trainer, trainer.model):
        raise RuntimeError
    assert calls == [False, "enter", "exit", True]
    state.sync_gradients = False
    with compat.gradient_sync_deferred(trainer, trainer.model):
        assert len(calls) == 4
    state.sync_gradients, state.plugin_kwargs = True, {"sync_each_batch": True}
    with compat.gradient_sync_deferred(trainer, trainer.model):
        assert calls[4:] == [False]


def test_env_prints_versions_for_a_bug_report():
    result = subprocess.run([sys.executable, "-m", "trl_padmin", "env"], capture_output=True, text=True, check=True)
    for name in ("python", "trl", "transformers", "accelerate", "torch", "trl-padmin"):
        assert f"- {name}: " in result.stdout
