"""GRPO without padding: TRL's `GRPOTrainer` with its rows in micro-batches of similar length.

```python
from trl_padmin import GRPOConfig, GRPOTrainer  # the one line that changes
```

Importing this package loads neither torch nor trl, and changes nothing in either.
"""

from importlib import import_module


__version__ = "0.1.0"

_EXPORTS = {
    "ArchitectureProbe": ("probe", "ArchitectureProbe"),
    "DPOConfig": ("supervised", "PadminDPOConfig"),
    "DPOTrainer": ("supervised", "PadminDPOTrainer"),
    "GRPOConfig": ("config", "PadminGRPOConfig"),
    "GRPOTrainer": ("trainer", "PadminGRPOTrainer"),
    "MicroBatchPlan": ("planning", "MicroBatchPlan"),
    "PaddingMinimizationMixin": ("trainer", "PaddingMinimizationMixin"),
    "PaddingMinimizationOptions": ("config", "PaddingMinimizationOptions"),
    "PaddingMinimizingCollator": ("collators", "PaddingMinimizingCollator"),
    "PaddingStats": ("stats", "PaddingStats"),
    "PadminDPOConfig": ("supervised", "PadminDPOConfig"),
    "PadminDPOTrainer": ("supervised", "PadminDPOTrainer"),
    "PadminDataCollatorForLanguageModeling": ("collators", "PadminDataCollatorForLanguageModeling"),
    "PadminDataCollatorForPreference": ("collators", "PadminDataCollatorForPreference"),
    "PadminDataCollatorForSeq2Seq": ("collators", "PadminDataCollatorForSeq2Seq"),
    "PadminDataCollatorWithPadding": ("collators", "PadminDataCollatorWithPadding"),
    "PadminGRPOConfig": ("config", "PadminGRPOConfig"),
    "PadminGRPOTrainer": ("trainer", "PadminGRPOTrainer"),
    "PadminRLOOConfig": ("config", "PadminRLOOConfig"),
    "PadminRLOOTrainer": ("trainer", "PadminRLOOTrainer"),
    "PadminSFTConfig": ("supervised", "PadminSFTConfig"),
    "PadminSFTDataCollatorForLanguageModeling": ("collators", "PadminSFTDataCollatorForLanguageModeling"),
    "PadminSFTTrainer": ("supervised", "PadminSFTTrainer"),
    "RLOOConfig": ("config", "PadminRLOOConfig"),
    "RLOOTrainer": ("trainer", "PadminRLOOTrainer"),
    "SFTConfig": ("supervised", "PadminSFTConfig"),
    "SFTTrainer": ("supervised", "PadminSFTTrainer"),
    "SupervisedPaddingMinimizationMixin": ("supervised", "SupervisedPaddingMinimizationMixin"),
    "TRLContractError": ("compat", "TRLContractError"),
    "install": ("launcher", "install"),
    "installed": ("launcher", "installed"),
    "load_ipython_extension": ("launcher", "load_ipython_extension"),
    "minimize_padding": ("collators", "minimize_padding"),
    "plan_micro_batches": ("planning", "plan_micro_batches"),
    "plot_padding": ("plotting", "plot_padding"),
    "probe_architecture": ("probe", "probe_architecture"),
    "uninstall": ("launcher", "uninstall"),
    "unload_ipython_extension": ("launcher", "unload_ipython_extension"),
}

__all__ = list(_EXPORTS)


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    return getattr(import_module(f".{module}", __name__), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
