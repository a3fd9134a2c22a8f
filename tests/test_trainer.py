"""What the trainer promises beyond equal gradients: tokens, memory, waiting, logs, options, errors, checkpoints."""

import contextlib
import dataclasses
import math
import random
from collections import Counter

import harness
import pytest
import torch
import transformers
from datasets import Dataset
from harness import compare, in_float64_throughout, make_rows, relative_error, run, tiny_model
from reference import log_probs_of_each_row_alone
from test_parity import FIELDS, needs
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import trl_padmin.trainer
from trl_padmin import PaddingStats, PadminGRPOConfig, PadminGRPOTrainer, TRLContractError, compat


def ours(rows=None, model=None, **options):
    model = model or tiny_model()
    return run(PadminGRPOTrainer, rows or make_rows(), model, config_class=PadminGRPOConfig, **options)


def passes(result):
    """Forwards of the reference pass, the old-policy pass and the policy pass."""
    old = [forward for forward in result.forwards if not forward["grad"]]
    return {
        "reference": result.reference_forwards,
        "old": old,
        "policy": [forward for forward in result.forwards if forward["grad"]],
    }


def forwarded(forwards):
    return sum(forward["ids"].numel() for forward in forwards)


def real(forwards):
    return sum(int(forward["mask"].sum()) for forward in forwards)


# Tokens and memory


def test_64_rows_with_one_outlier_forward_almost_no_padding():
    """GSM8K-like lengths, scaled by 1/10, counted by a hook on the model: at most 1.05 forwarded per real token."""
    rng = random.Random(0)
    prompts = [max(2, int(20 * rng.lognormvariate(0, 0.25))) for _ in range(64)]
    completions = [max(2, int(70.7 * rng.lognormvariate(0, 0.27))) for _ in range(64)]
    completions[17] = 800
    rows = make_rows(completions, prompts)
    options = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 8,
        "num_generations": 8,
        "max_completion_length": 900,
        "beta": 0.1,
        "num_iterations": 2,
    }
    model = {"dtype": torch.float32, "max_position_embeddings": 1024}
    stock = run(GRPOTrainer, rows, tiny_model(**model), **options)
    result = ours(rows, tiny_model(**model), overhead_tokens=13, **options)
    for name, forwards in passes(result).items():
        assert real(forwards) == sum(prompts) + sum(completions), name
        assert forwarded(forwards) <= 1.05 * real(forwards), name
        assert forwarded(passes(stock)[name]) >= 6 * real(forwards), name  # negative control: the figure can be high


@pytest.mark.parametrize(("longest_rows", "most_waste"), [(1, 0.06), (2, 0.06), (4, 0.06)])
def test_waste_of_a_log_normal_batch(longest_rows, most_waste):
    """C19: every pass stays below what a greedy fill of one longest row reaches (4 to 6 %), at any budget."""
    rng = random.Random(1)
    completions = [min(400, max(2, int(40 * rng.lognormvariate(0, 1)))) for _ in range(63)] + [400]
    rows = make_rows(completions, [rng.randint(2, 12) for _ in completions])
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 16,
        "num_generations": 4,
        "max_completion_length": 400,
        "beta": 0.1,
        "num_iterations": 2,
    }
    stock, result = compare(
        rows,
        lambda: tiny_model(dtype=torch.float32),
        token_budget=longest_rows * 412,
        overhead_tokens=0,
        **options,
    )
    for name, forwards in passes(result).items():
        waste = [1 - real(each) / forwarded(each) for each in (forwards, passes(stock)[name])]
        assert waste[0] <= most_waste < 0.75 <= waste[1], (name, waste)


def test_no_micro_batch_is_larger_than_stocks_by_default():
    rng = random.Random(1)
    for seed in range(5):
        completions = [rng.randint(1, 40) for _ in range(16)]
        rows = make_rows(completions, [rng.randint(2, 12) for _ in range(16)], seed=seed)
        options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "beta": 0.1}
        stock, result = compare(rows, tiny_model, overhead_tokens=rng.choice([0, 5, 1000]), **options)
        most = max(forward["ids"].numel() for forward in stock.forwards)
        assert all(forward["ids"].numel() <= most for forward in result.forwards + result.reference_forwards)


