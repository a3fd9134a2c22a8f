"""Supervised fine-tuning as a TRL script: swap the marked import for `from trl import SFTConfig, SFTTrainer` and it is
stock.

```sh
pip install -e .
python examples/sft.py \\
    --model_name_or_path ai21labs/AI21-Jamba2-3B \\
    --dataset_name trl-lib/Capybara \\
    --output_dir sft-capybara \\
    --per_device_train_batch_size 8 --gradient_accumulation_steps 8 \\
    --max_length 8192 --logging_steps 1
```

On one node of eight GPUs, replace `python` by
`accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml`.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from trl_padmin import SFTConfig, SFTTrainer  # the one line that changes


def main(script_args: ScriptArguments, training_args: SFTConfig, model_args: ModelConfig) -> None:
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    trainer = SFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
