"""What padding costs: integer counts that add up, and the fractions that follow from them."""

from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True)
class PaddingStats:
    """Counts of the tokens that forwards compute, in our layout and in stock TRL's.

    Stats add up, over micro-batches, windows and ranks: `stats + other`. A *forwarded token* is any cell of a
    micro-batch (rows x width), a *real token* one with attention mask 1.

    Args:
        rows (`int`): Rows scored.
        micro_batches (`int`): Forwards of the model.
        real_tokens (`int`): Real tokens.
        forwarded_tokens (`int`): Forwarded tokens.
        stock_tokens (`int`): What stock TRL would have forwarded for the same rows.
        critical_tokens (`int`): Ranks x forwarded tokens of the slowest rank; equal to `forwarded_tokens` on one rank.
        oversized_rows (`int`): Rows that alone exceeded the token budget.

    Example:

    ```python
    >>> stats = PaddingStats(rows=4, micro_batches=2, real_tokens=90, forwarded_tokens=100, stock_tokens=300)
    >>> stats.pad_frac, stats.saved_frac
    (0.1, 0.6666666666666666)
    >>> print(stats)
    padding: 70.0 % -> 10.0 % of forwarded tokens (stock TRL -> now); 4 rows in 2 micro-batches

    ```
    """

    rows: int = 0
    micro_batches: int = 0
    real_tokens: int = 0
    forwarded_tokens: int = 0
    stock_tokens: int = 0
    critical_tokens: int = 0
    oversized_rows: int = 0

    def __add__(self, other: "PaddingStats") -> "PaddingStats":
        if not isinstance(other, PaddingStats):
            return NotImplemented
        return PaddingStats(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def pad_frac(self) -> float:
        """Share of the forwarded tokens that is padding; 0 if nothing was forwarded."""
        return _frac(self.forwarded_tokens - self.real_tokens, self.forwarded_tokens)

    @property
    def pad_frac_stock(self) -> float:
        """Share of the forwarded tokens that would be padding in stock TRL."""
        return _frac(self.stock_tokens - self.real_tokens, self.stock_tokens)

    @property
    def saved_frac(self) -> float:
        """Share of stock TRL's forwarded tokens that was not forwarded."""
        return _frac(self.stock_tokens - self.forwarded_tokens, self.stock_tokens)

    @property
    def rank_imbalance(self) -> float:
        """Forwarded tokens of the slowest rank, divided by the mean over ranks; 1 is perfect balance."""
        return self.critical_tokens / self.forwarded_tokens if self.critical_tokens else 1.0

    def as_metrics(self) -> dict[str, float]:
        """The metrics that are logged, under the names they are logged by."""
        names = (
            "pad_frac",
            "pad_frac_stock",
            "forwarded_tokens",
            "saved_frac",
            "micro_batches",
            "rank_imbalance",
            "oversized_rows",
        )
        return {f"padding/{name}": float(getattr(self, name)) for name in names}

    def __str__(self) -> str:
        return (
            f"padding: {100 * self.pad_frac_stock:.1f} % -> {100 * self.pad_frac:.1f} % of forwarded tokens "
            f"(stock TRL -> now); {self.rows} rows in {self.micro_batches} micro-batches"
        )

    def _repr_html_(self) -> str:
        counts = [(field.name.replace("_", " "), f"{getattr(self, field.name):,}") for field in fields(self)]
        fracs = [
            ("padding, stock TRL", f"{100 * self.pad_frac_stock:.1f} %"),
            ("padding, now", f"{100 * self.pad_frac:.1f} %"),
            ("forwarded tokens saved", f"{100 * self.saved_frac:.1f} %"),
        ]
        cells = "".join(
            f'<tr><th style="text-align:left">{name}</th><td style="text-align:right">{value}</td></tr>'
            for name, value in fracs + counts
        )
        return f"<table>{cells}</table>"


def _frac(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
