"""The examples run as a user would run them, on a tiny model."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from harness import tiny_model, tokenizer


EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model().float().save_pretrained(folder)
    processor = tokenizer()
    processor.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    processor.save_pretrained(folder)
    return str(folder)


def run_script(monkeypatch, name, *argv):
    monkeypatch.setattr(sys, "argv", [name, *argv])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_grpo(monkeypatch, tmp_path, model_folder, capsys):
    options = {
        "model_name_or_path": model_folder,
        "prompts": "8",
        "output_dir": str(tmp_path),
        "max_steps": "1",
        "num_generations": "2",
        "per_device_train_batch_size": "2",
        "gradient_accumulation_steps": "4",
        "max_completion_length": "24",
        "temperature": "3",
        "bf16": "false",
        "gradient_checkpointing": "false",
        "use_cpu": "true",
        "report_to": "none",
        "logging_steps": "1",
        "save_strategy": "steps",
        "token_budget": "128",
    }
    run_script(monkeypatch, "grpo.py", *(word for key, value in options.items() for word in (f"--{key}", value)))
    assert "padding: " in capsys.readouterr().out
    (state,) = tmp_path.glob("checkpoint-*/trainer_state.json")
    log = json.loads(state.read_text())["log_history"][0]
    assert log["padding/forwarded_tokens"] > 0
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "distributed_type"),
    [("multi_gpu", "MULTI_GPU"), ("fsdp2", "FSDP"), ("zero2", "DEEPSPEED"), ("zero3", "DEEPSPEED")],
)
def test_accelerate_reads_its_configs(name, distributed_type):
    config = load_config_from_file(str(EXAMPLES / "accelerate_configs" / f"{name}.yaml"))
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == (distributed_type, 8, "bf16")


def test_the_line_that_changes():
    """The marked import is the only place where the script knows of us."""
    ours = [line for line in (EXAMPLES / "grpo.py").read_text().splitlines() if "trl_padmin" in line]
    assert ours == ["from trl_padmin import GRPOConfig, GRPOTrainer  # the one line that changes"]


def test_quickstart(monkeypatch, tmp_path, model_folder, capsys):
    figures_file = tmp_path / "figures.json"
    options = ["--model", model_folder, "--rows", "8", "--batch_size", "2", "--max_completion_length", "48"]
    names = run_script(monkeypatch, "quickstart.py", *options, "--temperature", "3", "--json", str(figures_file))
    table = json.loads(figures_file.read_text())["figures"]
    printed = capsys.readouterr().out
    assert all(name in printed for name in table)
    passes = [table[f"tokens forwarded, {name}"] for name in ("scoring", "policy")]
    assert all(ours < stock for stock, ours in passes)
    stock_loss, our_loss = table["loss"]
    assert our_loss == pytest.approx(stock_loss, abs=1e-6)
    assert table["largest difference of log-probs"][0] < 1e-4
    # A random model earns no reward, so its gradients are 0; that the figure can be large is shown by hand.
    assert table["relative difference of gradients"][0] < 1e-4
    gradient = {"weight": torch.ones(4)}
    assert names["relative_difference"](gradient, {"weight": torch.full((4,), 1.5)}) == pytest.approx(0.5)


def test_the_readme_shows_the_recorded_quickstart():
    """README's first table is what the script printed for `examples/quickstart.json`."""
    names = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    record = json.loads((EXAMPLES / "quickstart.json").read_text())
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert f"```text\n{names['render'](record['figures'])}\n```" in readme
    tokens = record["completion_tokens"]
    assert f"{len(tokens)} completions of {tokens[0]} to {tokens[-1]} tokens" in readme
