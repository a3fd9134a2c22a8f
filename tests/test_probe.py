"""The probe tells layouts apart, on a model of one's own, in the trainer and on the command line."""

import math

import pytest
import torch
import transformers
from harness import make_rows, run, tiny_config, tiny_model

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer, probe
from trl_padmin.__main__ import main
from trl_padmin.probe import LayoutError, batch_dependent_rope, probe_architecture, why_scores_are_in_doubt


def jamba(dtype=torch.float64):
    return tiny_model("jamba", dtype, mamba_proj_bias=True)


@pytest.mark.parametrize(
    ("make", "stock_is_right"),
    [(lambda: tiny_model("qwen2"), True), (lambda: tiny_model("gpt2"), False), (jamba, False)],
)
def test_layouts_are_told_apart(make, stock_is_right):
    found = probe_architecture(make(), gradients=True)
    assert found.is_right(found.tokens_first) and found.tokens_first.gradient < 1e-6
    assert found.is_right(found.left_padded) == stock_is_right
    assert (found.left_padded.gradient > 1e-2) == (not stock_is_right)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.5), (torch.float16, 0.1)])
def test_precision_sets_the_limit(dtype, limit):
    found = probe_architecture(tiny_model("gpt2", dtype))
    assert found.limit == limit and found.dtype is dtype
    assert found.is_right(found.tokens_first) and not found.is_right(found.left_padded)
    assert ("float32 shows them" in str(found)) == (dtype is not torch.float32)


def test_a_precision_without_a_limit_is_refused():
    with pytest.raises(ValueError, match=r"float8_e4m3fn; load it in one of float64, float32"):
        probe_architecture(tiny_model().to(torch.float8_e4m3fn))


@pytest.mark.parametrize(("ends", "special"), [([1, 7], {1, 7, 60}), (1, {1, 60}), (None, {60})])
def test_models_with_several_end_tokens_and_models_without_a_pad_token(ends, special):
    model = tiny_model("qwen2", eos_token_id=ends, pad_token_id=None)
    found = probe_architecture(model)
    assert found.is_right(found.tokens_first)
    assert probe._special_ids(model.config.to_dict() | {"image_token_index": 60}) == special


def test_an_adapter_is_probed_with_its_model():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    found = probe_architecture(peft.get_peft_model(tiny_model("gpt2"), config, autocast_adapter_dtype=False))
    assert found.is_right(found.tokens_first) and not found.is_right(found.left_padded)


def test_the_model_is_left_as_it_was():
    model = tiny_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    probe_architecture(model, gradients=True)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_control_a_wrong_layout_is_called_wrong(monkeypatch):
    monkeypatch.setattr(probe, "_tokens_first", lambda *args: probe._left_padded(*args) + 2e-6)
    found = probe_architecture(tiny_model("qwen2"))
    assert not found.is_right(found.tokens_first)
    assert "tokens first (trl_padmin)  WRONG" in str(found)
    assert not found.is_right(LayoutError(math.nan))


def test_trainer_option(capsys, caplog):
    options = {"config_class": PadminGRPOConfig, "probe": True}
    run(PadminGRPOTrainer, make_rows(), tiny_model("gpt2"), **options)
    printed = capsys.readouterr().out
    assert "GPT2LMHeadModel in float64" in printed
    assert "left-padded (stock TRL)    WRONG" in printed and "tokens first (trl_padmin)  right" in printed
    assert not caplog.records
    run(PadminGRPOTrainer, make_rows(), tiny_model("gpt2"), config_class=PadminGRPOConfig)
    assert "GPT2LMHeadModel" not in capsys.readouterr().out


def test_trainer_warns_where_no_layout_is_right(monkeypatch, caplog):
    monkeypatch.setattr(probe, "_tokens_first", lambda *args: probe._left_padded(*args) + 1)
    run(PadminGRPOTrainer, make_rows(), tiny_model("gpt2"), config_class=PadminGRPOConfig, probe=True)
    assert [r.getMessage() for r in caplog.records if "does not score rows as if they were alone" in r.getMessage()]