def test_token_budget_is_a_cap_and_oversized_rows_run_alone(monkeypatch):
    warnings = []
    monkeypatch.setattr(trl_padmin.trainer.logger, "warning_once", warnings.append)
    result = ours(token_budget=30, overhead_tokens=0, beta=0.1)
    for forward in result.forwards + result.reference_forwards:
        rows, width = forward["ids"].shape
        assert rows * width <= 30 or rows == 1
    assert {row.prompt + row.completion for row in make_rows()} == {
        tuple(ids[mask.bool()].tolist())
        for forward in passes(result)["policy"]
        for ids, mask in zip(forward["ids"], forward["mask"], strict=True)
    }
    assert result.logs[0]["padding/oversized_rows"] == 1  # 7 + 40 tokens
    assert warnings and all("`token_budget`=30" in warning for warning in warnings)
    assert result.trainer.padding_stats.oversized_rows == 2  # once scored, once trained on


def test_equal_lengths_run_as_stock_does():
    """Nothing to gain: as many forwards of the same shape."""
    stock, result = compare(make_rows([9] * 8, [5] * 8), tiny_model, beta=0.1)
    for mine, theirs in ((result.forwards, stock.forwards), (result.reference_forwards, stock.reference_forwards)):
        assert [f["ids"].shape for f in mine] == [f["ids"].shape for f in theirs]


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_an_update_waits_for_the_device_no_more_often_than_stock(monkeypatch, beta):
    """Counts `item`, `tolist` and `cpu` of tensors, in scoring and in the update; also with more micro-batches."""
    counts = Counter()
    for name in ("item", "tolist", "cpu"):
        method = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _method=method, **kwargs):
            counts[_name] += 1
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    options = {"beta": beta, "num_iterations": 2, "optimizer_steps": 2}
    run(GRPOTrainer, make_rows(), tiny_model(), **options)
    stock = counts.total()
    counts.clear()
    result = ours(overhead_tokens=0, token_budget=40, **options)
    assert len(passes(result)["policy"]) > 2 * 4
    assert 0 < counts.total() < stock


# Logs


def test_log_keys_and_window_metrics(float64_head):
    """C30: same keys as stock plus ours; token means pooled over tokens, minima minima, maxima maxima."""
    options = {
        "beta": 0.1,
        "num_iterations": 2,
        "optimizer_steps": 3,
        "epsilon": 1e-4,
        "learning_rate": 0.1,
        "loss_type": "grpo",
    }
    stock, result = compare(make_rows(), tiny_model, overhead_tokens=0, **options)
    whole = run(
        GRPOTrainer, make_rows(), tiny_model(), per_device_train_batch_size=8, gradient_accumulation_steps=1, **options
    )
    # One micro-batch of all rows pools over tokens by itself, so stock then logs the pooled mean.
    for mine, theirs, pooled in zip(result.logs[:3], stock.logs[:3], whole.logs[:3], strict=True):
        assert {key for key in mine if not key.startswith("padding/")} == set(theirs)
        for key in ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
            assert mine[key] == pytest.approx(pooled[key], rel=1e-5, abs=1e-9), key
        for key in ("clip_ratio/low_min", "clip_ratio/high_max"):
            assert mine[key] == pytest.approx(pooled[key], rel=1e-5, abs=1e-9), key
    assert any(log["clip_ratio/high_mean"] > 0 for log in result.logs[:3])
    differs = [
        abs(mine["entropy"] - theirs["entropy"]) for mine, theirs in zip(result.logs[:3], stock.logs, strict=False)
    ]
    assert max(differs) > 1e-5  # negative control: a mean over micro-batches is another number


