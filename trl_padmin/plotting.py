"""Pictures of padding: micro-batches as bars of real and pad tokens. Needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from .planning import DEFAULT_OVERHEAD_TOKENS, check_int, plan_micro_batches


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


REAL_COLOR, PAD_COLOR = "#2a6f97", "#f4a259"

# A micro-batch as drawn: rows, width in tokens, real tokens.
Shape = tuple[int, int, int]


def new_figure(width_in: float, height_in: float) -> Figure:
    """A figure that belongs to no backend, so that drawing needs no display and changes no global state.

    Jupyter shows it as the value of a cell, and `figure.savefig` writes it.

    Raises:
        `ImportError`: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: `pip install trl-padmin[plot]`.") from error

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    return ShownFigure(figsize=(width_in, height_in), layout="constrained", dpi=100)


def plot_padding(
    source: object,
    *,
    batch_size: int | None = None,
    token_budget: int | None = None,
    overhead_tokens: int = DEFAULT_OVERHEAD_TOKENS,
    pad_to_multiple_of: int | None = None,
) -> Figure:
    """Draws the micro-batches of one optimizer step on one rank: real and pad tokens, stock TRL's against ours.

    Args:
        source (trainer, or `Sequence[tuple[int, int]]`): A trainer that ran at least one step shows the last
            micro-batches that it planned. Or the rows of a window, each with its prompt tokens and completion tokens,
            for which a plan is made with the options below.
        batch_size (`int`, *optional*): Rows in one of stock's micro-batches. Needed with rows, and only there.
        token_budget, overhead_tokens, pad_to_multiple_of: As in [`PadminGRPOConfig`]. Only with rows.

    Returns:
        `matplotlib.figure.Figure`: shown by Jupyter as it is; `figure.savefig(path)` writes it.

    Raises:
        `ImportError`: matplotlib is not installed.
        `TypeError`, `ValueError`: the trainer has not run, there are no rows, or an option is out of its range.

    Example:

    ```python
    from trl_padmin import plot_padding

    trainer.train()
    plot_padding(trainer).savefig("padding.png")
    plot_padding([(21, 80), (19, 75), (23, 700), (20, 90)], batch_size=2)
    ```
    """
    if hasattr(source, "padding_stats"):
        stock, ours = _shapes_of_trainer(source)
    else:
        stock, ours = _shapes_of_rows(source, batch_size, token_budget, overhead_tokens, pad_to_multiple_of)
    figure = new_figure(max(7.0, 3.0 + 0.14 * (len(stock) + len(ours))), 3.6)
    widths = [max(4, len(shapes)) for shapes in (stock, ours)]
    axes = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": widths})
    for ax, shapes, name in zip(axes, (stock, ours), ("stock TRL", "trl_padmin"), strict=True):
        draw_micro_batches(ax, shapes)
        forwarded = sum(rows * width for rows, width, _ in shapes)
        pad_frac = 1 - sum(real for *_, real in shapes) / forwarded
        ax.set_title(
            f"{name}: {forwarded:,} tokens forwarded,\n{100 * pad_frac:.1f} % of them padding", fontsize="medium"
        )
    axes[0].set_ylabel("forwarded tokens")
    axes[1].legend(loc="upper right", frameon=False)
    return figure


def draw_micro_batches(ax: Axes, shapes: Sequence[Shape]) -> None:
    """One bar a micro-batch, as high as its forwarded tokens, with the number of its rows on top."""
    real = [shape[2] for shape in shapes]
    pad = [rows * width - tokens for rows, width, tokens in shapes]
    position = range(1, len(shapes) + 1)
    ax.bar(position, real, color=REAL_COLOR, label="real tokens", width=0.85)
    bars = ax.bar(position, pad, bottom=real, color=PAD_COLOR, label="padding", width=0.85)
    ax.bar_label(bars, labels=[str(rows) for rows, *_ in shapes], fontsize="x-small", padding=1)
    ax.margins(y=0.12)
    ax.set_xlim(0.4, max(4, len(shapes)) + 0.6)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("micro-batch (rows on top)")
    ax.spines[["top", "right"]].set_visible(False)


def _shapes_of_trainer(trainer: object) -> tuple[list[Shape], list[Shape]]:
    planned = trainer._padding.last_window
    if planned is None:
        raise ValueError(
            "The trainer has planned no micro-batches yet, so there is nothing to plot. Call `trainer.train()` first; "
            "with `padding_minimization=False` it is stock TRL and plans none."
        )
    segment, forwards = planned
    lengths, size = segment.lengths.total, segment.rows_per_step
    chunks = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    multiple = trainer.args.pad_to_multiple_of or 1
    return [(len(chunk), segment.width, sum(chunk)) for chunk in chunks], [
        (len(group.total), -(-max(group.total) // multiple) * multiple, sum(group.total)) for group in forwards
    ]


def _shapes_of_rows(
    rows: Sequence[tuple[int, int]],
    batch_size: int | None,
    token_budget: int | None,
    overhead_tokens: int,
    pad_to_multiple_of: int | None,
) -> tuple[list[Shape], list[Shape]]:
    rows = [tuple(row) for row in rows]
    wrong = [row for row in rows if len(row) != 2]
    if wrong or not rows:
        found = f"{wrong[0]} among them" if wrong else "none"
        raise ValueError(f"`source` must hold pairs of prompt tokens and completion tokens; it has {found}.")
    if batch_size is None:
        raise ValueError("`batch_size` is missing: the rows in one of stock TRL's micro-batches.")
    check_int("batch_size", batch_size, at_least=1)
    multiple = pad_to_multiple_of or 1
    stock_width = sum(-(-max(column) // multiple) * multiple for column in zip(*rows, strict=True))
    lengths = [sum(row) for row in rows]
    chunks = [lengths[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    plan = plan_micro_batches(
        lengths,
        token_budget or batch_size * stock_width,
        overhead_tokens=overhead_tokens,
        pad_to_multiple_of=pad_to_multiple_of,
        min_micro_batches=len(chunks),
    )
    return [(len(chunk), stock_width, sum(chunk)) for chunk in chunks], [
        (len(group), width, sum(lengths[row] for row in group))
        for group, width in zip(plan, plan.padded_lengths, strict=True)
    ]
