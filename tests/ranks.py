"""What each of several ranks finds when it runs stock TRL and ours on the same rows; `test_ranks.py` judges it.

    torchrun --standalone --nproc_per_node 2 tests/ranks.py ddp OUTPUT_FOLDER

Each rank writes one JSON file with its figures, then leaves without tearing down the process group: gloo sometimes
aborts there, after all is done.
"""

import json
import os
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path


SHARDING = {
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen2DecoderLayer",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "ACCELERATE_USE_FSDP": "true",
}
ENVIRONMENT = {
    "ddp": {},
    "fsdp2": {**SHARDING, "FSDP_VERSION": "2"},
    "fsdp1": {
        **SHARDING,
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "false",
    },
    "zero2": {"DS_ACCELERATOR": "cpu"},
    "zero3": {"DS_ACCELERATOR": "cpu"},
}
BACKEND = sys.argv[1] if __name__ == "__main__" else "ddp"
os.environ.update(ENVIRONMENT[BACKEND], OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
import torch.distributed as dist
import transformers
import trl.trainer.utils as trl_utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType
from harness import Float64Head, Row, make_rows, relative_error, run, tiny_model
from torch.distributed.fsdp import FullyShardedDataParallel
from trl import GRPOTrainer

from trl_padmin import PaddingMinimizationMixin, PadminGRPOConfig, PadminGRPOTrainer
from trl_padmin.compat import metrics_captured
from trl_padmin.distributed import RowExchange
from trl_padmin.layout import select_rows


def shard_on_the_cpu() -> None:
    """Accelerate shards on GPUs only; the same code runs on gloo ranks once the state says so."""
    initialize = AcceleratorState.__init__

    def initialize_sharded(self, *args, fsdp_plugin=None, **kwargs):
        initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if self.distributed_type == DistributedType.MULTI_CPU and vars(self).get("fsdp_plugin") is not None:
            self.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = initialize_sharded

    # Accelerate names the device `cpu:0`, which FSDP1 takes for another than `cpu`.
    wrap = FullyShardedDataParallel.__init__

    def wrap_on_the_cpu(self, *args, device_id=None, **kwargs):
        wrap(self, *args, device_id=torch.device("cpu"), **kwargs)

    FullyShardedDataParallel.__init__ = wrap_on_the_cpu
    # It computes the norm in float32, which float64 gradients refuse; it is logged only, since nothing is clipped.
    FullyShardedDataParallel.clip_grad_norm_ = lambda self, *args, **kwargs: torch.zeros(())


def deepspeed_config() -> dict:
    zero = {"stage": int(BACKEND[-1]), "overlap_comm": False, "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
    }


RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BACKEND_OPTIONS = {"ddp_timeout": 90}
if BACKEND.startswith("zero"):
    BACKEND_OPTIONS["deepspeed"] = deepspeed_config()
    # Its gradients are gone when they can be looked at, and its weights are float32: a step as large as the weights
    # shows the gradient in them.
    BACKEND_OPTIONS["learning_rate"] = 10.0


def rows_of_rank(name: str) -> list[Row]:
    """8 rows for this rank, 2 per stock micro-batch; the ranks are as unlike as can be."""
    is_long = RANK % 2 == 1
    completions, prompts = {
        "one short, one long": ((2, 3, 2, 4, 1, 2, 3, 2), (3, 4, 5, 3, 4, 5, 3, 4))
        if not is_long
        else ((40, 35, 30, 38, 25, 33, 40, 29), (11, 9, 7, 11, 9, 8, 10, 7)),
        "one outlier": ((2, 3, 17, 20, 1, 9, 9, 60 if is_long else 5), (3, 11, 5, 7, 3, 11, 5, 7)),
    }[name]
    return make_rows(completions, prompts, seed=RANK)


def small_model():
    """In float64, but for ZeRO-3, whose linear layers compute in float32 whatever the model is in."""
    return tiny_model(dtype=torch.float32 if BACKEND == "zero3" else torch.float64)


def both(rows, *, make_model=small_model, stock_class=GRPOTrainer, ours_class=PadminGRPOTrainer, **options):
    """Stock and ours on the rows of this rank."""
    own = {k: options.pop(k) for k in ("token_budget", "overhead_tokens", "balance_across_ranks") if k in options}
    options = {**BACKEND_OPTIONS, **options}
    stock = run(stock_class, rows, make_model(), **options)
    stock_parameters = parameters(stock)
    ours = run(ours_class, rows, make_model(), config_class=PadminGRPOConfig, **options, **own)
    return stock, ours, difference(stock, ours, stock_parameters, parameters(ours))


def parameters(result) -> dict[str, torch.Tensor]:
    """All weights after training, gathered from the ranks; FSDP1 segfaults there, and gives its own shard."""
    trainer = result.trainer
    if BACKEND == "fsdp1":
        return {name: p.detach().double().clone() for name, p in trainer.model_wrapped.named_parameters()}
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {name: value.double() for name, value in state.items()} if state else {}


def difference(stock, ours, stock_parameters, our_parameters) -> dict[str, float]:
    """Errors of the gradients, where they can be seen, and of the weights that they lead to."""
    found = {"weights": relative_error(our_parameters, stock_parameters) if stock_parameters else 0.0}
    found["weights_moved"] = len(stock_parameters)
    if any(stock.gradients):
        found["gradients"] = max(map(relative_error, ours.gradients, stock.gradients))
        found["gradient_norm"] = max(float(g.norm()) for g in stock.gradients[0].values())
    found["loss"] = max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True))
    return found


