"""`PadminSFTTrainer` and `PadminDPOTrainer` against TRL's on the same data: losses, gradients, logs, forwarded tokens.

Not exercised here: GPUs, DeepSpeed and FSDP, images, data sets that are streamed.
"""

import json
import math
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
import trl.trainer.utils as trl_utils
from datasets import Dataset
from harness import EOS, PAD, VOCAB, Recorder, plain_training, relative_error, tiny_model, tokenizer
from test_collators import BIASED_MAMBA2, in_float64
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from trl_padmin import (
    PadminDPOConfig,
    PadminDPOTrainer,
    PadminSFTConfig,
    PadminSFTTrainer,
    SupervisedPaddingMinimizationMixin,
    supervised,
)
from trl_padmin.collators import PadminDataCollatorForLanguageModeling
from trl_padmin.example_window import ExampleMicroBatch, ExampleWindow


# 37 rows in batches of 4: with 4 accumulation steps the last window has two batches, one of them with one row.
LENGTHS = tuple(2 + (7 * i * i) % 41 for i in range(37))
FEWER = LENGTHS[:21]  # windows of 4 and 2 batches


class PadminTrainer(SupervisedPaddingMinimizationMixin, Trainer):
    pass


class Float64Head:
    """TRL's fused head, which accumulates in float32, in plain float64 operations, with all of its outputs."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap=None, logit_scale=1.0, outputs=()):
        logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale / temperature
        log_probs = logits.log_softmax(dim=-1)
        found = {
            "log_probs": log_probs.gather(-1, targets[:, None]).squeeze(-1),
            "entropy": -(log_probs.exp() * log_probs).sum(dim=-1),
            "log_sum_sq_probs": (2 * log_probs).logsumexp(dim=-1),
            "mean_logits": logits.mean(dim=-1),
            "is_top1": logits.argmax(dim=-1) == targets,
        }
        return tuple(value if name in outputs else None for name, value in found.items())


@pytest.fixture(autouse=True)
def float64_head(monkeypatch):
    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Float64Head)


@pytest.fixture(autouse=True)
def warned(monkeypatch):
    """The warnings of a test, each as often as it is given."""
    messages = []
    monkeypatch.setattr(supervised.logger, "warning_once", messages.append)
    monkeypatch.setattr(supervised.logger, "warning", messages.append)
    return messages


# Data


def draw(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Random ids with an eos at the end."""
    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(2, VOCAB, (n - 1,), generator=generator).tolist(), EOS] for n in lengths]


def words(ids: Sequence[int]) -> str:
    return " ".join("<eos>" if each == EOS else str(each) for each in ids)


def language_modeling(lengths: Sequence[int] = LENGTHS) -> Dataset:
    return Dataset.from_dict({"input_ids": draw(lengths)})


def prompt_completion(lengths: Sequence[int] = LENGTHS) -> Dataset:
    prompts = draw([2 + n % 5 for n in lengths], seed=1)
    return Dataset.from_dict(
        {"prompt": [words(p[:-1]) for p in prompts], "completion": list(map(words, draw(lengths)))}
    )


def conversational(lengths: Sequence[int] = LENGTHS) -> Dataset:
    prompts = draw([2 + n % 5 for n in lengths], seed=1)
    return Dataset.from_dict(
        {
            "messages": [
                [
                    {"role": "user", "content": words(p[:-1])},
                    {"role": "assistant", "content": words(c[:-1])},
                    {"role": "user", "content": words(p[:-1])},
                    {"role": "assistant", "content": words(c[-4:-1])},
                ]
                for p, c in zip(prompts, draw(lengths), strict=True)
            ]
        }
    )


def preference(lengths: Sequence[int] = LENGTHS) -> Dataset:
    prompts = draw([2 + n % 5 for n in lengths], seed=1)
    return Dataset.from_dict(
        {
            "prompt": [words(p[:-1]) for p in prompts],
            "chosen": [" " + words(ids[:-1]) for ids in draw(lengths, seed=2)],
            "rejected": [" " + words(ids[:-1]) for ids in draw(lengths[::-1], seed=3)],
        }
    )