def test_logging_every_third_step(float64_head):
    options = {"logging_steps": 3, "optimizer_steps": 3, "beta": 0.1}
    stock, result = compare(make_rows(), tiny_model, overhead_tokens=0, **options)
    every = ours(overhead_tokens=0, beta=0.1, optimizer_steps=3)
    assert result.losses == pytest.approx(stock.losses, rel=1e-6)
    for key in ("kl", "entropy", "padding/forwarded_tokens"):
        mean = sum(log[key] for log in every.logs[:3]) / 3
        assert result.logs[0][key] == pytest.approx(mean, rel=1e-6)


def test_stock_metrics_keep_their_meaning():
    stock, result = compare(make_rows(), tiny_model, optimizer_steps=3, overhead_tokens=0)
    for mine, theirs in zip(result.logs[:3], stock.logs[:3], strict=True):
        for key in ("num_tokens", "reward", "reward_std", "completions/mean_length", "epoch", "learning_rate"):
            assert mine[key] == theirs[key], key
        assert mine["step_time"] > 0
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)


def test_step_time_covers_every_micro_batch():
    """`step_time` counts all of a window's micro-batches, not the last one of each step."""
    slow = []

    class Slow(PadminGRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            import time

            time.sleep(0.05)
            slow.append(1)
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    result = run(
        Slow,
        make_rows(),
        tiny_model(),
        config_class=PadminGRPOConfig,
        overhead_tokens=0,
        gradient_accumulation_steps=4,
    )
    assert len(slow) > 4
    assert result.logs[0]["step_time"] >= 0.05 * len(slow)


def test_padding_metrics_and_stats_count_what_the_model_saw(capsys):
    result = ours(beta=0.1, num_iterations=2, optimizer_steps=4, overhead_tokens=5)
    policy = passes(result)["policy"]
    scoring = passes(result)["old"] + passes(result)["reference"]
    logs = result.logs[:4]
    assert sum(log["padding/forwarded_tokens"] for log in logs) == forwarded(policy)
    assert sum(log["padding/micro_batches"] for log in logs) == len(policy)
    stats = result.trainer.padding_stats
    assert isinstance(stats, PaddingStats)
    assert stats.forwarded_tokens == forwarded(policy + scoring)
    assert stats.real_tokens == real(policy + scoring)
    assert stats.rows == sum(len(forward["ids"]) for forward in policy + scoring)
    assert stats.stock_tokens == stats.rows * (max(harness.PROMPTS) + max(harness.COMPLETIONS))
    assert logs[0]["padding/rank_imbalance"] == 1.0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("padding:")]
    assert len(lines) == 1
    assert lines[0].startswith("padding: 62.5 % -> ") and lines[0].endswith(
        f"8 rows in {int(logs[0]['padding/micro_batches'])} micro-batches per rank"
    )


# Options