def forwards(result) -> dict[str, int]:
    """How many forwards this rank ran, and how many tokens they had."""
    policy = [f for f in result.forwards if f["grad"]]
    return {
        "scoring": len(result.forwards) - len(policy) + len(result.reference_forwards),
        "policy": len(policy),
        "policy_tokens": sum(f["ids"].numel() for f in policy),
        "real_tokens": sum(int(f["mask"].sum()) for f in policy),
    }


def wrapped(result) -> dict:
    model, accelerator = result.trainer.model_wrapped, result.trainer.accelerator
    return {
        "world_size": accelerator.num_processes,
        "distributed_type": str(accelerator.distributed_type),
        "wrapped": [base.__name__ for base in type(model).__mro__],
    }


@contextmanager
def counted_collectives():
    """Counts what the ranks exchange through Python: metrics, agreements, rows. Gradients are not counted."""
    counts, originals = Counter(), {}
    names = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single")
    for name in names:
        originals[name] = getattr(dist, name)

        def counting(*args, _name=name, **kwargs):
            counts[_name] += 1
            return originals[_name](*args, **kwargs)

        setattr(dist, name, counting)
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def of_losses(loss_types, **options):
    found = {}
    for loss_type in loss_types:
        for rows in ("one short, one long", "one outlier"):
            _, ours, errors = both(rows_of_rank(rows), loss_type=loss_type, **options)
            found[f"{loss_type}, {rows}"] = {**errors, **forwards(ours)}
    return found


@check
def balanced():
    """The default: rows move between ranks."""
    steps = 1 if BACKEND.startswith("zero") else 2
    return of_losses(["dapo", "grpo", "vespo"], num_iterations=2, steps_per_generation=4, optimizer_steps=steps)


@check
def on_their_ranks():
    options = {"balance_across_ranks": False, "token_budget": 60, "num_iterations": 2, "steps_per_generation": 4}
    return of_losses(["dapo", "luspo", "bnpo"], **options)


@check
def lighter_and_heavier_ranks_balanced_and_not():
    rows, found = rows_of_rank("one short, one long"), {}
    for balance in (True, False):
        _, ours, errors = both(rows, balance_across_ranks=balance, overhead_tokens=0, num_iterations=2)
        logged = {key: value for key, value in ours.logs[0].items() if key.startswith("padding/")}
        found["balanced" if balance else "not"] = {**errors, **forwards(ours), **logged}
    return found


@check
def one_rank_all_truncated():
    # No completion of rank 1 ends in eos, so all of its tokens are masked.
    rows = rows_of_rank("one outlier")
    if RANK % 2 == 1:
        rows = [Row(row.prompt, tuple(token if token != 1 else 2 for token in row.completion)) for row in rows]
    _, ours, errors = both(rows, mask_truncated_completions=True, num_iterations=2)
    return {"truncated": {**errors, **forwards(ours)}}


