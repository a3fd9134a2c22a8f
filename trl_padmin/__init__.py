"""GRPO without padding: TRL's `GRPOTrainer` with its rows in micro-batches of similar length.

```python
from trl_padmin import GRPOConfig, GRPOTrainer  # the one line that changes
```

Importing this package loads neither torch nor trl, and changes nothing in either.
"""

from importlib import import_module


__version__ = "0.1.0"

_EXPORTS = {
    "GRPOConfig": ("config", "PadminGRPOConfig"),
    "GRPOTrainer": ("trainer", "PadminGRPOTrainer"),
    "MicroBatchPlan": ("planning", "MicroBatchPlan"),
    "PaddingMinimizationMixin": ("trainer", "PaddingMinimizationMixin"),
    "PaddingMinimizationOptions": ("config", "PaddingMinimizationOptions"),
    "PaddingStats": ("stats", "PaddingStats"),
    "PadminGRPOConfig": ("config", "PadminGRPOConfig"),
    "PadminGRPOTrainer": ("trainer", "PadminGRPOTrainer"),
    "PadminRLOOConfig": ("config", "PadminRLOOConfig"),
    "PadminRLOOTrainer": ("trainer", "PadminRLOOTrainer"),
    "RLOOConfig": ("config", "PadminRLOOConfig"),
    "RLOOTrainer": ("trainer", "PadminRLOOTrainer"),
    "TRLContractError": ("compat", "TRLContractError"),
    "plan_micro_batches": ("planning", "plan_micro_batches"),
    "plot_padding": ("plotting", "plot_padding"),
}

__all__ = list(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