def padded(lengths: Sequence[int], width: int, side: str = "right") -> list[dict[str, list[int]]]:
    """Rows that a tokenizer padded with `padding="max_length"`."""
    rows = []
    for ids in draw(lengths):
        filler = width - len(ids)
        mask = [1] * len(ids)
        row = {"input_ids": ids + [PAD] * filler, "attention_mask": mask + [0] * filler}
        if side == "left":
            row = {"input_ids": [PAD] * filler + ids, "attention_mask": [0] * filler + mask}
        rows.append(row)
    return rows


def chatting_tokenizer() -> transformers.PreTrainedTokenizerFast:
    inner = tokenizer()
    inner.chat_template = (
        "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}"
        "{{ message['content'] + ' <eos> ' }}{% endgeneration %}{% else %}{{ message['content'] + ' ' }}{% endif %}"
        "{% endfor %}"
    )
    return inner


# Runs


@dataclass
class Run:
    trainer: Trainer
    gradients: list[dict[str, torch.Tensor]]
    logs: list[dict[str, float]]
    shapes: list[tuple[int, int]]  # of each forward of the policy
    losses: list[float]  # of each optimizer step; those in the logs are summed in float32

    @property
    def logged_losses(self) -> list[float]:
        return [log["loss"] for log in self.logs if "loss" in log]

    @property
    def forwarded(self) -> int:
        return sum(rows * width for rows, width in self.shapes)


def run(
    trainer_class: type,
    config_class: type,
    dataset: Dataset | list,
    model: transformers.PreTrainedModel,
    *,
    prepare: Callable[[Trainer], None] | None = None,
    trainer_kwargs: dict | None = None,
    **options,
) -> Run:
    options = {
        **plain_training(),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        **options,
    }
    recorder, shapes, losses = Recorder(), [], []
    trainer = trainer_class(
        model=model,
        args=config_class(**options),
        train_dataset=dataset,
        processing_class=chatting_tokenizer(),
        callbacks=[recorder],
        **trainer_kwargs or {},
    )
    if prepare is not None:
        prepare(trainer)

    def record(module, args, kwargs):
        if module.training:
            shapes.append(tuple(kwargs["input_ids"].shape))

    training_step = trainer.training_step

    def recorded_step(*args):
        losses.extend([0.0] * (len(recorder.gradients) + 1 - len(losses)))
        loss = training_step(*args)
        losses[-1] += loss.double().item()
        return loss

    trainer.training_step = recorded_step
    handle = trainer.model.register_forward_pre_hook(record, with_kwargs=True)
    trainer.train()
    handle.remove()
    return Run(trainer, recorder.gradients, trainer.state.log_history, shapes, losses)


OURS = {SFTTrainer: (PadminSFTTrainer, PadminSFTConfig), DPOTrainer: (PadminDPOTrainer, PadminDPOConfig)}
STOCK = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig}


def compare(trainer_class, dataset, make_model=tiny_model, **options) -> tuple[Run, Run]:
    """Runs stock and ours alike, without our own options for stock. Rows are short, so micro-batches must be cheap."""
    options = {"overhead_tokens": 4, **options}
    own = {
        key: options.pop(key) for key in ("token_budget", "overhead_tokens", "padding_minimization") if key in options
    }
    if trainer_class is DPOTrainer:
        options = {"beta": 0.1, "max_length": None, **options}
    runs = []
    for cls, config, extra in ((trainer_class, STOCK[trainer_class], {}), (*OURS[trainer_class], own)):
        kwargs = {"ref_model": make_model(seed=1)} if trainer_class is DPOTrainer else {}
        runs.append(run(cls, config, dataset, make_model(), trainer_kwargs=kwargs, **options, **extra))
    return tuple(runs)


def assert_same(stock: Run, ours: Run, loss_tolerance: float = 1e-9) -> None:
    assert len(ours.gradients) == len(stock.gradients) == len(stock.losses) > 0
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert max(gradient.abs().max() for gradient in theirs.values()) > 1e-3
        assert relative_error(mine, theirs) <= 1e-9
    assert ours.losses == pytest.approx(stock.losses, rel=loss_tolerance)
    assert ours.logged_losses == pytest.approx(stock.logged_losses, rel=1e-6)


DATA = {
    "language modeling": (language_modeling, {}),
    "completion only": (prompt_completion, {}),
    "assistant only": (conversational, {"assistant_only_loss": True}),
}


