"""Gradients and logged losses equal stock TRL's, for every option of TRL that touches the update.

Each configuration trains a float64 model without dropout on the same rows, once with the unmodified `GRPOTrainer` and
once with ours, and compares every gradient before every optimizer step. The negative controls at the end break one
thing at a time and must be seen.

What this does not exercise: several processes (`test_ranks.py`), low precision (`test_trainer.py`), images.
"""

import dataclasses
import math
from types import SimpleNamespace

import harness
import pytest
import torch
import trl
from harness import COMPLETIONS, Row, compare, make_rows, relative_error, run, tiny_model
from packaging.version import Version
from reference import RowAloneGRPOTrainer
from trl import GRPOConfig, GRPOTrainer

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer, compat, window
from trl_padmin.layout import TokensFirst


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LIMIT = 1e-9  # relative to the largest gradient; observed errors are around 1e-15
LOGGED_LIMIT = 1e-6  # `Trainer` sums the logged loss in float32

FIELDS = {field.name for field in dataclasses.fields(GRPOConfig)}
worst_errors: dict[str, float] = {}


def needs(*names):
    """Skips where this TRL release does not have an option yet."""
    missing = [name for name in names if name not in FIELDS]
    return pytest.mark.skipif(bool(missing), reason=f"this TRL has no {', '.join(missing)}")


def check(request, stock, ours, *, limit=LIMIT):
    assert len(ours.gradients) == len(stock.gradients) > 0
    errors = [relative_error(mine, theirs) for mine, theirs in zip(ours.gradients, stock.gradients, strict=True)]
    worst_errors[request.node.name] = max(errors)
    assert max(errors) <= limit, errors
    assert any(gradient.abs().max() > 0 for gradient in stock.gradients[0].values())
    assert ours.losses == pytest.approx(stock.losses, rel=LOGGED_LIMIT, abs=LOGGED_LIMIT)


@pytest.fixture(scope="module")
def truth_cache():
    return {}


@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_loss(request, float64_head, truth_cache, loss_type, beta, level, groups):
    """C01: every loss, with one, three and eight micro-batches for the eight rows of a window."""
    options = {
        "loss_type": loss_type,
        "beta": beta,
        "importance_sampling_level": level,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "num_iterations": 2,
        "optimizer_steps": 2,
    }
    if loss_type == "luspo" and (level == "token" or beta) and Version(trl.__version__) < Version("1.10"):
        pytest.skip("before TRL 1.10 luspo without sequence level trains on pad tokens in stock")
    key = (loss_type, beta, level)
    if key not in truth_cache:
        truth_cache[key] = run(GRPOTrainer, make_rows(), tiny_model(), **options)
    own = {1: {"overhead_tokens": 10_000}, 3: {"overhead_tokens": 30}, 8: {"token_budget": 1, "overhead_tokens": 0}}
    ours = run(PadminGRPOTrainer, make_rows(), tiny_model(), config_class=PadminGRPOConfig, **options, **own[groups])
    check(request, truth_cache[key], ours)
    policy_forwards = [forward for forward in ours.forwards if forward["grad"]]
    if groups == 1 and compat.holds_logits_in_memory():  # one group would hold more logits than stock's
        groups = 2
    assert len(policy_forwards) == 2 * groups


SCHEDULES = [(2, 4), (2, 6), (4, 4), (1, 4), (4, 2), (4, 1), (4, 3), (3, 2), (2, 5)]


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo"])
@pytest.mark.parametrize(("accumulation", "per_generation"), SCHEDULES)
@pytest.mark.parametrize("iterations", [1, 2])
def test_schedule(request, float64_head, loss_type, accumulation, per_generation, iterations):
    """C10: windows shorter, longer and other than a generation batch; rows stay in their own window."""
    stock, ours = compare(
        make_rows(COMPLETIONS * 3, [3, 11, 5, 7, 4, 6] * 4),
        tiny_model,
        loss_type=loss_type,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation,
        num_iterations=iterations,
        optimizer_steps=4,
        overhead_tokens=5,
    )
    check(request, stock, ours)
    assert rows_per_window(stock, accumulation) == rows_per_window_of_plan(ours, stock, accumulation)


def real_rows(forwards):
    return [
        tuple(ids[mask.bool()].tolist())
        for forward in forwards
        for ids, mask in zip(forward["ids"], forward["mask"], strict=True)
    ]


def rows_per_window(stock, accumulation):
    """The rows of each optimizer step, as the model saw them."""
    policy = [forward for forward in stock.forwards if forward["grad"]]
    return [sorted(real_rows(policy[i : i + accumulation])) for i in range(0, len(policy), accumulation)]


