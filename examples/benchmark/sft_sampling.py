"""Tokens that `SFTTrainer` forwards with transformers' sampling strategies, and with trl_padmin, on the same data.

```sh
python examples/benchmark/sft_sampling.py --rows 512 --mean 256 --longest 1024
```

Every forward of a tiny model is counted by a hook. Two data sets with the same rows: tokenized without padding, and
with `padding="max_length"`, where labels are -100 on padding. `group_by_length` changes which rows share an optimizer
step; the others keep each step's rows, but `batch_rebalance` draws them by a shuffle of its own.
"""

import argparse
import contextlib
import io
import tempfile

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models
from trl import SFTConfig, SFTTrainer

import trl_padmin


VOCAB, PAD, EOS = 64, 0, 1
STRATEGIES = {
    "stock, `random`": (SFTTrainer, SFTConfig, {}),
    "stock, `group_by_length`": (SFTTrainer, SFTConfig, {"train_sampling_strategy": "group_by_length"}),
    "stock, `batch_rebalance`": (SFTTrainer, SFTConfig, {"train_sampling_strategy": "batch_rebalance"}),
    "trl_padmin, `random`": (trl_padmin.SFTTrainer, trl_padmin.SFTConfig, {}),
}


def draw_rows(rows: int, mean: int, longest: int, sigma: float) -> list[list[int]]:
    """Random ids; lengths are lognormal."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(rows, generator=generator).mul(sigma).exp()
    lengths = (drawn * mean / drawn.mean()).round().clamp(2, longest).int().tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]], width: int) -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [row + [PAD] * (width - len(row)) for row in rows],
            "labels": [row + [-100] * (width - len(row)) for row in rows],
        }
    )


def tokens_forwarded(strategy: str, dataset: Dataset, longest: int, args: argparse.Namespace) -> tuple[int, int, int]:
    """Tokens, rows and micro-batches of one epoch."""
    trainer_class, config_class, options = STRATEGIES[strategy]
    inner = Tokenizer(models.WordLevel({"<pad>": PAD, "<eos>": EOS}, unk_token="<eos>"))
    config = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=longest,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trainer_class(
            model=transformers.Qwen2ForCausalLM(config),
            args=config_class(
                output_dir=tempfile.mkdtemp(),
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                num_train_epochs=1,
                max_length=None,
                per_device_train_batch_size=args.batch_size,
                gradient_accumulation_steps=args.accumulation,
                **options,
            ),
            train_dataset=dataset,
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
            ),
        )
        shapes = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
        )
        trainer.train()
    return sum(shape.numel() for shape in shapes), sum(rows for rows, _ in shapes), len(shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--mean", type=int, default=256, help="mean length in tokens")
    parser.add_argument("--longest", type=int, default=1024, help="longest length in tokens")
    parser.add_argument("--sigma", type=float, default=0.7, help="spread of the lengths' logarithm")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=8)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    disable_progress_bars()

    rows = draw_rows(args.rows, args.mean, args.longest, args.sigma)
    real = sum(map(len, rows))
    print(
        f"{args.rows} rows, {real:,} real tokens, longest {max(map(len, rows)):,}; {args.batch_size} rows a batch, "
        f"{args.accumulation} accumulation steps; one epoch, one rank.\n"
    )
    print("| sampling | no padding in the data set | micro-batches | padded to the longest | micro-batches |")
    print("|---|---:|---:|---:|---:|")
    for strategy in STRATEGIES:
        cells = []
        for dataset in (Dataset.from_dict({"input_ids": rows}), padded(rows, args.longest)):
            tokens, seen, forwards = tokens_forwarded(strategy, dataset, args.longest, args)
            note = "" if seen == args.rows else f" ({seen} rows)"
            cells += [f"{tokens:,} ({tokens / real:.3f} x real){note}", str(forwards)]
        print(f"| {strategy} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
