"""Timing: a GRPO trainer takes one optimizer step after another on the same rows, each in another layout.

Nothing is generated and no weight changes (the learning rate is 0), so all steps compute the same gradient. The
reference model is the policy itself, which has the same shapes and needs no second copy.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest.mock import patch


os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is how rows are fed here

import torch
import transformers
from datasets import Dataset
from layouts import Setting, count_tokens, group_rows
from models import EOS, Model, make_model, make_tokenizer
from profiles import Profile, Row
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer
from trl_padmin.layout import restore_rows


GENERATIONS = 8


@dataclass
class Meter:
    """What one optimizer step did."""

    layout: str
    scoring_s: float = 0.0
    generation_s: float = 0.0  # scoring included
    forwarded_tokens: dict[str, int] = field(default_factory=lambda: {"scoring": 0, "policy": 0})
    real_tokens: int = 0
    micro_batches: int = 0
    saved_mib: float = 0.0  # kept for the backward by the largest micro-batch, weights left out
    peak_mib: float | None = None  # of the GPU


class LayoutTrainer(PadminGRPOTrainer):
    """Our trainer, with its planner and, for two layouts, its way to forward rows exchanged.

    It gets the rows of a window as one stock micro-batch, so that a layout may have any number of micro-batches.
    """

    setting: Setting
    profile: Profile
    meter = Meter("ours")

    def _agree(self, propose, pools, *args, **kwargs):
        def groups_of_layout():
            at_least = None if torch.is_grad_enabled() else 1
            width = [max(pool.prompt) + max(pool.completion) for pool in pools]
            return [
                group_rows(self.meter.layout, pool.total, stock_width, self.setting, at_least)
                for pool, stock_width in zip(pools, width, strict=True)
            ]

        return super()._agree(groups_of_layout, pools, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        started = self.now()
        result = super()._generate_and_score_completions(inputs)
        self.meter.generation_s = self.now() - started
        return result

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if torch.is_grad_enabled():
            on_cpu = self.accelerator.device.type == "cpu"
            with saved_for_backward(self.model) if on_cpu else nullcontext({}) as storages:
                result = self._score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            self.meter.saved_mib = max(self.meter.saved_mib, sum(storages.values()) / 2**20)
            return result
        started = self.now()
        result = self._score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        self.meter.scoring_s += self.now() - started
        return result

    def _score(self, model, ids, mask, logits_to_keep, batch_size=None, **kwargs):
        layout, stock = self.meter.layout, GRPOTrainer._get_per_token_logps_and_entropies
        if layout not in ("config_max", "stock", "packed"):
            return super()._get_per_token_logps_and_entropies(
                model, ids, mask, logits_to_keep, batch_size=batch_size, **kwargs
            )
        if layout == "packed":
            return self._score_packed(model, ids, mask, logits_to_keep, **kwargs)
        columns = logits_to_keep
        if layout == "config_max":
            caps = self.profile.prompt_cap, self.profile.completion_cap
            prompt, completion = (max(2, round(cap / self.setting.scale)) for cap in caps)
            widen = prompt - (ids.size(1) - columns), completion - columns
            ids, mask = (torch.nn.functional.pad(part, widen) for part in (ids, mask))
            logits_to_keep = completion
        batch_size = None if torch.is_grad_enabled() else self.setting.batch_size
        results = stock(self, model, ids, mask, logits_to_keep, batch_size=batch_size, **kwargs)
        return tuple(None if result is None else result[:, :columns] for result in results)

    def _score_packed(self, model, ids, mask, columns, **kwargs):
        """Rows joined end to end as one row whose positions start anew; scores are scattered back to `(B, C)`."""
        real, is_completion = mask.bool(), mask.bool()
        is_completion[:, :-columns] = False
        groups = [tuple(range(len(ids)))]
        if not torch.is_grad_enabled():
            groups = group_rows("packed", real.sum(dim=1).tolist(), ids.size(1), self.setting)
        parts = []
        for rows in groups:
            index = torch.tensor(rows, device=ids.device)
            chosen = real[index]
            changes = {"attention_mask": None, "position_ids": (chosen.cumsum(dim=1) - 1)[chosen][None]}
            unscored = ~is_completion[index][chosen][None]

            def pack(module, args, inputs, changes=changes, unscored=unscored):
                return args, {**inputs, **changes, "labels": inputs["labels"].masked_fill(unscored, -100)}

            joined = ids[index][chosen][None]
            handle = model.register_forward_pre_hook(pack, with_kwargs=True)
            try:
                scores = GRPOTrainer._get_per_token_logps_and_entropies(
                    self, model, joined, torch.ones_like(joined), joined.size(1) - 1, **kwargs
                )
            finally:
                handle.remove()
            empty = torch.zeros(chosen.shape, device=ids.device)
            parts.append(
                [
                    score
                    if score is None
                    else empty.to(score.dtype).masked_scatter(chosen, torch.nn.functional.pad(score, (1, 0)))[
                        :, -columns:
                    ]
                    for score in scores
                ]
            )
        return restore_rows(parts, groups)

    def now(self) -> float:
        """Seconds. On a CPU, seconds of this process's processor time, because other work may share the machine."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def count(self, module, args, inputs) -> None:
        phase = "policy" if torch.is_grad_enabled() else "scoring"
        self.meter.forwarded_tokens[phase] += inputs["input_ids"].numel()
        if phase == "policy":
            self.meter.micro_batches += 1
            self.meter.real_tokens += int(inputs["attention_mask"].sum())


