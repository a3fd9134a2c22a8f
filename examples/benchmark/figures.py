"""The figures of the benchmark page."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from layouts import LAYOUTS
from profiles import PROFILES

from trl_padmin.plotting import PAD_COLOR, REAL_COLOR, new_figure


STYLES = {
    "config_max": ("0.65", "X"),
    "stock": (PAD_COLOR, "s"),
    "truncate": ("#c98bb9", "^"),
    "sorted_fixed": ("#7fb069", "v"),
    "greedy": ("#8d6a9f", "D"),
    "ours": (REAL_COLOR, "o"),
}
NAMES = {
    "config_max": "padded to the configured maximum",
    "stock": "stock TRL",
    "truncate": "left padding moved and cut",
    "sorted_fixed": "sorted, fixed row count",
    "greedy": "sorted, filled to 16k tokens",
    "ours": "trl_padmin",
    "row_by_row": "each row alone",
}


def _ratios(results: dict, layout: str, **where) -> list[float]:
    cases = [c for c in results["tokens"]["cases"] if c["layout"] == layout]
    cases = [c for c in cases if all(c[name] == value for name, value in where.items())]
    return [c["forwarded_tokens"] / c["real_tokens"] for c in cases]


def _on_log_axis(axis, ticks: Sequence[float]) -> None:
    axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def draw_tokens(results: dict, path: Path) -> None:
    """One row of markers for each profile."""
    figure = new_figure(8, 4)
    ax = figure.subplots()
    for layout, (color, marker) in STYLES.items():
        ratios = [_ratios(results, layout, profile=profile, rows=32)[0] for profile in PROFILES]
        size = 80 if layout == "ours" else 45
        ax.scatter(ratios, range(len(PROFILES)), s=size, color=color, marker=marker, label=NAMES[layout], zorder=3)
    ax.set_xscale("log")
    _on_log_axis(ax.xaxis, [1, 1.5, 2, 3, 5, 8, 12])
    ax.set_yticks(range(len(PROFILES)), labels=PROFILES)
    ax.invert_yaxis()
    ax.axvline(1, color="0.3", linewidth=0.8, linestyle=":")
    ax.grid(axis="y", color="0.9", zorder=0)
    ax.set_xlabel("tokens forwarded per real token (logarithmic; 1 is no padding), 32 rows per rank")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path)


def draw_rows(results: dict, path: Path) -> None:
    """Lines over rows per rank, on `gsm8k_blog`."""
    figure = new_figure(7.5, 3.8)
    ax = figure.subplots()
    counts = [16, 32, 64, 256]
    for layout, (color, marker) in STYLES.items():
        ratios = [_ratios(results, layout, profile="gsm8k_blog", rows=count)[0] for count in counts]
        ax.plot(counts, ratios, color=color, marker=marker, label=NAMES[layout])
    ax.set_xscale("log")
    ax.set_yscale("log")
    _on_log_axis(ax.xaxis, counts)
    _on_log_axis(ax.yaxis, [1, 1.5, 2, 3, 5, 8, 12])
    ax.axhline(1, color="0.3", linewidth=0.8, linestyle=":")
    ax.set_xlabel("rows per rank and optimizer step (gsm8k_blog)")
    ax.set_ylabel("tokens forwarded per real token")
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    figure.savefig(path)


def draw_update(runs: Mapping[str, tuple[dict, dict]], path: Path) -> None:
    """Scoring on top of forward and backward, one bar a layout, one panel a run: its JSON and its summary."""
    figure = new_figure(9, 3.6)
    axes = figure.subplots(1, len(runs), sharey=True)
    for ax, (result, summary) in zip(axes, runs.values(), strict=True):
        layouts = [layout for layout in LAYOUTS if layout in summary]
        policy = [statistics.median(summary[layout]["policy_s"]) for layout in layouts]
        scoring = [statistics.median(summary[layout]["scoring_s"]) for layout in layouts]
        labels = [NAMES[layout] for layout in layouts]
        ax.barh(labels, policy, color=REAL_COLOR, label="forward and backward")
        bars = ax.barh(labels, scoring, left=policy, color="#8fc0d9", label="scoring (reference)")
        ax.bar_label(bars, labels=[f"{a + b:.1f} s" for a, b in zip(policy, scoring, strict=True)], padding=3)
        ax.margins(x=0.18)
        ax.set_xlim(left=0)
        kind = {"qwen2-30m": "Qwen2-like", "jamba-30m": "Jamba-like"}[result["model"]]
        ax.set_title(f"{kind}, 30 M parameters\nlengths ÷ {result['scale']}")
        ax.set_xlabel("processor seconds of one update, 32 rows")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    axes[-1].legend(loc="lower right", frameon=False)
    figure.savefig(path)


def draw_overhead(models: Mapping[str, tuple[list[dict], tuple[float, float]]], path: Path) -> None:
    """Times of micro-batches and the fitted line, one panel a model."""
    figure = new_figure(9, 3.4)
    axes = figure.subplots(1, len(models), squeeze=False)[0]
    for ax, (model, (samples, (per_micro_batch, per_token))) in zip(axes, models.items(), strict=True):
        for width, color in zip(
            sorted({s["width"] for s in samples}), ("#8fc0d9", REAL_COLOR, "#1b3a4b"), strict=False
        ):
            chosen = [s for s in samples if s["width"] == width]
            ax.scatter(
                [s["rows"] * width for s in chosen],
                [s["s"] for s in chosen],
                s=14,
                color=color,
                label=f"rows of {width} tokens",
            )
        most = max(s["rows"] * s["width"] for s in samples)
        line = [per_micro_batch, per_micro_batch + per_token * most]
        label = f"fit: {per_micro_batch / per_token:.0f} tokens per micro-batch"
        ax.plot([0, most], line, color=PAD_COLOR, label=label)
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
        ax.set_title(model)
        ax.set_xlabel("tokens of the micro-batch")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("seconds, forward and backward")
    figure.savefig(path)