@pytest.mark.parametrize("accumulation", [1, 4, 8])
@pytest.mark.parametrize("kind", DATA)
def test_sft_equals_stock_at_every_step(kind, accumulation):
    make, options = DATA[kind]
    stock, ours = compare(SFTTrainer, make(), gradient_accumulation_steps=accumulation, **options)
    assert len(stock.losses) == 2 * math.ceil(math.ceil(len(LENGTHS) / 4) / accumulation)
    assert_same(stock, ours)
    assert ours.forwarded < stock.forwarded


@pytest.mark.parametrize("model_type", ["jamba", "mamba2"])
def test_sft_of_a_hybrid_equals_stock(model_type):
    overrides = {"output_router_logits": False} if model_type == "jamba" else {}
    options = {"router_aux_loss_coef": 0.0} if model_type == "jamba" else {}
    with in_float64():
        stock, ours = compare(
            SFTTrainer,
            prompt_completion(FEWER),
            lambda: tiny_model(model_type, **overrides),
            num_train_epochs=1,
            **options,
        )
    assert_same(stock, ours)
    assert ours.forwarded < stock.forwarded


OPTIONS = {
    "DFT": {"loss_type": "dft"},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "one row a batch": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8},
    "multiples of 16": {"pad_to_multiple_of": 16},
    "a small budget": {"token_budget": 50},
    "a large budget": {"token_budget": 100_000, "overhead_tokens": 10_000},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "clipping": {"max_grad_norm": 0.5},
    "drop last": {"dataloader_drop_last": True},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_sft_equals_stock_with(case):
    with in_float64():
        stock, ours = compare(SFTTrainer, prompt_completion(FEWER), num_train_epochs=1, **OPTIONS[case])
    assert_same(stock, ours, loss_tolerance=1e-7 if case == "label smoothing" else 1e-9)  # it sums in float32
    widths = {width for _, width in ours.shapes}
    if case == "multiples of 16":
        assert all(width % 16 == 0 for width in widths)
    if case == "a small budget":
        assert all(rows == 1 or rows * width <= 50 for rows, width in ours.shapes)
    if case == "a large budget":
        assert len(ours.shapes) == len(stock.shapes)


PAIR_OPTIONS = {
    "sigmoid": {},
    "ipo": {"loss_type": "ipo"},
    "two losses": {"loss_type": ["sigmoid_norm", "apo_zero"], "loss_weights": [0.3, 1.0]},
    "WPO": {"use_weighting": True},
    "LD": {"ld_alpha": 0.5},
    "a small budget": {"token_budget": 130},
    "precomputed": {"precompute_ref_log_probs": True},
}


@pytest.mark.parametrize("case", PAIR_OPTIONS)
def test_dpo_equals_stock(case):
    epochs = 2 if case == "sigmoid" else 1
    stock, ours = compare(DPOTrainer, preference(FEWER), num_train_epochs=epochs, **PAIR_OPTIONS[case])
    assert len(stock.losses) == 2 * epochs
    assert_same(stock, ours)
    assert ours.forwarded < stock.forwarded


@pytest.mark.parametrize("accumulation", [1, 8])
def test_dpo_equals_stock_with_accumulation(accumulation):
    stock, ours = compare(DPOTrainer, preference(FEWER), num_train_epochs=1, gradient_accumulation_steps=accumulation)
    assert_same(stock, ours)
    assert ours.forwarded < stock.forwarded


def run_trainer(trainer_class: type, rows: list, model: transformers.PreTrainedModel, collator=None, **options) -> Run:
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False) if collator is None else collator
    return run(trainer_class, TrainingArguments, rows, model, trainer_kwargs={"data_collator": collator}, **options)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_trainer_equals_stock(accumulation):
    rows = padded(FEWER, 64)
    with in_float64():
        stock, ours = (
            run_trainer(cls, rows, tiny_model(), gradient_accumulation_steps=accumulation)
            for cls in (Trainer, PadminTrainer)
        )
    assert_same(stock, ours)
    assert ours.forwarded < 0.6 * stock.forwarded
    assert "padding/pad_frac" in ours.logs[0] and "padding/pad_frac" not in ours.logs[-1]


