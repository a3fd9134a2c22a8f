"""`trl-padmin estimate`: what a run of one's own would save, from the lengths of its rows. No GPU, no model.

The plans are the trainer's own, so for the rows of a window the figures are those that the trainer logs. Assumed is
that one generation batch is one optimizer step (TRL's default), and rows come in the order in which TRL logs them: a
window of the first rank, of the second, and so on.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .planning import (
    DEFAULT_OVERHEAD_TOKENS,
    check_token_budget,
    critical_path_tokens,
    plan_micro_batches,
    plan_ranks,
)
from .plotting import PAD_COLOR, REAL_COLOR, new_figure
from .row_files import Row, read_rows
from .stats import PaddingStats


@dataclass(frozen=True)
class Setting:
    """How a run batches its rows.

    Args:
        rows_per_window (`int`): Rows of one optimizer step on one rank.
        batch_size (`int`): Rows of one stock micro-batch, `per_device_train_batch_size`.
        ranks (`int`, *optional*, defaults to 1): Processes; rows move between them inside one step.
        overhead_tokens, pad_to_multiple_of: As in [`PadminGRPOConfig`].

    Raises:
        `ValueError`: a number is out of its range, or `batch_size` does not divide `rows_per_window`.
    """

    rows_per_window: int
    batch_size: int
    ranks: int = 1
    overhead_tokens: int = DEFAULT_OVERHEAD_TOKENS
    pad_to_multiple_of: int | None = None

    def __post_init__(self):
        for name in ("rows_per_window", "batch_size", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}`={getattr(self, name)} is too small; it must be at least 1.")
        if self.rows_per_window % self.batch_size:
            raise ValueError(
                f"`rows_per_window`={self.rows_per_window} is not a multiple of `batch_size`={self.batch_size}: a "
                "window is `gradient_accumulation_steps` micro-batches of that many rows."
            )


@dataclass(frozen=True)
class Estimate:
    """Counts of one layout over all windows.

    Args:
        name (`str`): The layout, for people.
        stats ([`PaddingStats`]): Summed over windows and ranks.
        windows (`int`): Optimizer steps.
        largest_tokens (`int`): Forwarded tokens of the largest micro-batch, which sets the memory.
    """

    name: str
    stats: PaddingStats
    windows: int
    largest_tokens: int


def estimate(rows: Sequence[Row], setting: Setting, token_budgets: Sequence[int | None] = (None,)) -> list[Estimate]:
    """Stock TRL first, then trl_padmin with each token budget.

    Args:
        rows (`Sequence[tuple[int, int]]`): Prompt and completion tokens of each row, in the order of the run. Rows
            that do not fill a last window are left out.
        setting ([`Setting`]): How the run batches them.
        token_budgets (`Sequence[int | None]`, *optional*): Most forwarded tokens in one micro-batch; `None` is what
            stock would have forwarded.

    Raises:
        `ValueError`: there are too few rows for one window, or a budget is out of its range.
    """
    per_window = setting.rows_per_window * setting.ranks
    windows = len(rows) // per_window
    if not windows:
        raise ValueError(
            f"{len(rows)} rows do not fill one optimizer step of {setting.rows_per_window} rows x {setting.ranks} "
            "ranks. Give more rows, or lower `--rows-per-window` or `--ranks`."
        )
    total = {budget: (PaddingStats(), 0) for budget in token_budgets}
    stock_stats, stock_largest = PaddingStats(), 0
    for budget in total:
        check_token_budget(budget, setting.pad_to_multiple_of)
    for start in range(0, windows * per_window, per_window):
        window = rows[start : start + per_window]
        stock, stock_width = _stock(window, setting)
        stock_stats += stock
        stock_largest = max(stock_largest, setting.batch_size * stock_width)
        for budget, (stats, largest) in total.items():
            ours, most = _ours(window, setting, budget or setting.batch_size * stock_width)
            ours = replace(ours, stock_tokens=stock.stock_tokens)
            total[budget] = stats + ours, max(largest, most)
    return [Estimate("stock TRL", stock_stats, windows, stock_largest)] + [
        Estimate(f"trl_padmin, budget {'as stock' if budget is None else f'{budget:,}'}", stats, windows, largest)
        for budget, (stats, largest) in total.items()
    ]


def _stock(window: Sequence[Row], setting: Setting) -> tuple[PaddingStats, int]:
    """Each rank pads all its rows to its longest prompt and its longest completion."""
    size, multiple = setting.rows_per_window, setting.pad_to_multiple_of or 1
    widths = [
        sum(-(-max(column) // multiple) * multiple for column in zip(*window[start : start + size], strict=True))
        for start in range(0, len(window), size)
    ]
    forwarded = size * sum(widths)
    stats = PaddingStats(
        rows=len(window),
        micro_batches=len(window) // setting.batch_size,
        real_tokens=sum(map(sum, window)),
        forwarded_tokens=forwarded,
        stock_tokens=forwarded,
        critical_tokens=len(window) * max(widths),
    )
    return stats, max(widths)


def _ours(window: Sequence[Row], setting: Setting, token_budget: int) -> tuple[PaddingStats, int]:
    lengths = [sum(row) for row in window]
    options = {
        "overhead_tokens": setting.overhead_tokens,
        "pad_to_multiple_of": setting.pad_to_multiple_of,
        "min_micro_batches": setting.rows_per_window // setting.batch_size,
    }
    if setting.ranks == 1:
        plans = (plan_micro_batches(lengths, token_budget, **options),)
    else:
        plans = plan_ranks(lengths, setting.ranks, token_budget, **options)
    stats = PaddingStats(
        rows=len(window),
        micro_batches=sum(map(len, plans)),
        real_tokens=sum(lengths),
        forwarded_tokens=sum(plan.forwarded_tokens for plan in plans),
        critical_tokens=setting.ranks * critical_path_tokens(plans),
        oversized_rows=sum(plan.oversized_rows for plan in plans),
    )
    sizes = [len(group) * width for plan in plans for group, width in zip(plan, plan.padded_lengths, strict=True)]
    return stats, max(sizes)


def format_table(estimates: Sequence[Estimate], ranks: int) -> str:
    """The figures as text, one line a layout."""
    header = ["", "padding", "forwarded / real", "micro-batches", "largest, tokens", "oversized rows"]
    lines = []
    for entry in estimates:
        stats = entry.stats
        line = [
            entry.name,
            f"{100 * stats.pad_frac:.1f} %",
            f"{stats.forwarded_tokens / stats.real_tokens:.2f}",
            f"{stats.micro_batches / entry.windows / ranks:.1f}",
            f"{entry.largest_tokens:,}",
            f"{stats.oversized_rows:,}",
        ]
        if ranks > 1:
            line.append(f"{stats.critical_tokens / stats.real_tokens:.2f}")
        lines.append(line)
    if ranks > 1:
        header.append("critical path / real")
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if not index else cell.rjust(width) for index, (cell, width) in enumerate(cells))
        for cells in ([*zip(header, widths, strict=True)], *([*zip(line, widths, strict=True)] for line in lines))
    )


def plot_estimate(estimates: Sequence[Estimate], ranks: int):
    """Forwarded tokens as bars, micro-batches, and on several ranks the critical path, one bar a layout.

    Returns:
        `matplotlib.figure.Figure`.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    panels = 3 if ranks > 1 else 2
    figure = new_figure(3.0 + 3.0 * panels, 1.4 + 0.42 * len(estimates))
    axes = figure.subplots(1, panels, sharey=True, gridspec_kw={"width_ratios": [2] + [1] * (panels - 1)})
    names = [entry.name for entry in estimates]
    steps = [entry.windows * ranks for entry in estimates]
    real = [entry.stats.real_tokens / n for entry, n in zip(estimates, steps, strict=True)]
    pad = [entry.stats.forwarded_tokens / n - r for entry, n, r in zip(estimates, steps, real, strict=True)]
    axes[0].barh(names, real, color=REAL_COLOR, label="real tokens")
    bars = axes[0].barh(names, pad, left=real, color=PAD_COLOR, label="padding")
    _label(axes[0], bars, [f"{100 * entry.stats.pad_frac:.1f} % padding" for entry in estimates], margin=0.3)
    axes[0].set_xlabel("tokens forwarded per rank and optimizer step")
    axes[0].xaxis.set_major_formatter("{x:,.0f}")
    axes[0].locator_params(axis="x", nbins=5)
    axes[0].legend(loc="lower right", frameon=False)
    counts = [entry.stats.micro_batches / n for entry, n in zip(estimates, steps, strict=True)]
    _label(axes[1], axes[1].barh(names, counts, color="0.6"), [f"{count:.1f}" for count in counts])
    axes[1].set_xlabel("micro-batches per step")
    if ranks > 1:
        path = [entry.stats.critical_tokens / entry.stats.real_tokens for entry in estimates]
        _label(axes[2], axes[2].barh(names, path, color="0.6"), [f"{ratio:.2f}" for ratio in path])
        axes[2].set_xlabel(f"critical path over {ranks} ranks\n(tokens ÷ real tokens)")
        axes[2].axvline(1, color="0.2", linewidth=0.8, linestyle=":")
    axes[0].invert_yaxis()
    return figure