def test_the_probe_does_not_change_the_run():
    runs = [
        run(PadminGRPOTrainer, make_rows(), tiny_model(), config_class=PadminGRPOConfig, probe=on)
        for on in (False, True)
    ]
    assert all(torch.equal(value, runs[1].gradients[0][name]) for name, value in runs[0].gradients[0].items())


def test_command(tmp_path, capsys):
    tiny_model("gpt2", torch.float32).save_pretrained(tmp_path)
    assert main(["probe", str(tmp_path), "--dtype", "float64"]) == 0
    printed = capsys.readouterr().out
    assert "GPT2LMHeadModel in float64, 4 rows of 11 to 22 tokens" in printed
    assert printed.count("WRONG") == 1


def test_command_has_a_status_of_its_own(tmp_path, capsys, monkeypatch):
    tiny_model("qwen2", torch.float32).save_pretrained(tmp_path)
    monkeypatch.setattr(probe, "_tokens_first", lambda *args: probe._left_padded(*args) + 1)
    assert main(["probe", str(tmp_path)]) == 1
    assert "WRONG" in capsys.readouterr().out


# What a config tells


def config_of(model_type, **fields):
    return transformers.AutoConfig.for_model(model_type, **fields)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (config_of("bert"), "`is_decoder`=False"),
        (config_of("xlm"), "`causal`=False"),
        (config_of("xlnet"), "`model_type`='xlnet'"),
        (config_of("gemma3_text", use_bidirectional_attention=True), "`use_bidirectional_attention`=True"),
        (config_of("reformer"), "sorts all tokens"),
        (config_of("bert", is_decoder=True), None),
        (config_of("gpt_neox"), None),
        (config_of("gemma3_text"), None),
        (config_of("qwen2"), None),
        (config_of("qwen2_5_vl"), None),
    ],
)
def test_models_whose_scores_are_in_doubt(config, words):
    reason = why_scores_are_in_doubt(config)
    assert reason is None if words is None else words in reason


LONG = {"long_factor": [1.0] * 4, "short_factor": [2.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, ("dynamic", 512)),
        ({"rope_type": "longrope", **LONG}, ("longrope", 16)),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "default"}, None),
    ],
)
def test_rotary_embeddings_that_depend_on_the_batch(parameters, expected):
    config = tiny_config("qwen2", rope_parameters=parameters | {"rope_theta": 10000.0})
    assert batch_dependent_rope(config) == expected
    assert batch_dependent_rope(config_of("gemma3_text")) is None
    assert batch_dependent_rope(config_of("mamba")) is None


@pytest.mark.parametrize(("context", "warnings"), [(16, 1), (64, 0)])
def test_rows_beyond_the_context_are_warned_of_once(caplog, context, warnings):
    """Completions of up to 40 tokens, in several micro-batches and two optimizer steps."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("qwen2", torch.float32, rope_parameters=rope, max_position_embeddings=context)
    transformers.utils.logging.get_logger("trl_padmin.trainer").warning_once.__func__.cache_clear()
    run(PadminGRPOTrainer, make_rows(), model, config_class=PadminGRPOConfig, optimizer_steps=2, overhead_tokens=0)
    said = [record.getMessage() for record in caplog.records if "`rope_type`='dynamic'" in record.getMessage()]
    assert len(said) == warnings
    assert all(f"longer than {context} tokens" in message for message in said)


def test_a_model_that_is_not_causal_is_warned_of_once(caplog):
    model = tiny_model("bert", torch.float32)
    run(PadminGRPOTrainer, make_rows(), model, config_class=PadminGRPOConfig, optimizer_steps=2)
    said = [record.getMessage() for record in caplog.records if record.name == "trl_padmin.trainer"]
    assert len(said) == 1 and "`is_decoder`=False" in said[0]