@pytest.mark.parametrize(("model_type", "overrides"), [("qwen2", {}), ("mamba2", BIASED_MAMBA2)])
def test_rows_padded_on_the_left_equal_each_row_alone(model_type, overrides):
    lengths = LENGTHS[:16]
    inner = tokenizer()
    inner.padding_side = "left"
    collator = transformers.DataCollatorForLanguageModeling(inner, mlm=False)
    with in_float64():
        alone, ours, stock = (
            run_trainer(cls, rows, tiny_model(model_type, **overrides), collator, num_train_epochs=1, **options)
            for cls, rows, options in (
                (
                    Trainer,
                    [{"input_ids": ids} for ids in draw(lengths)],
                    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
                ),
                (PadminTrainer, padded(lengths, 64, "left"), {}),
                (Trainer, padded(lengths, 64, "left"), {}),
            )
        )
    assert_same(alone, ours)
    with pytest.raises(AssertionError):  # it scores the first token of a row too, after padding
        assert_same(alone, stock)


# Negative controls


def forgets_a_micro_batch(monkeypatch):
    planned = ExampleWindow.micro_batches
    monkeypatch.setattr(ExampleWindow, "micro_batches", lambda *args: [step[-1:] for step in planned(*args)])


def weighs_all_alike(monkeypatch):
    monkeypatch.setattr(ExampleMicroBatch, "loss_weight", property(lambda self: 1.0, lambda self, value: None), False)


def cuts_one_column_too_many(monkeypatch):
    select = ExampleWindow.select
    monkeypatch.setattr(
        ExampleWindow, "select", lambda *args: {key: value[:, :-1] for key, value in select(*args).items()}
    )


def ignores_that_batches_differ_in_size(monkeypatch):
    monkeypatch.setattr(ExampleWindow, "pools", property(lambda self: [tuple(range(len(self.lengths)))]))


@pytest.mark.parametrize(
    ("trainer_class", "fault"),
    [
        (SFTTrainer, forgets_a_micro_batch),
        (SFTTrainer, cuts_one_column_too_many),
        (DPOTrainer, forgets_a_micro_batch),
        (DPOTrainer, weighs_all_alike),
        (DPOTrainer, ignores_that_batches_differ_in_size),
    ],
)
def test_a_fault_is_noticed(trainer_class, fault, monkeypatch):
    fault(monkeypatch)
    dataset = preference(FEWER) if trainer_class is DPOTrainer else prompt_completion(FEWER)
    with pytest.raises(AssertionError):
        assert_same(*compare(trainer_class, dataset, num_train_epochs=1))


# Tokens forwarded


def lognormal(count: int, mean: int, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, generator=generator).mul(0.7).exp()
    lengths = (drawn * mean / drawn.mean()).clamp(2, longest).round().int().tolist()
    for index in range(count * mean - sum(lengths)):  # what the limit took
        lengths[index % count] += 1
    return lengths


@pytest.mark.parametrize("kind", ["masked", "labelled"])
def test_a_data_set_padded_to_1024_forwards_next_to_no_padding(kind, capsys):
    lengths = lognormal(256, 256, 1000)
    rows = padded(lengths, 1024)
    assert sum(lengths) == 256 * len(lengths) and max(lengths) <= 1024
    options = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 16, "num_train_epochs": 1}

    def model():
        return tiny_model(dtype=torch.float32, max_position_embeddings=1024)

    if kind == "masked":
        ours = run_trainer(PadminTrainer, rows, model(), **options)
        collator = PadminDataCollatorForLanguageModeling(tokenizer(), mlm=False)
        collated = sum(collator(rows[start : start + 16])["input_ids"].numel() for start in range(0, 256, 16))
        assert 1.5 < collated / sum(lengths) <= max(lengths) / 256
    else:  # TRL ignores the mask of a data set
        labelled = [
            {"input_ids": row["input_ids"], "labels": ids + [-100] * (1024 - len(ids))}
            for row, ids in zip(rows, draw(lengths), strict=True)
        ]
        ours = run(PadminSFTTrainer, PadminSFTConfig, Dataset.from_list(labelled), model(), **options)
    assert ours.forwarded / sum(lengths) <= 1.05
    assert sum(rows for rows, _ in ours.shapes) == 256
    stats = ours.trainer.padding_stats
    assert (stats.forwarded_tokens, stats.micro_batches, stats.rows) == (ours.forwarded, len(ours.shapes), 256)
    assert stats.stock_tokens == 256 * 1024
    # TRL's collator does not know eos, so one pad token of a row may be taken for it.
    assert stats.real_tokens == sum(lengths) + (0 if kind == "masked" else 256)
    assert capsys.readouterr().out.count("(stock TRL -> now)") == 1