@check
def one_row_each():
    rows = rows_of_rank("one short, one long")[:1]
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    _, ours, errors = both(rows, **options, num_generations=RANKS, num_iterations=2)
    return {"one row": {**errors, **forwards(ours)}}


@check
def a_lost_row():
    """Negative control: the last row to arrive is replaced by the one before."""
    deliver = RowExchange.deliver

    def losing(self, batch):
        arrived = deliver(self, batch)
        rows = [*range(len(self.runs) - 1), len(self.runs) - 2]
        return {key: value if value is None or value.dim() == 0 else value[rows] for key, value in arrived.items()}

    RowExchange.deliver = losing
    try:
        _, _, errors = both(rows_of_rank("one outlier"))
    finally:
        RowExchange.deliver = deliver
    return {"lost": errors}


class _Shrinking(GRPOTrainer):
    """A subclass that leaves rank 1 one row in each stock micro-batch."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        if RANK == 1 and len(inputs["prompt_ids"]) > 1:
            self._buffered_inputs = [select_rows(batch, [0]) for batch in self._buffered_inputs]
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs


class _ShrinkingStock(_Shrinking):
    """Stock aborts when it gathers metrics of unequal rows, so here they stay on their rank."""

    def _compute_loss(self, model, inputs):
        with metrics_captured(self):
            return super()._compute_loss(model, inputs)


class _ShrinkingOurs(PaddingMinimizationMixin, _Shrinking):
    pass


@check
def fewer_rows_than_micro_batches():
    rows = rows_of_rank("one short, one long")
    classes = {"stock_class": _ShrinkingStock, "ours_class": _ShrinkingOurs}
    _, ours, errors = both(rows, **classes, token_budget=1, loss_type="dapo")
    return {"fewer rows": {**errors, **forwards(ours)}}


@check
def pooled_metrics():
    options = {"num_iterations": 2, "optimizer_steps": 2, "epsilon": 1e-3, "learning_rate": 0.3, "token_budget": 50}
    stock, ours, errors = both(rows_of_rank("one outlier"), **options)
    return {"metrics": {**errors, "stock": stock.logs[1], "ours": ours.logs[1]}}


@check
def collectives():
    found = {}
    for steps in (4, 8):
        options = {"gradient_accumulation_steps": steps, "num_iterations": 2, "beta": 0.0, **BACKEND_OPTIONS}
        rows = rows_of_rank("one outlier") * (steps // 4)
        for name, trainer_class, own in (
            ("stock", GRPOTrainer, {}),
            ("ours", PadminGRPOTrainer, {"config_class": PadminGRPOConfig}),
            (
                "ours, not balanced",
                PadminGRPOTrainer,
                {"config_class": PadminGRPOConfig, "balance_across_ranks": False},
            ),
        ):
            with counted_collectives() as counts:
                run(trainer_class, rows, small_model(), **options, **own)
            found[f"{name}, {steps}"] = dict(counts)
    return found


@check
def gradient_synchronizations():
    """How often gradients are exchanged in a window, whatever its number of micro-batches."""
    found = {}
    for name, trainer_class, own in (
        ("stock", GRPOTrainer, {}),
        ("ours", PadminGRPOTrainer, {"config_class": PadminGRPOConfig, "token_budget": 30}),
    ):
        with counted_synchronizations() as (count, callback):
            result = run(
                trainer_class,
                rows_of_rank("one outlier"),
                small_model(),
                callbacks=[callback],
                **BACKEND_OPTIONS,
                **own,
            )
        found[name] = {"synchronizations": count["synchronizations"], **forwards(result)}
    return found


@contextmanager
def counted_synchronizations():
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    count = Counter()

    class CountBuckets(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            model = kwargs["model"] if "model_wrapped" not in kwargs else kwargs["model_wrapped"]
            wrapper = _wrappers.get(id(model), model)
            if BACKEND == "ddp" and isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):

                def hook(state, bucket):
                    count["synchronizations"] += 1
                    work = dist.all_reduce(bucket.buffer(), async_op=True)
                    return work.get_future().then(lambda future: future.value()[0].div_(RANKS))

                wrapper.register_comm_hook(None, hook)

    _wrappers = {}
    prepare = Accelerator.prepare

    def remembering(self, *args, **kwargs):
        prepared = prepare(self, *args, **kwargs)
        for model in prepared if isinstance(prepared, tuple) else (prepared,):
            if isinstance(model, torch.nn.parallel.DistributedDataParallel):
                _wrappers[id(model.module)] = model
            elif hasattr(model, "allreduce_gradients"):  # DeepSpeed's engine
                step = model.step

                def counting_step(*args, _step=step, **kwargs):
                    count["synchronizations"] += 1
                    return _step(*args, **kwargs)

                model.step = counting_step
        return prepared

    reduce_scatter = _fsdp_collectives.foreach_reduce

    def counting(*args, **kwargs):
        count["synchronizations"] += 1
        return reduce_scatter(*args, **kwargs)

    Accelerator.prepare = remembering
    targets = [_fsdp_collectives]
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    targets.append(_fsdp_param_group)
    for target in targets:
        target.foreach_reduce = counting
    try:
        yield count, CountBuckets()
    finally:
        Accelerator.prepare = prepare
        for target in targets:
            target.foreach_reduce = reduce_scatter


@check
def gradient_checkpointing():
    _, ours, errors = both(
        rows_of_rank("one outlier"),
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        num_iterations=2,
    )
    return {"checkpointing": {**errors, **forwards(ours)}}


@check
def peft():
    from peft import LoraConfig

    def make(**overrides):
        return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)}

    rows = rows_of_rank("one outlier")
    options = {**BACKEND_OPTIONS, "beta": 0.1, "num_iterations": 2, "optimizer_steps": 2}
    torch.manual_seed(0)
    stock = run(GRPOTrainer, rows, small_model(), trainer_kwargs=make(), **options)
    torch.manual_seed(0)
    ours = run(PadminGRPOTrainer, rows, small_model(), config_class=PadminGRPOConfig, trainer_kwargs=make(), **options)
    return {"lora": {**difference(stock, ours, {}, {}), **forwards(ours)}}


@check
def reference_model():
    def make():
        model = tiny_model()
        path = [model.config._name_or_path]
        dist.broadcast_object_list(path)  # only rank 0 writes the model that TRL loads as the reference
        model.config._name_or_path = path[0]
        return model

    _, ours, errors = both(rows_of_rank("one short, one long"), make_model=make, beta=0.1, num_iterations=2)
    return {"reference": {**errors, **forwards(ours)}}


@check
def an_error_on_one_rank():
    class Corrupting(PadminGRPOTrainer):
        def _prepare_inputs(self, generation_batch):
            inputs = super()._prepare_inputs(generation_batch)
            if RANK == 1:
                inputs["surprise"] = torch.zeros(len(inputs["prompt_ids"]))
            return inputs

    try:
        run(Corrupting, rows_of_rank("one outlier"), small_model(), config_class=PadminGRPOConfig, **BACKEND_OPTIONS)
    except Exception as error:
        return {"error": {"type": type(error).__name__, "message": str(error)}}
    return {"error": None}


# Sharded models cannot be turned to float64 behind TRL's back, nor is a sharded LoRA of interest here. FSDP1 and
# DeepSpeed exchange parameters and gradients through Python, where they cannot be told from what is counted.
SHARDED = {"reference_model", "peft"}
SKIPPED = {
    "fsdp2": SHARDED,
    "fsdp1": {*SHARDED, "gradient_synchronizations", "collectives"},
    "zero2": {*SHARDED, "collectives"},
    "zero3": {*SHARDED, "collectives"},
}


def main() -> None:
    output = Path(sys.argv[2])
    chosen = sys.argv[3:] or [name for name in CHECKS if name not in SKIPPED.get(BACKEND, ())]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if BACKEND.startswith("fsdp"):
        shard_on_the_cpu()
    if hasattr(trl_utils, "_ChunkedLogProbFunction"):
        trl_utils._ChunkedLogProbFunction = Float64Head
    first = run(GRPOTrainer, rows_of_rank("one outlier"), small_model(), **BACKEND_OPTIONS)
    verdict = {**wrapped(first), "checks": {}}
    for name in chosen:
        try:
            verdict["checks"][name] = CHECKS[name]()
        except Exception:
            verdict["checks"][name] = {"failed": traceback.format_exc()}
        (output / f"rank{RANK}.json").write_text(json.dumps(verdict, indent=1, default=str))
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