def test_switched_off_is_stock_bit_for_bit(capsys):
    for options in ({"beta": 0.1, "num_iterations": 2}, {"loss_type": "bnpo"}):
        stock, result = compare(make_rows(), tiny_model, padding_minimization=False, optimizer_steps=3, **options)
        for mine, theirs in zip(result.gradients, stock.gradients, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        timing = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
        logs = [[{k: v for k, v in log.items() if k not in timing} for log in r.logs] for r in (result, stock)]
        assert logs[0] == logs[1]
        assert [f["ids"].shape for f in result.forwards] == [f["ids"].shape for f in stock.forwards]
    assert "padding:" not in capsys.readouterr().out


def test_a_plain_config_is_accepted():
    result = run(PadminGRPOTrainer, make_rows(), tiny_model())
    assert "padding/saved_frac" in result.logs[0]


def test_random_state_and_rows_are_stocks():
    """The same rows in the same optimizer steps, shuffled alike, and the same random numbers left over."""
    numbers = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (PadminGRPOTrainer, PadminGRPOConfig)):
        run(trainer_class, make_rows(), tiny_model(), config_class=config_class, optimizer_steps=3)
        numbers.append((torch.rand(3).tolist(), random.random()))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_context_is_entered_as_often_as_in_stock(monkeypatch, use_reentrant, caplog):
    """C34: once per pass, not once per micro-batch; no cache in any forward."""
    counts = Counter()
    for name in ("gradient_checkpointing_enable", "gradient_checkpointing_disable"):
        method = getattr(transformers.PreTrainedModel, name)

        def counted(self, *args, _name=name, _method=method, **kwargs):
            counts[_name] += 1
            return _method(self, *args, **kwargs)

        monkeypatch.setattr(transformers.PreTrainedModel, name, counted)
    options = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant},
        "beta": 0.1,
        "num_iterations": 2,
        "optimizer_steps": 2,
    }
    run(GRPOTrainer, make_rows(), tiny_model(), **options)
    stock = dict(counts)
    counts.clear()
    caplog.clear()
    result = ours(overhead_tokens=0, **options)
    assert dict(counts) == stock
    assert not any(forward["use_cache"] for forward in result.forwards + result.reference_forwards)
    assert not [record for record in caplog.records if "use_cache" in record.message]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_ratio_is_one(dtype):
    """C25: the old policy and the first update score rows alike."""
    deviations = {}
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (PadminGRPOTrainer, PadminGRPOConfig)):
        seen = []

        class Watching(trainer_class):
            watched = seen

            def _get_per_token_logps_and_entropies(self, *args, **kwargs):
                result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
                if torch.is_grad_enabled():
                    self.watched.append(result[0].detach())
                return result

        result = run(
            Watching,
            make_rows(),
            tiny_model(dtype=dtype),
            config_class=config_class,
            num_iterations=2,
            learning_rate=0.0,
            beta=0.0,
        )
        ratios = [
            ((new - batch["old_per_token_logps"]) * batch["completion_mask"]).exp().sub(1).abs().max().item()
            for new, batch in zip(seen, result.batches, strict=True)
        ]
        deviations[trainer_class] = max(ratios)
        assert result.logs[0]["clip_ratio/region_mean"] == 0.0
    if dtype is torch.float32:
        assert deviations[PadminGRPOTrainer] <= 1e-6
    assert deviations[PadminGRPOTrainer] <= deviations[GRPOTrainer] + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["qwen2", "jamba"])
def test_in_low_precision_our_error_is_at_most_stocks(model_type, dtype):
    """Log-probabilities against each row alone in float64: mean over 64 rows, a tenth allowed for chance."""
    rng = random.Random(0)
    rows = make_rows([rng.randint(2, 40) for _ in range(64)], [rng.randint(2, 20) for _ in range(64)])
    options = {"router_aux_loss_coef": 0.0} if "router_aux_loss_coef" in FIELDS else {}
    errors = {}
    for trainer_class in (GRPOTrainer, PadminGRPOTrainer):
        result = run(
            trainer_class,
            rows,
            tiny_model(model_type, dtype),
            per_device_train_batch_size=16,
            num_iterations=2,
            learning_rate=0.0,
            **options,
        )
        exact = in_float64_throughout(tiny_model(model_type, dtype).double())
        difference, tokens = 0.0, 0
        for batch in result.trainer._buffered_inputs:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            with torch.no_grad():
                truth = log_probs_of_each_row_alone(exact, ids, mask, batch["completion_ids"].size(1))
            scored = batch["completion_mask"]
            difference += ((batch["old_per_token_logps"].double() - truth) * scored).abs().sum().item()
            tokens += int(scored.sum())
        errors[trainer_class] = difference / tokens
    assert errors[PadminGRPOTrainer] <= 1.1 * errors[GRPOTrainer] + 1e-7, errors


def test_every_row_starts_with_a_real_token():
    """C35: no query without a key, so nothing for a backend to turn into NaN."""
    result = ours(beta=0.1, overhead_tokens=5, mask_truncated_completions=True)
    for forward in result.forwards + result.reference_forwards:
        assert (forward["mask"][:, 0] == 1).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_finite_in_every_backend(attention, dtype):
    result = ours(model=tiny_model(dtype=dtype, attn_implementation=attention), overhead_tokens=5, beta=0.1)
    assert all(torch.isfinite(gradient).all() for gradient in result.gradients[0].values())
    assert math.isfinite(result.losses[0])