# Logs


def test_logs_of_sft_keep_their_names_and_meaning(capsys):
    stock, ours = compare(SFTTrainer, prompt_completion(FEWER), num_train_epochs=1)
    added = {name for name in ours.logs[0] if name.startswith("padding/")}
    assert len(added) == 7 and stock.logs[0].keys() == ours.logs[0].keys() - added
    assert [log["num_tokens"] for log in ours.logs[:-1]] == [log["num_tokens"] for log in stock.logs[:-1]]
    assert sum(log["padding/forwarded_tokens"] for log in ours.logs[:-1]) == ours.forwarded
    assert capsys.readouterr().out.count("(stock TRL -> now)") == 1
    # A window of one batch has one mean, whatever is pooled.
    stock, ours = compare(SFTTrainer, prompt_completion(FEWER), num_train_epochs=1, gradient_accumulation_steps=1)
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        assert [log[name] for log in ours.logs[:-1]] == pytest.approx([log[name] for log in stock.logs[:-1]], rel=1e-6)
    assert len(ours.shapes) > len(stock.shapes)


def test_logs_of_dpo_keep_their_names_and_meaning():
    stock, ours = compare(DPOTrainer, preference(FEWER), num_train_epochs=1, gradient_accumulation_steps=1)
    added = {name for name in ours.logs[0] if name.startswith("padding/")}
    assert len(added) == 7 and stock.logs[0].keys() == ours.logs[0].keys() - added
    names = [name for name in stock.logs[0] if "/" in name or name in ("entropy", "mean_token_accuracy", "num_tokens")]
    assert len(names) == 11
    for name in names:
        assert [log[name] for log in ours.logs[:-1]] == pytest.approx([log[name] for log in stock.logs[:-1]], rel=1e-5)
    assert len(ours.shapes) > len(stock.shapes)


def test_evaluation_is_stocks():
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "num_train_epochs": 1}
    dataset, held_out = prompt_completion(FEWER), prompt_completion((30, 3, 17, 8, 9))
    stock, ours = (
        run(cls, config, dataset, tiny_model(), trainer_kwargs={"eval_dataset": held_out}, **options)
        for cls, config in ((SFTTrainer, SFTConfig), (PadminSFTTrainer, PadminSFTConfig))
    )
    names = {name for log in stock.logs for name in log if name.startswith("eval_")}
    assert {name for log in ours.logs for name in log if name.startswith("eval_")} == names
    for name in ("eval_loss", "eval_entropy", "eval_num_tokens"):
        theirs = [log[name] for log in stock.logs if name in log]
        assert len(theirs) == 2
        assert [log[name] for log in ours.logs if name in log] == pytest.approx(theirs, rel=1e-6)


# What is left alone


