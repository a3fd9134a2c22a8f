"""GRPO as a TRL script: swap the marked import for `from trl import GRPOConfig, GRPOTrainer` and it is stock.

```sh
pip install -e ".[demo]"
python examples/grpo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B \\
    --task chain_sum --prompts 1000 \\
    --output_dir grpo-chain-sum \\
    --num_generations 8 --per_device_train_batch_size 8 --gradient_accumulation_steps 8 \\
    --max_completion_length 2048 --beta 0.04 --logging_steps 1 \\
    --token_budget 32768
```

On one node of eight GPUs, replace `python` by
`accelerate launch --config_file examples/accelerate_configs/fsdp2.yaml`.
"""

from dataclasses import dataclass, field

import reasoning_gym
from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config

from trl_padmin import GRPOConfig, GRPOTrainer  # the one line that changes


@dataclass
class ScriptArguments:
    """Which task of reasoning-gym to train on."""

    task: str = field(default="chain_sum", metadata={"help": "Name of a reasoning-gym task."})
    prompts: int = field(default=1000, metadata={"help": "Number of prompts."})
    eval_prompts: int = field(default=0, metadata={"help": "Number of prompts to evaluate on."})
    instruction: str = field(
        default="Think step by step, then give the final answer between <answer> and </answer>.",
        metadata={"help": "Appended to every question."},
    )


def main(script_args: ScriptArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    size = script_args.prompts + script_args.eval_prompts
    task = reasoning_gym.create_dataset(script_args.task, size=size, seed=training_args.seed)
    prompts = [[{"role": "user", "content": f"{item['question']}\n{script_args.instruction}"}] for item in task]
    dataset = Dataset.from_dict({"prompt": prompts, "index": range(size)})

    def correctness(completions, index, **kwargs) -> list[float]:
        """The task's own score of what stands in the answer tags, 0 to 1."""
        answers = [reasoning_gym.utils.extract_answer(completion[0]["content"]) for completion in completions]
        return [task.score_answer(answer, task[i]) for answer, i in zip(answers, index, strict=True)]

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=correctness,
        args=training_args,
        train_dataset=dataset.select(range(script_args.prompts)),
        eval_dataset=dataset.select(range(script_args.prompts, size)) if script_args.eval_prompts else None,
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config())