def test_widths_are_multiples_and_never_wider_than_stock():
    """C37: `pad_to_multiple_of` is the multiple of the whole row; few distinct shapes for a compiler."""
    rng = random.Random(3)
    completions = [rng.randint(1, 350) for _ in range(80)]
    rows = make_rows(completions, [rng.randint(2, 100) for _ in range(80)])
    options = {"pad_to_multiple_of": 64, "max_completion_length": 400, "optimizer_steps": 10}
    stock, result = compare(rows, lambda: tiny_model(dtype=torch.float32), **options)
    widths = {forward["ids"].size(1) for forward in result.forwards}
    assert all(width % 64 == 0 for width in widths) and len(widths) <= 8
    assert max(widths) <= max(forward["ids"].size(1) for forward in stock.forwards)


def test_only_completion_tokens_are_scored():
    """C41: through TRL's fused head, as many labels as completion tokens, in every pass."""
    result = ours(beta=0.1, overhead_tokens=5)
    if result.forwards[0]["labels"] is None:
        pytest.skip("this TRL has no fused head")
    for forwards in (passes(result)["policy"], result.reference_forwards):
        assert sum(int((forward["labels"] != -100).sum()) for forward in forwards) == sum(harness.COMPLETIONS)


# Evaluation and checkpoints


def test_evaluation_in_the_middle_of_a_run(float64_head):
    """C31: other rows, another batch size, another number of generations; no trace of it in training."""
    options = {
        "eval_rows": make_rows((5, 1, 30, 2, 8, 9), (4, 6, 3, 9, 2, 5), seed=5),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 6,
        "eval_on_start": True,
        "optimizer_steps": 3,
        "beta": 0.1,
        "overhead_tokens": 5,
    }
    if "num_generations_eval" in FIELDS:
        options["num_generations_eval"] = 3
    stock, result = compare(make_rows(), tiny_model, **options)
    without = ours(beta=0.1, optimizer_steps=3, overhead_tokens=5)
    for mine, theirs, alone in zip(result.gradients, stock.gradients, without.gradients, strict=True):
        assert relative_error(mine, theirs) < 1e-9
        assert relative_error(mine, alone) < 1e-12
    evaluations = [[log for log in r.logs if "eval_loss" in log] for r in (result, stock)]
    assert len(evaluations[0]) == len(evaluations[1]) == 4
    for mine, theirs in zip(*evaluations, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}:
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-7), key


def test_evaluate_without_training():
    options = {
        "eval_rows": make_rows(seed=5),
        "eval_strategy": "steps",
        "eval_steps": 100,
        "per_device_eval_batch_size": 2,
        "optimizer_steps": 1,
    }
    stock, result = compare(make_rows(), tiny_model, prepare=lambda trainer: trainer.evaluate(), **options)
    assert relative_error(result.gradients[0], stock.gradients[0]) < 1e-6


@pytest.mark.parametrize("saved_at", [1, 2, 3])
@pytest.mark.parametrize("order", ["stock then ours", "ours then stock"])
def test_resume_across_trainers(tmp_path, saved_at, order, float64_head):
    """C22: nothing of ours is in a checkpoint, and nothing extra is needed from one."""
    options = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 2,
        "optimizer_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "dataset_size": 64,
    }
    kinds = {
        "stock": lambda **kwargs: run(GRPOTrainer, make_rows(), tiny_model(), **options, **kwargs),
        "ours": lambda **kwargs: ours(overhead_tokens=5, **options, **kwargs),
    }
    first, second = order.split(" then ")
    folders = {name: str(tmp_path / name) for name in kinds}
    for name in kinds:
        kinds[name](output_dir=folders[name])
    resumed = {
        name: kinds[second](
            output_dir=str(tmp_path / f"{name} again"),
            train_kwargs={"resume_from_checkpoint": f"{folders[name]}/checkpoint-{saved_at}"},
        )
        for name in (first, second)
    }
    assert len(resumed[first].gradients) == len(resumed[second].gradients) == 6 - saved_at
    for mine, theirs in zip(resumed[first].gradients, resumed[second].gradients, strict=True):
        assert relative_error(mine, theirs) < 1e-6
    files = [{path.name for path in (tmp_path / name / f"checkpoint-{saved_at}").iterdir()} for name in kinds]
    assert files[0] == files[1]