def rows_per_window_of_plan(ours, stock, accumulation):
    windows, seen = [], real_rows([forward for forward in ours.forwards if forward["grad"]])
    for rows in rows_per_window(stock, accumulation):
        windows.append(sorted(seen[: len(rows)]))
        seen = seen[len(rows) :]
    assert not seen
    return windows


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_short_last_window_of_an_epoch(request, float64_head, loss_type):
    stock, ours = compare(
        make_rows(COMPLETIONS * 2, [3, 11, 5, 7] * 4),
        tiny_model,
        loss_type=loss_type,
        steps_per_generation=1,
        optimizer_steps=-1,
        num_train_epochs=2,
        dataset_size=6,
        overhead_tokens=5,
    )
    assert len(stock.gradients) == 4  # windows of 4 and 2 steps, twice
    check(request, stock, ours)


OPTIONS = {
    "mask_truncated_completions": {"mask_truncated_completions": True},
    "delta": {"delta": 1.5, "num_iterations": 2, "optimizer_steps": 2, "learning_rate": 0.5},
    "use_bias_correction_kl": {"use_bias_correction_kl": True, "beta": 0.1, "num_iterations": 2, "optimizer_steps": 2},
    "off_policy_mask_threshold": {"off_policy_mask_threshold": 0.01, "num_iterations": 2, "optimizer_steps": 2},
    "top_entropy_quantile": {"top_entropy_quantile": 0.5},
    "entropy_coef": {"entropy_coef": 0.1, "optimizer_steps": 2},
    "use_adaptive_entropy": {
        "use_adaptive_entropy": True,
        "entropy_target": 5.0,
        "entropy_coef": 0.05,
        "entropy_coef_delta": 0.05,
        "optimizer_steps": 4,
    },
    "pad_to_multiple_of": {"pad_to_multiple_of": 8},
    "temperature": {"temperature": 0.7},
    "gradient_checkpointing, not reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "gradient_checkpointing, reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "num_generations": {"num_generations": 8},
    "scale_rewards": {"scale_rewards": "batch"},
    "max_grad_norm": {"max_grad_norm": 0.1, "optimizer_steps": 2},
    "epsilon": {"epsilon": 0.001, "epsilon_high": 0.002, "num_iterations": 3, "optimizer_steps": 3},
}


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
@pytest.mark.parametrize("name", OPTIONS)
def test_option(request, float64_head, name, loss_type):
    options = OPTIONS[name]
    if options.keys() - FIELDS - {"optimizer_steps"}:
        pytest.skip(f"this TRL has no {name}")
    stock, ours = compare(make_rows(), tiny_model, loss_type=loss_type, overhead_tokens=5, **options)
    check(request, stock, ours)
    tokens = [sum(f["ids"].numel() for f in each.forwards) for each in (stock, ours)]
    assert tokens[1] < 0.9 * tokens[0]


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo"])
@pytest.mark.parametrize("position", ["middle", "end", "everywhere", "truncated"])
def test_tool_masks(request, float64_head, loss_type, position):
    """C28: tool tokens are attended to and not trained on, also where a row ends in them."""
    rows = []
    for index, row in enumerate(make_rows((8, 6, 17, 20, 5, 9, 9, 40))):
        mask = [1] * len(row.completion)
        zeros = {"middle": slice(2, 4), "end": slice(3, None), "everywhere": slice(None), "truncated": slice(1, 3)}
        if index % 2 == 0 or position == "middle":
            mask[zeros[position]] = [0] * len(mask[zeros[position]])
        rows.append(dataclasses.replace(row, env_mask=tuple(mask)))
    stock, ours = compare(
        rows,
        tiny_model,
        loss_type=loss_type,
        overhead_tokens=5,
        mask_truncated_completions=position == "truncated",
    )
    check(request, stock, ours)
    for forward in ours.forwards:  # tokens first, then padding: no hole where the tool wrote
        assert (forward["mask"].diff(dim=1) <= 0).all()
    if position != "truncated":
        whole = sorted(row.prompt + row.completion for row in rows)
        assert sorted(real_rows([f for f in ours.forwards if f["grad"]])) == whole