@pytest.mark.parametrize("trainer_class", [SFTTrainer, DPOTrainer])
def test_switched_off_it_is_stock_bit_for_bit(trainer_class, capsys):
    dataset = preference(FEWER) if trainer_class is DPOTrainer else prompt_completion(FEWER)
    stock, ours = compare(trainer_class, dataset, num_train_epochs=1, padding_minimization=False)
    assert ours.shapes == stock.shapes and ours.losses == stock.losses
    assert [log.keys() for log in ours.logs] == [log.keys() for log in stock.logs]
    for mine, theirs in zip(ours.trainer.model.parameters(), stock.trainer.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert "(stock TRL -> now)" not in capsys.readouterr().out


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnLossInFront(SFTTrainer):
    def compute_loss(self, *args, **kwargs):
        return 2 * super().compute_loss(*args, **kwargs)


class PadminOwnLoss(SupervisedPaddingMinimizationMixin, OwnLossInFront):
    pass


def moe(**overrides):
    return lambda: tiny_model("qwen3_moe", dtype=torch.float32, **overrides)


def small():
    return tiny_model(dtype=torch.float32)


def without_loss_kwargs(trainer):
    trainer.model_accepts_loss_kwargs = False


LEFT_ALONE = {
    "packing": ({"packing": True, "max_length": 64, "padding_free": False}, {}, small, None, "packed"),
    "MoE": ({}, {}, moe(), None, "auxiliary loss"),
    "a loss function": ({}, {"compute_loss_func": mean_over_tokens}, small, None, "`compute_loss_func`"),
    "a mean over tokens": ({}, {}, small, without_loss_kwargs, "`num_items_in_batch`"),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_is_not_a_sum_over_tokens_is_left_alone_and_said_once(case, warned):
    options, kwargs, make_model, prepare, reason = LEFT_ALONE[case]
    stock, ours = (
        run(
            cls,
            config,
            language_modeling(FEWER),
            make_model(),
            num_train_epochs=1,
            trainer_kwargs=kwargs,
            prepare=prepare,
            **options,
        )
        for cls, config in ((SFTTrainer, SFTConfig), (PadminSFTTrainer, PadminSFTConfig))
    )
    assert ours.shapes == stock.shapes and ours.losses == stock.losses
    assert len(set(warned)) == 1 and "Batches are left as they are" in warned[0] and reason in warned[0]


def test_a_loss_of_ones_own_is_left_alone(warned):
    for cls in (OwnLossInFront, PadminOwnLoss):
        ours = run(cls, SFTConfig, language_modeling(FEWER), small(), max_steps=1)
        assert len(ours.shapes) == 4
    assert len(warned) == 1 and "`OwnLossInFront.compute_loss`" in warned[0]


@pytest.mark.parametrize("loss_type", ["aot", "sft", "bco_pair"])
def test_losses_that_are_not_a_mean_over_pairs_are_left_alone(loss_type, warned):
    stock, ours = compare(DPOTrainer, preference(LENGTHS[:16]), num_train_epochs=1, loss_type=loss_type)
    assert ours.shapes == stock.shapes and ours.losses == stock.losses
    assert len(warned) == 1 and f"`loss_type`='{loss_type}'" in warned[0]


def test_a_model_that_is_not_causal_is_left_alone(warned):
    config = transformers.BertConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    rows = [row | {"label": index % 2} for index, row in enumerate(padded(FEWER, 64))]
    collator = transformers.DataCollatorWithPadding(tokenizer())
    ours = run_trainer(
        PadminTrainer, rows, transformers.BertForSequenceClassification(config), collator, num_train_epochs=1
    )
    assert {width for _, width in ours.shapes} == {64}
    assert len(warned) == 1 and "`BertForSequenceClassification` is not a causal language model" in warned[0]


def with_extra(**extra):
    def collate(rows):
        batch = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)(rows)
        return batch | {key: make(len(rows), 64) for key, make in extra.items()}

    return collate


def test_images_are_left_alone_and_unknown_entries_raise(warned):
    rows = padded(LENGTHS[:16], 64)

    def first_window(collator):
        trainer = PadminTrainer(
            model=small(),
            args=TrainingArguments(
                output_dir=tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=4, remove_unused_columns=False
            ),
            train_dataset=rows,
            data_collator=collator,
        )
        return trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 4, torch.device("cpu"))[0]

    batches = first_window(with_extra(pixel_values=lambda rows, width: torch.ones(rows, 3, 2, 2)))
    assert [batch["input_ids"].shape for batch in batches] == [(4, 64)] * 4
    assert len(warned) == 1 and "images" in warned[0]
    batches = first_window(with_extra(temperature=lambda rows, width: torch.tensor(1.0)))
    assert [batch["input_ids"].shape for batch in batches] == [(4, 64)] * 4
    assert "`temperature`" in warned[1]
    with pytest.raises(ValueError, match="`weights`"):
        first_window(with_extra(weights=lambda rows, width: torch.ones(rows, width)))


def test_a_dense_model_with_the_config_of_an_moe_trains():
    """Stock asks a Jamba without experts for router logits, and fails."""

    def dense():
        return tiny_model("jamba", dtype=torch.float32, num_experts=1)

    with pytest.raises(IndexError):
        run(SFTTrainer, SFTConfig, language_modeling(FEWER), dense(), max_steps=1)
    ours = run(PadminSFTTrainer, PadminSFTConfig, language_modeling(FEWER), dense(), max_steps=1)
    assert math.isfinite(ours.losses[0])