def _label(ax, bars, labels: Sequence[str], margin: float = 0.25) -> None:
    ax.bar_label(bars, labels=labels, padding=3, fontsize="small")
    ax.margins(x=margin)
    ax.set_xlim(left=0)
    ax.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] = ()) -> int:
    """`trl-padmin estimate`: prints a table and saves a picture of what a run would save."""
    parser = argparse.ArgumentParser(
        prog="trl-padmin estimate",
        description="What padding costs a run now, and with trl_padmin, from the lengths of its rows.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="CSV, JSONL or parquet with columns prompt_tokens and completion_tokens, or the parquet files (or their "
        "folder) that TRL writes with log_completions=True, with --tokenizer",
    )
    parser.add_argument(
        "--rows-per-window",
        type=int,
        required=True,
        metavar="N",
        help="rows of one optimizer step on one rank: per_device_train_batch_size x gradient_accumulation_steps",
    )
    parser.add_argument(
        "--per-device-batch-size", type=int, required=True, metavar="B", help="rows of one stock micro-batch"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="R", help="processes (default 1)")
    parser.add_argument(
        "--token-budget",
        type=int,
        nargs="+",
        default=[],
        metavar="T",
        help="budgets to try, next to the default one: most forwarded tokens in a micro-batch",
    )
    parser.add_argument(
        "--overhead-tokens",
        type=int,
        default=DEFAULT_OVERHEAD_TOKENS,
        metavar="O",
        help="cost of one more micro-batch (default %(default)s)",
    )
    parser.add_argument("--pad-to-multiple-of", type=int, metavar="M", help="as in the run's config")
    parser.add_argument("--tokenizer", metavar="NAME", help="hub name or folder, for the files that TRL writes")
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("padding_estimate.png"),
        metavar="PNG",
        help="where to save the picture (default %(default)s)",
    )
    parser.add_argument("--no-figure", action="store_true", help="save no picture, for which matplotlib is needed")
    args = parser.parse_args(argv)
    try:
        setting = Setting(
            args.rows_per_window, args.per_device_batch_size, args.ranks, args.overhead_tokens, args.pad_to_multiple_of
        )
        rows = read_rows(args.files, args.tokenizer)
        estimates = estimate(rows, setting, [None, *args.token_budget])
        used = estimates[0].stats.rows
        print(
            f"{estimates[0].windows} optimizer step(s) of {args.rows_per_window} rows on {args.ranks} rank(s)", end=""
        )
        print(f"; the last {len(rows) - used} of {len(rows)} rows fill no step" if used < len(rows) else "")
        print(format_table(estimates, args.ranks))
        if not args.no_figure:
            plot_estimate(estimates, args.ranks).savefig(args.figure)
            print(f"saved {args.figure}")
    except (ImportError, OSError, ValueError) as error:
        print(f"trl-padmin estimate: {error}", file=sys.stderr)
        return 2
    return 0
