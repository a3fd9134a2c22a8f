import subprocess
import sys

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, TrlParser

from trl_padmin import (
    PaddingMinimizationMixin,
    PaddingMinimizationOptions,
    PadminGRPOConfig,
    SupervisedPaddingMinimizationMixin,
)
from trl_padmin.config import config_among


CPU = {"use_cpu": True, "bf16": False, "report_to": []}


def test_every_argument_of_trl_keeps_its_place(tmp_path):
    assert PadminGRPOConfig(str(tmp_path), **CPU).output_dir == str(tmp_path)
    config = PadminGRPOConfig(output_dir=str(tmp_path), **CPU)
    assert isinstance(config, GRPOConfig)
    assert config.to_dict().items() >= {"token_budget": None, "padding_minimization": True}.items()


def test_options_are_parsed_from_the_command_line(tmp_path):
    parser = TrlParser(PadminGRPOConfig)
    arguments = ["--output_dir", str(tmp_path), "--token_budget", "4096", "--padding_minimization", "false"]
    (config,) = parser.parse_args_and_config([*arguments, "--use_cpu", "true", "--bf16", "false"])
    assert (config.token_budget, config.padding_minimization) == (4096, False)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"token_budget": 0}, ValueError, "`token_budget`=0"),
        ({"token_budget": -1}, ValueError, "`token_budget`=-1"),
        ({"token_budget": 100.0}, TypeError, "`token_budget`=100.0"),
        ({"token_budget": 32, "pad_to_multiple_of": 64}, ValueError, "`token_budget`=32.*64"),
        ({"overhead_tokens": -1}, ValueError, "`overhead_tokens`=-1"),
        ({"balance_across_ranks": "yes"}, TypeError, "`balance_across_ranks`='yes'"),
        ({"padding_minimization": None}, TypeError, "`padding_minimization`=None"),
    ],
)
def test_bad_options(tmp_path, options, error, words):
    with pytest.raises(error, match=words):
        PadminGRPOConfig(output_dir=str(tmp_path), **CPU, **options)


def test_a_plain_config_has_the_defaults():
    assert PaddingMinimizationOptions.of(None) == PaddingMinimizationOptions()
    assert PaddingMinimizationOptions.of(object()) == PaddingMinimizationOptions()


def test_importing_the_package_loads_neither_torch_nor_trl():
    code = "import sys, trl_padmin; print({'torch', 'trl', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_the_config_is_found_wherever_a_subclass_takes_it(tmp_path):
    config = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert config_among(("model", config), {}) is config
    assert config_among(("model",), {"args": config}) is config
    assert config_among(("model",), {"args": None}) is None


@pytest.mark.parametrize("mixin", [PaddingMinimizationMixin, SupervisedPaddingMinimizationMixin])
def test_options_reach_a_trainer_that_names_no_parameters(mixin, tmp_path):
    class Opaque:
        def __init__(self, *args, **kwargs):
            pass

    class Trainer(mixin, Opaque):
        pass

    config = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    config.padding_minimization, config.token_budget = False, 77
    assert Trainer("model", config)._padding.options.token_budget == 77