def saved_for_backward(model: torch.nn.Module):
    """Context manager: bytes of each storage that autograd keeps for the backward, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    class Recording(torch.autograd.graph.saved_tensors_hooks):
        def __enter__(self):
            super().__enter__()
            return storages

    return Recording(pack, lambda tensor: tensor)


class Switch(TrainerCallback):
    """Sets the layout before each step and writes down what the step took."""

    def __init__(self, schedule: Sequence[str]):
        self.schedule, self.runs = list(schedule), []

    def on_step_begin(self, args, state, control, **kwargs):
        trainer = self.trainer
        trainer.meter = Meter(self.schedule[state.global_step])
        if trainer.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.started_wall, self.started = time.perf_counter(), trainer.now()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        meter, total = self.trainer.meter, self.trainer.now() - self.started
        wall = time.perf_counter() - self.started_wall
        squares = [p.grad.double().pow(2).sum() for p in model.parameters() if p.grad is not None]
        if self.trainer.accelerator.device.type == "cuda":
            meter.peak_mib = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        self.runs.append(
            {
                "layout": meter.layout,
                "scoring_s": round(meter.scoring_s, 4),
                "policy_s": round(total - meter.generation_s, 4),
                "step_wall_s": round(wall, 4),
                "scoring_tokens": meter.forwarded_tokens["scoring"],
                "policy_tokens": meter.forwarded_tokens["policy"],
                "real_tokens": meter.real_tokens,
                "micro_batches": meter.micro_batches,
                "saved_mib": round(meter.saved_mib, 1),
                "peak_mib": meter.peak_mib,
                "grad_norm": torch.stack(squares).sum().sqrt().item(),
            }
        )


def make_trainer(spec: Model, rows: Sequence[Row], profile: Profile, setting: Setting, switch: Switch, model=None):
    """A trainer that gets `rows` in every step."""
    vocab = spec.config["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    ids = [[torch.randint(EOS + 1, vocab, (n,), generator=generator).tolist() for n in row] for row in rows]
    rollouts = {"prompt_ids": [p for p, _ in ids], "completion_ids": [c for _, c in ids], "logprobs": None}
    args = PadminGRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="benchmark-"),
        use_cpu=spec.device == "cpu",
        bf16=spec.device == "cuda",
        gradient_checkpointing=spec.device == "cuda",
        per_device_train_batch_size=len(rows),
        gradient_accumulation_steps=1,
        num_generations=GENERATIONS,
        max_completion_length=max(c for _, c in rows),
        max_steps=len(switch.schedule),
        learning_rate=0.0,
        optim="sgd",
        max_grad_norm=0.0,
        disable_dropout=True,
        shuffle_dataset=False,
        overhead_tokens=setting.scaled_overhead,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = LayoutTrainer(
        model=model or make_model(spec),
        reward_funcs=lambda completion_ids, **kwargs: [float(ids[0] % 7) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_dict(
            {"prompt": [str(2 + i % 50) for i in range(len(rows) * len(switch.schedule))]}
        ),
        processing_class=make_tokenizer(),
        rollout_func=lambda prompts, trainer: rollouts,
        callbacks=[switch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.beta, trainer.ref_model = 0.04, trainer.model
    trainer.setting, trainer.profile, switch.trainer = setting, profile, trainer
    trainer.model.register_forward_pre_hook(trainer.count, with_kwargs=True)
    return trainer


def time_rounds(
    spec: Model, rows: Sequence[Row], profile: Profile, setting: Setting, layouts: Sequence[str], rounds: int
) -> tuple[list[dict], int]:
    """One step to warm up, then `rounds` rounds of all layouts (`config_max` in the first one only).

    Returns:
        The steps in the order they ran, without the first, and the number of threads.

    Raises:
        `RuntimeError`: a layout forwarded other tokens than it should, or computed another gradient.
    """
    transformers.utils.logging.set_verbosity_error()
    if spec.device == "cpu":
        torch.set_num_threads(1)
    later = [layout for layout in layouts if layout != "config_max"]
    schedule = ["ours", *layouts]
    for turn in range(1, rounds):
        schedule += later[turn % len(later) :] + later[: turn % len(later)]
    switch = Switch(schedule)
    # Rows stay in their order, else `truncate` has other micro-batches in each step.
    with patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch):
        make_trainer(spec, rows, profile, setting, switch).train()
    _, *runs = switch.runs
    check(runs, rows, profile, setting, tolerance=1e-3 if spec.device == "cpu" else 0.05)
    return runs, torch.get_num_threads()


def check(runs: Sequence[dict], rows: Sequence[Row], profile: Profile, setting: Setting, tolerance: float) -> None:
    """Raises `RuntimeError` unless each step forwarded what its layout says and all gradients agree."""
    real = sum(map(sum, rows))
    for run in runs:
        expected = count_tokens(run["layout"], rows, profile, setting)
        found = {"forwarded_tokens": run["policy_tokens"], "micro_batches": run["micro_batches"]}
        if {name: expected[name] for name in found} != found or run["real_tokens"] not in (real, 0):
            raise RuntimeError(f"`{run['layout']}` forwarded {found}, {run['real_tokens']} real; expected {expected}.")
        error = abs(run["grad_norm"] / runs[0]["grad_norm"] - 1)
        if error > tolerance:
            raise RuntimeError(f"`{run['layout']}` has another gradient: norm {run['grad_norm']}, {error:.1e} off.")


def time_micro_batches(spec: Model, rounds: int) -> tuple[int, dict]:
    """Times forward and backward of micro-batches of several sizes, in turn."""
    if spec.device == "cpu":
        torch.set_num_threads(1)
    model = make_model(spec).train()
    shapes = [(rows, width) for width in (16, 32, 64) for rows in (1, 2, 4, 8)]
    if spec.device == "cuda":
        shapes = [(rows, width) for width in (256, 1024, 4096) for rows in (1, 2, 4)]
    samples = []
    for turn in range(rounds + 1):
        for rows, width in shapes:
            ids = torch.randint(EOS + 1, spec.config["vocab_size"], (rows, width), device=model.device)
            torch.cuda.synchronize() if spec.device == "cuda" else None
            clock = time.perf_counter if spec.device == "cuda" else time.process_time
            started = clock()
            hidden = model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
            model.lm_head(hidden).float().logsumexp(dim=-1).sum().backward()
            torch.cuda.synchronize() if spec.device == "cuda" else None
            if turn:  # the first one warms up
                samples.append({"rows": rows, "width": width, "s": round(clock() - started, 5)})
    return torch.get_num_threads(), {"samples": samples}
