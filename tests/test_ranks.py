"""Several ranks for real: each back end is launched once, runs the checks of `ranks.py`, and is judged here.

DDP and FSDP2 run by default. `pytest -m more_backends` runs DDP on four ranks, FSDP1 and DeepSpeed ZeRO-2 and ZeRO-3.

Not exercised here: NCCL, GPUs, several nodes, tensor or context parallelism, images on several ranks.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


TESTS = Path(__file__).parent
TIME_LIMIT_S = 480
BACKENDS = {  # name: ranks, distributed type, class that wraps the model
    "ddp": (2, "MULTI_CPU", "DistributedDataParallel"),
    "fsdp2": (2, "FSDP", "FSDPModule"),
    "ddp4": (4, "MULTI_CPU", "DistributedDataParallel"),
    "fsdp1": (2, "FSDP", "FullyShardedDataParallel"),
    "zero2": (2, "DEEPSPEED", "DeepSpeedEngine"),
    "zero3": (2, "DEEPSPEED", "DeepSpeedEngine"),
}
MORE = ("ddp4", "fsdp1", "zero2", "zero3")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(TIME_LIMIT_S + 60)]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.more_backends if name in MORE else ()) for name in BACKENDS],
)
def ranks(request, tmp_path_factory):
    """What each rank found, rank by rank."""
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    count, distributed_type, wrapper = BACKENDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    script = [str(TESTS / "ranks.py"), request.param.removesuffix("4"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launched = subprocess.run(
        [*command, *script], env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    files = sorted(folder.glob("rank*.json"))
    assert len(files) == count, launched.stderr[-3000:]
    found = [json.loads(file.read_text()) for file in files]
    for rank in found:
        assert rank["world_size"] == count
        assert rank["distributed_type"].endswith(distributed_type)
        assert wrapper in rank["wrapped"]
    return found


def found_by(ranks, check):
    """The figures of a check on each rank; skips where the back end does not run it."""
    if check not in ranks[0]["checks"]:
        pytest.skip(f"`{check}` is not run on this back end, see `SKIPPED` in ranks.py")
    figures = [rank["checks"].get(check, {"failed": "did not finish"}) for rank in ranks]
    for rank, figure in enumerate(figures):
        assert "failed" not in figure, f"rank {rank}: {figure['failed']}"
    return figures


EQUALITIES = (
    "balanced",
    "on_their_ranks",
    "lighter_and_heavier_ranks_balanced_and_not",
    "one_rank_all_truncated",
    "one_row_each",
    "fewer_rows_than_micro_batches",
    "pooled_metrics",
    "gradient_checkpointing",
    "peft",
    "reference_model",
)


@pytest.mark.parametrize("check", EQUALITIES)
def test_gradients_are_stocks_and_ranks_run_in_step(ranks, check):
    figures = found_by(ranks, check)
    is_float32 = ranks[0]["distributed_type"].endswith("DEEPSPEED")  # it reduces and steps in float32
    for case in figures[0]:
        of_ranks = [figure[case] for figure in figures]
        for rank in of_ranks:
            assert rank["loss"] <= 1e-6
            assert rank["weights"] <= (1e-6 if is_float32 else 1e-9)
            assert rank.get("gradients", 0.0) <= 1e-9
        assert any(rank["weights_moved"] or rank.get("gradient_norm") for rank in of_ranks)  # something was compared
        if "gradient_norm" in of_ranks[0]:
            assert max(rank["gradient_norm"] for rank in of_ranks) > 0
        for phase in ("scoring", "policy"):
            if phase in of_ranks[0]:
                assert len({rank[phase] for rank in of_ranks}) == 1, (case, phase)


def test_a_wrong_gradient_is_seen(ranks):
    """Negative control: rows that are lost on the way between ranks."""
    for figure in found_by(ranks, "a_lost_row"):
        assert figure["lost"].get("gradients", 1.0) > 1e-3
    assert max(figure["lost"]["weights"] for figure in found_by(ranks, "a_lost_row")) > 1e-5


def test_balancing_evens_out_what_ranks_forward(ranks):
    figures = found_by(ranks, "lighter_and_heavier_ranks_balanced_and_not")
    slowest = {kind: max(figure[kind]["policy_tokens"] for figure in figures) for kind in ("balanced", "not")}
    real = sum(figure["balanced"]["real_tokens"] for figure in figures) / len(figures)
    assert sum(figure["not"]["real_tokens"] for figure in figures) == real * len(figures)
    assert slowest["balanced"] <= 1.05 * real
    assert slowest["not"] >= 1.5 * real
    assert figures[0]["balanced"]["padding/rank_imbalance"] == pytest.approx(
        slowest["balanced"] * len(figures) / sum(figure["balanced"]["policy_tokens"] for figure in figures)
    )
    for kind in ("balanced", "not"):  # stock's tokens are those of the rows that a rank brought, wherever they ran
        assert figures[0][kind]["padding/pad_frac_stock"] == figures[0]["not"]["padding/pad_frac_stock"]
    assert figures[0]["balanced"]["padding/pad_frac_stock"] > 0


def test_gradients_are_exchanged_once_a_window(ranks):
    for figure in found_by(ranks, "gradient_synchronizations"):
        assert figure["ours"]["policy"] > figure["stock"]["policy"]
        assert figure["ours"]["synchronizations"] == figure["stock"]["synchronizations"] > 0


def test_collectives_do_not_grow_with_the_window(ranks):
    for figure in found_by(ranks, "collectives"):
        total = {name: sum(counts.values()) for name, counts in figure.items()}
        assert total["ours, 4"] == total["ours, 8"]
        assert total["ours, not balanced, 4"] == total["ours, not balanced, 8"]
        assert total["ours, 4"] < total["stock, 4"] < total["stock, 8"]


def test_metrics_are_pooled_over_all_rows_of_the_window(ranks):
    for figure in found_by(ranks, "pooled_metrics"):
        stock, ours = figure["metrics"]["stock"], figure["metrics"]["ours"]
        assert stock.keys() == {key for key in ours if not key.startswith("padding/")}
        assert 0 < ours["clip_ratio/region_mean"] < 1
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(stock[name], abs=1e-6)
    logged = [figure["metrics"]["ours"] for figure in found_by(ranks, "pooled_metrics")]
    names = [name for name in logged[0] if re.match(r"clip_ratio|entropy|padding", name)]
    assert all(rank[name] == logged[0][name] for rank in logged for name in names)
    assert all(math.isfinite(logged[0][name]) for name in names)


def test_an_error_on_one_rank_is_an_error_on_all(ranks):
    errors = [figure["error"] for figure in found_by(ranks, "an_error_on_one_rank")]
    assert errors[0] is not None and errors[0]["type"] == "TRLContractError"
    assert "surprise" in errors[0]["message"]
    assert all(error == errors[0] for error in errors)