@pytest.mark.parametrize("config", [PadminSFTConfig, PadminDPOConfig])
def test_options_are_checked_before_a_model_is_loaded(config):
    with pytest.raises(ValueError, match="`token_budget`=0"):
        config(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, token_budget=0)
    plain = SFTConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False)
    plain.padding_minimization = "yes"
    with pytest.raises(TypeError, match="`padding_minimization`='yes'"):
        PadminSFTTrainer(model="no/such-model", args=plain)


def test_a_plain_config_gets_the_defaults():
    ours = run(PadminSFTTrainer, SFTConfig, language_modeling(FEWER), small(), max_steps=1)
    assert ours.trainer.padding_stats.rows == 16


# Several ranks


@pytest.mark.distributed
def test_two_ranks_run_as_many_forwards_and_equal_stock(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = Path(__file__).with_name("supervised_ranks.py")
    finished = subprocess.run([*launch, script, tmp_path], capture_output=True, text=True, timeout=240)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [each["ranks"] for each in found] == [2, 2], finished.stderr[-2000:]
    assert [each["error"] for each in found] == ["`weights` is not known"] * 2
    assert [each["sft"]["proposed"][0] for each in found] == [
        [4, 4],
        [2, 4],
    ]  # a rank splits its groups to keep in step
    for kind in ("sft", "dpo"):
        first, second = (each[kind] for each in found)
        assert first["forwards"] == second["forwards"]
        for each in (first, second):
            stock_losses, our_losses = each["losses"]
            assert each["gradient_error"] <= 1e-9 and our_losses == pytest.approx(stock_losses, rel=1e-9)
            stock_tokens, our_tokens = each["num_tokens"]
            assert our_tokens == stock_tokens
        forwarded = first["tokens"][1] + second["tokens"][1]
        assert first["stats"] == second["stats"] == [forwarded, (2 if kind == "dpo" else 1) * 32]


# Examples


EXAMPLES = Path(__file__).parents[1] / "examples"


def run_script(monkeypatch, name: str, **options) -> None:
    words_of_options = (word for key, value in options.items() for word in (f"--{key}", str(value)))
    monkeypatch.setattr(sys, "argv", [name, *words_of_options])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_example_runs(monkeypatch, tmp_path, capsys):
    model, data, output = tmp_path / "model", tmp_path / "data", tmp_path / "output"
    small().save_pretrained(model)
    chatting_tokenizer().save_pretrained(model)
    data.mkdir()
    prompt_completion(FEWER).to_json(data / "train.jsonl")
    run_script(
        monkeypatch,
        "sft.py",
        model_name_or_path=model,
        dataset_name=data,
        output_dir=output,
        max_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        overhead_tokens=4,
        bf16="false",
        gradient_checkpointing="false",
        use_cpu="true",
        report_to="none",
        logging_steps=1,
        save_strategy="steps",
    )
    assert "(stock TRL -> now); 16 rows" in capsys.readouterr().out
    (state,) = output.glob("checkpoint-*/trainer_state.json")
    assert json.loads(state.read_text())["log_history"][0]["padding/saved_frac"] > 0
    assert (output / "model.safetensors").exists()
    ours = [line for line in (EXAMPLES / "sft.py").read_text().splitlines() if "trl_padmin" in line]
    assert ours == ["from trl_padmin import SFTConfig, SFTTrainer  # the one line that changes"]


def test_the_sampling_strategies_are_compared(monkeypatch, capsys):
    run_script(monkeypatch, "benchmark/sft_sampling.py", rows=64, mean=20, longest=80, batch_size=4, accumulation=4)
    table = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    tokens = {row[0].split(",")[1].strip(" `"): int(row[1].split()[0].replace(",", "")) for row in table[:3]}
    assert list(tokens) == ["random", "group_by_length", "batch_rebalance"]
    ours = [int(table[3][column].split()[0].replace(",", "")) for column in (1, 3)]
    assert ours[0] < tokens["random"] and ours[1] < 64 * 80
