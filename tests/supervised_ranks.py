"""What each of several ranks finds when it trains stock TRL and ours on the same data; `test_supervised.py` judges it.

    torchrun --standalone --nproc_per_node 2 tests/supervised_ranks.py OUTPUT_FOLDER

Each rank writes one JSON file, then leaves without tearing down the process group: gloo sometimes aborts there, after
all is done.
"""

import json
import os
import sys
from pathlib import Path


os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

import torch
import torch.distributed as dist
import transformers
import trl.trainer.utils as trl_utils
from harness import relative_error
from test_supervised import Float64Head, compare, preference, prompt_completion
from trl import DPOTrainer, SFTTrainer

from trl_padmin import collators, supervised


# Ranks take the batches of 4 rows in turn: one has rows of like length, and needs fewer micro-batches than the other.
LENGTHS = (2, 40, 11, 25, 9, 9, 9, 9) * 4


def figures(trainer_class: type, dataset) -> dict:
    split_up_to, proposed = supervised.split_up_to, []

    def recorded(count, groups, lengths):
        proposed.append([len(groups), count])
        return split_up_to(count, groups, lengths)

    supervised.split_up_to = recorded
    stock, ours = compare(
        trainer_class,
        dataset,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
    )
    supervised.split_up_to = split_up_to
    return {
        "proposed": proposed,
        "gradient_error": max(map(relative_error, ours.gradients, stock.gradients)),
        "losses": [stock.losses, ours.losses],
        "tokens": [stock.forwarded, ours.forwarded],
        "forwards": len(ours.shapes),
        "num_tokens": [[log["num_tokens"] for log in run.logs[:-1]] for run in (stock, ours)],
        "stats": [ours.trainer.padding_stats.forwarded_tokens, ours.trainer.padding_stats.rows],
    }


def error_of_one_rank() -> str:
    """A batch that cannot be narrowed, on one rank only."""
    narrow = supervised.narrow

    def failing(batch, **kwargs):
        if dist.get_rank() == 1:
            raise ValueError("`weights` is not known")
        return narrow(batch, **kwargs)

    supervised.narrow = failing
    try:
        figures(SFTTrainer, prompt_completion(LENGTHS))
    except ValueError as error:
        return str(error)
    finally:
        supervised.narrow = narrow
    return ""


def main(folder: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    collators.logger.setLevel("ERROR")
    torch.set_num_threads(1)
    trl_utils._ChunkedLogProbFunction = Float64Head
    found = {
        "sft": figures(SFTTrainer, prompt_completion(LENGTHS)),
        "dpo": figures(DPOTrainer, preference(LENGTHS)),
        "error": error_of_one_rank(),
        "ranks": dist.get_world_size(),
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
