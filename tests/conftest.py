import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func is how rows are fed here

import pytest
import torch
import transformers
import trl.trainer.utils as trl_utils
from harness import Float64Head


transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # tiny models: threads cost more than they give


@pytest.fixture
def float64_head(monkeypatch):
    """TRL's fused head (from 1.15 on) accumulates in float32; equalities are shown beyond that precision."""
    if hasattr(trl_utils, "_ChunkedLogProbFunction"):
        monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Float64Head)


def pytest_terminal_summary(terminalreporter):
    import sys

    parity = sys.modules.get("test_parity")
    if parity is not None and parity.worst_errors:
        name, error = max(parity.worst_errors.items(), key=lambda item: item[1])
        count = len(parity.worst_errors)
        terminalreporter.write_line(
            f"parity: {count} configurations, worst relative gradient error {error:.1e} ({name})"
        )