IMPORTANCE_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@needs("vllm_importance_sampling_mode", "vllm_importance_sampling_correction")
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "vespo", "bnpo"])
@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_sampler_importance_ratio(request, float64_head, mode, loss_type):
    """C23: ratios of shape (B, C) and (B, 1), and a NaN sampling log-probability."""
    if loss_type == "vespo" and mode.startswith("sequence"):
        pytest.skip("TRL refuses vespo with a sequence-level ratio")
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in make_rows():
        logprobs = (-4 + 0.3 * torch.randn(len(row.completion), generator=generator)).tolist()
        rows.append(dataclasses.replace(row, logprobs=tuple(logprobs)))
    rows[2] = dataclasses.replace(rows[2], logprobs=(float("nan"), *rows[2].logprobs[1:]))

    def pretend_vllm(trainer):
        trainer.use_vllm = True
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer._last_loaded_step = -1

    stock, ours = compare(
        rows,
        tiny_model,
        loss_type=loss_type,
        vllm_importance_sampling_mode=mode,
        off_policy_mask_threshold=0.05,
        prepare=pretend_vllm,
        overhead_tokens=5,
    )
    if any(gradient.isnan().any() for gradient in stock.gradients[0].values()):
        pytest.skip("this TRL lets a NaN sampling log-probability into its loss")
    check(request, stock, ours)
    ratio = ours.batches[0]["importance_sampling_ratio"]
    assert ratio.size(1) == (1 if mode.startswith("sequence") else max(COMPLETIONS))
    if loss_type == "vespo":
        phi = [run_.logs[0]["vespo/phi_seq_mean"] for run_ in (ours, stock)]
        assert phi[0] == pytest.approx(phi[1], rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_new_adapter(request, float64_head, beta):
    """C32 (a): the reference is the base model."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    stock, ours = compare(
        make_rows(),
        tiny_model,
        beta=beta,
        overhead_tokens=5,
        num_iterations=2,
        optimizer_steps=2,
        trainer_kwargs={"peft_config": config},
    )
    check(request, stock, ours)
    assert all("lora" in name for name in ours.gradients[0])


def retrained_adapter():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(), config, autocast_adapter_dtype=False)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def test_retrained_adapter(request, float64_head):
    """C32 (b): the reference is the initial adapter, so the first KL is 0, and its copy stays untouched."""
    stock, ours = compare(make_rows(), retrained_adapter, beta=0.1, overhead_tokens=5, optimizer_steps=2)
    check(request, stock, ours)
    assert ours.logs[0]["kl"] == pytest.approx(0.0, abs=1e-12)
    assert stock.logs[0]["kl"] == pytest.approx(0.0, abs=1e-12)
    assert ours.logs[1]["kl"] > 1e-9
    assert ours.trainer.model.active_adapter == "default"


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_mixture_of_experts(request, float64_head, loss_type, coef):
    """C27: without the auxiliary loss rows are regrouped; with it stock's micro-batches stay."""
    options = {"router_aux_loss_coef": coef} if "router_aux_loss_coef" in FIELDS else {}
    if coef and not options:
        pytest.skip("this TRL has no auxiliary loss")
    stock, ours = compare(
        make_rows(),
        lambda: tiny_model("qwen3_moe", output_router_logits=bool(coef), router_aux_loss_coef=coef),
        loss_type=loss_type,
        overhead_tokens=5,
        beta=0.1,
        **options,
    )
    check(request, stock, ours)
    shapes = [[len(f["ids"]) for f in each.forwards if f["grad"]] for each in (stock, ours)]
    assert (shapes[0] == shapes[1]) == bool(coef)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_hybrid_model(request, float64_head, loss_type):
    """Jamba, against each row alone; its scan computes in float32."""
    options = {"router_aux_loss_coef": 0.0} if "router_aux_loss_coef" in FIELDS else {}
    options |= {"loss_type": loss_type, "beta": 0.1, "num_iterations": 2, "optimizer_steps": 2}
    truth = run(RowAloneGRPOTrainer, make_rows(), tiny_model("jamba"), **options)
    stock, ours = compare(make_rows(), lambda: tiny_model("jamba"), overhead_tokens=5, **options)
    check(request, truth, ours, limit=1e-7)
    assert len(stock.gradients) == len(ours.gradients)


@pytest.mark.parametrize("model_type", ["gpt2", "opt", "bloom", "gemma2", "granite", "mamba", "mamba2"])
def test_each_row_alone_is_the_truth(request, float64_head, model_type):
    """C04, C12, C41: also where stock's left padding shifts absolute positions or leaks into a state."""
    stock, ours = compare(make_rows(), lambda: tiny_model(model_type), overhead_tokens=5, temperature=0.7)
    truth = run(RowAloneGRPOTrainer, make_rows(), tiny_model(model_type), temperature=0.7)
    ours_error = relative_error(ours.gradients[0], truth.gradients[0])
    stock_error = relative_error(stock.gradients[0], truth.gradients[0])
    worst_errors[request.node.name] = ours_error
    assert ours_error <= 1e-7
    assert ours_error <= stock_error + 1e-9 or math.isnan(stock_error)  # NaN: queries of left padding see no key
    assert all("position_ids" not in forward["names"] for forward in ours.forwards)


@pytest.mark.parametrize("layout", ["middle", "first", "last"])
@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_pad_id_inside_rows(request, float64_head, layout, pad_is_eos):
    """C14: padding is told from the masks; the pad id may stand anywhere in a prompt or completion."""
    pad = harness.EOS if pad_is_eos else harness.PAD
    place = {"middle": 1, "first": 0, "last": -1}[layout]
    rows = []
    for row in make_rows():
        prompt, completion = list(row.prompt), list(row.completion)
        prompt[place] = completion[place if len(completion) > 1 else 0] = pad
        rows.append(Row(tuple(prompt), tuple(completion)))
    stock, ours = compare(rows, tiny_model, pad_is_eos=pad_is_eos, overhead_tokens=5)
    check(request, stock, ours)
    seen = sorted(real_rows([forward for forward in ours.forwards if forward["grad"]]))
    assert seen == sorted(row.prompt + row.completion for row in rows)


@pytest.mark.parametrize("completions", [(3, 0, 5, 0, 2, 2, 1, 4), (3, 5, 0, 0, 0, 0, 0, 0)])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo"])
def test_empty_completions(request, float64_head, loss_type, completions):
    """C39: rows without a completion, alone or a micro-batch of nothing else."""
    rows = make_rows(completions)

    try:
        stock = run(GRPOTrainer, rows, tiny_model(), loss_type=loss_type)
    except IndexError:  # TRL looks at the last token of each completion
        pytest.skip("this TRL raises on an empty completion")
    ours = run(
        PadminGRPOTrainer,
        rows,
        tiny_model(),
        config_class=PadminGRPOConfig,
        loss_type=loss_type,
        token_budget=20,
        overhead_tokens=0,
    )
    check(request, stock, ours)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_completion_masked(float64_head, loss_type):
    """A window without a scored token: loss and gradients are 0 and finite."""
    rows = [dataclasses.replace(row, completion=(*row.completion[:-1], 9)) for row in make_rows()]
    _, ours = compare(
        rows, tiny_model, loss_type=loss_type, mask_truncated_completions=True, beta=0.1, overhead_tokens=5
    )
    assert ours.losses == [0.0]
    assert all(torch.equal(g, torch.zeros_like(g)) for g in ours.gradients[0].values())
    assert {forward["ids"].size(1) for forward in ours.forwards} <= set(harness.PROMPTS)


# Negative controls: each breaks one thing that the equalities above rest on.


def broken_run(monkeypatch, breakage, **options):
    breakage(monkeypatch)
    rows = make_rows()
    stock, ours = compare(rows, tiny_model, overhead_tokens=5, **options)
    return relative_error(ours.gradients[0], stock.gradients[0])


def reweighted(monkeypatch, weight):
    micro_batch = window.MicroBatch

    def build(batch, rows, lengths, scored_tokens, loss_weight=1.0):
        return micro_batch(batch, rows, lengths, scored_tokens, weight(loss_weight, rows))

    monkeypatch.setattr(window, "MicroBatch", build)


def unweighted(monkeypatch):
    reweighted(monkeypatch, lambda weight, rows: 1.0)


def overweighted(monkeypatch):
    reweighted(monkeypatch, lambda weight, rows: 1.01 * weight if 0 in rows else weight)


def lost_first_token(monkeypatch):
    restore = TokensFirst.restore
    monkeypatch.setattr(TokensFirst, "restore", lambda self, scores: restore(self, scores) * (torch.arange(40) > 0))


def lost_micro_batch(monkeypatch):
    micro_batches = window.Segment.micro_batches

    def lose_one(self, groups):
        steps = micro_batches(self, groups)
        return [[step[0]] for step in steps]

    monkeypatch.setattr(window.Segment, "micro_batches", lose_one)


@pytest.mark.parametrize("loss_type", ["grpo", "sapo", "dr_grpo", "luspo", "bnpo"])
def test_control_naive_denominator_is_seen(monkeypatch, float64_head, loss_type):
    assert broken_run(monkeypatch, unweighted, loss_type=loss_type, importance_sampling_level="sequence") > 1e-3


@pytest.mark.parametrize("loss_type", LOSSES)
def test_control_one_percent_is_seen(monkeypatch, float64_head, loss_type):
    assert broken_run(monkeypatch, overweighted, loss_type=loss_type) > 1e-4


@pytest.mark.parametrize("name", ["top_entropy_quantile", "pad_to_multiple_of", "mask_truncated_completions"])
def test_control_lost_token_is_seen(monkeypatch, float64_head, name):
    assert broken_run(monkeypatch, lost_first_token, **OPTIONS[name]) > 1e-3


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
def test_control_lost_rows_are_seen(monkeypatch, float64_head, loss_type):
    assert broken_run(monkeypatch, lost_micro_batch, loss_type=loss_type) > 1e-3


def test_control_left_padding_is_seen(monkeypatch, float64_head):
    """The oracle is not blind: stock's layout on absolute positions is far from each row alone."""
    truth = run(RowAloneGRPOTrainer, make_rows(), tiny_model("gpt2"))
    stock = run(GRPOTrainer, make_rows(), tiny_model("gpt2"))
    assert relative_error(stock.gradients[0], truth.gradients[0]) > 1e-2