class Interrupt(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def test_train_again_after_an_interrupt(float64_head):
    """As in a notebook: stopped in the middle of a window, then `train()` again."""
    results = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (PadminGRPOTrainer, PadminGRPOConfig)):
        interrupt = Interrupt()

        def train_twice(trainer, interrupt=interrupt):
            trainer.add_callback(interrupt)
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            trainer.remove_callback(interrupt)
            trainer.model.zero_grad()

        own = {"overhead_tokens": 5} if config_class is PadminGRPOConfig else {}
        results.append(
            run(
                trainer_class,
                make_rows(),
                tiny_model(),
                config_class=config_class,
                prepare=train_twice,
                optimizer_steps=2,
                **own,
            )
        )
    for mine, theirs in zip(results[1].gradients, results[0].gradients, strict=True):
        assert relative_error(mine, theirs) < 1e-9


# PEFT, experts, subclasses, DeepSpeed


def test_adapter_is_restored_when_a_group_raises(float64_head):
    """C32: the whole reference pass runs in TRL's adapter context."""
    pytest.importorskip("peft")
    from test_parity import retrained_adapter

    failures = []

    class Failing(PadminGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            model = self.accelerator.unwrap_model(self.model)
            calls = []

            def fail_in_the_second(module, args, kwargs):
                if model.active_adapter == "ref":
                    calls.append(1)
                    if len(calls) == 2:
                        raise RuntimeError("out of memory")

            if not failures:
                handle = self.model.register_forward_pre_hook(fail_in_the_second, with_kwargs=True)
                with contextlib.ExitStack() as stack:
                    stack.callback(handle.remove)
                    try:
                        super()._generate_and_score_completions(inputs)
                    except RuntimeError as error:
                        failures.append((str(error), model.active_adapter))
            return super()._generate_and_score_completions(inputs)

    result = run(Failing, make_rows(), retrained_adapter(), config_class=PadminGRPOConfig, beta=0.1, overhead_tokens=0)
    assert failures == [("out of memory", "default")]
    assert result.trainer.model.active_adapter == "default"


@needs("router_aux_loss_coef")
def test_dense_jamba_trains(float64_head):
    """Stock raises IndexError: the config speaks of experts that the model does not have."""

    def dense():
        return tiny_model("jamba", num_experts=1, router_aux_loss_coef=0.001)

    with pytest.raises(IndexError):
        run(GRPOTrainer, make_rows(), dense())
    result = ours(model=dense(), overhead_tokens=5)
    reference = run(GRPOTrainer, make_rows(), dense(), router_aux_loss_coef=0.0)
    assert relative_error(result.gradients[0], reference.gradients[0]) < 1e-6


def test_a_loss_of_ones_own_keeps_stock_micro_batches(float64_head, caplog):
    class Penalized:
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) + 0.1 * inputs["advantages"].std()

    stock = run(type("Stock", (Penalized, GRPOTrainer), {}), make_rows(), tiny_model())
    result = run(type("Ours", (Penalized, PadminGRPOTrainer), {}), make_rows(), tiny_model())
    assert relative_error(result.gradients[0], stock.gradients[0]) < 1e-9
    assert [len(f["ids"]) for f in passes(result)["policy"]] == [2, 2, 2, 2]
    assert forwarded(result.forwards) < 0.9 * forwarded(stock.forwards)


class FakeDeepSpeedEngine:
    """Records backward passes, boundary flags and steps, and lets torch do the backward."""

    def __init__(self):
        self.calls = []

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.calls.append(("boundary", is_boundary))

    def backward(self, loss, **kwargs):
        self.calls.append(("backward", loss.item(), kwargs))
        loss.backward()

    def step(self):
        self.calls.append(("step",))

    def destroy(self):
        pass


@pytest.mark.parametrize("budget", [None, 60, 1])
def test_deepspeed_boundary(monkeypatch, budget, float64_head):
    """C20: K backward passes, boundary flags F..F T, one step per window, losses that add up to stock's."""
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    def engine(trainer):
        trainer.fake = FakeDeepSpeedEngine()
        wrapper = DeepSpeedEngineWrapper(trainer.fake)

        def backward(loss, **kwargs):
            wrapper.backward(loss, sync_gradients=trainer.accelerator.sync_gradients, **kwargs)

        trainer.accelerator.backward = backward

    stock = run(GRPOTrainer, make_rows(), tiny_model(), optimizer_steps=2, prepare=engine, beta=0.1)
    own = {"token_budget": budget} if budget else {}
    result = ours(optimizer_steps=2, prepare=engine, beta=0.1, overhead_tokens=0, **own)
    micro_batches = [int(log["padding/micro_batches"]) for log in result.logs[:2]]
    calls = result.trainer.fake.calls
    for count in micro_batches:
        window, calls = calls[: 2 * count + 1], calls[2 * count + 1 :]
        flags = [call[1] for call in window if call[0] == "boundary"]
        assert flags == [False] * (count - 1) + [True]
        assert [call[0] for call in window].count("backward") == count
        assert window[-1] == ("step",)
    assert not calls
    losses = [sum(c[1] for c in r.trainer.fake.calls if c[0] == "backward") for r in (result, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


# Errors


def test_unknown_batch_entry_is_refused_by_name():
    class Extra(PadminGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            return super()._generate_and_score_completions(inputs) | {"surprise": torch.zeros(8)}

    with pytest.raises(TRLContractError, match=r"surprise.*ROW_SHAPES.*padding_minimization=False.*trl 1\."):
        run(Extra, make_rows(), tiny_model(), config_class=PadminGRPOConfig)


def test_unknown_loss_is_refused_before_a_model_is_loaded():
    args = PadminGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[], loss_type="novel")
    with pytest.raises(TRLContractError, match=r"loss_type='novel'.*dapo"):
        PadminGRPOTrainer("no/such/model", reward_funcs=harness.reward, args=args)


def test_bad_options_of_a_plain_config_are_refused_before_a_model_is_loaded():
    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to=[])
    args.token_budget = -3
    with pytest.raises(ValueError, match="`token_budget`=-3"):
        PadminGRPOTrainer("no/such/model", reward_funcs=harness.reward, args=args)


def test_options_after_a_change_of_trl(monkeypatch):
    def other(self, model, tokens):
        return None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", other)
    with pytest.raises(TRLContractError, match=r"_get_per_token_logps_and_entropies.*'input_ids'"):
        compat.check_trainer_class(GRPOTrainer)


def test_all_completions_empty_is_an_error_with_a_reason():
    trainer = ours().trainer
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    with torch.no_grad(), pytest.raises(ValueError, match="completion of the batch is empty"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 0)


def test_one_import_line_is_all_that_changes(tmp_path):
    from trl_padmin import GRPOConfig as Config
    from trl_padmin import GRPOTrainer as Trainer

    assert Trainer is PadminGRPOTrainer and Config is PadminGRPOConfig
    assert issubclass(Trainer, GRPOTrainer) and issubclass(Config, GRPOConfig)
    assert GRPOTrainer.training_step is not trl_padmin.trainer.PaddingMinimizationMixin.training_step
    trainer = Trainer(
        tiny_model(),
        harness.reward,
        Config(str(tmp_path), use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=8),
        Dataset.from_dict({"prompt": ["2"] * 8}),
        processing_class=harness.tokenizer(),
    )
    assert dataclasses.is_dataclass(trainer.args) and trainer.padding_stats == PaddingStats()
