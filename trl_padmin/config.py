"""Our options, next to TRL's."""

from dataclasses import dataclass, field, fields

from transformers import TrainingArguments
from trl import GRPOConfig, RLOOConfig

from .planning import DEFAULT_OVERHEAD_TOKENS, check_int, check_token_budget


@dataclass
class PaddingMinimizationOptions:
    """The options of padding minimization, to mix into any TRL config.

    Args:
        padding_minimization (`bool`, *optional*, defaults to `True`): `False` is the stock trainer, for comparing.
        token_budget (`int`, *optional*): Most forwarded tokens in one micro-batch on one rank. `None` takes what stock
            TRL would have forwarded: rows per micro-batch x (longest prompt + longest completion).
        overhead_tokens (`int`, *optional*, defaults to `128`): What one more micro-batch costs, in forwarded tokens.
        balance_across_ranks (`bool`, *optional*, defaults to `True`): Whether rows of one window may move between
            ranks.
        probe (`bool`, *optional*, defaults to `False`): Whether to measure at start which layouts the model scores
            right, see [`probe_architecture`].
    """

    padding_minimization: bool = field(
        default=True,
        metadata={"help": "Whether to forward almost no padding. `False` is the stock trainer, for comparing."},
    )
    token_budget: int | None = field(
        default=None,
        metadata={
            "help": "Most forwarded tokens (rows x padded length) in one micro-batch on one rank. The default is what "
            "stock TRL would have forwarded for the same generation batch, so that memory never exceeds stock's. A "
            "row that is longer runs alone."
        },
    )
    overhead_tokens: int = field(
        default=DEFAULT_OVERHEAD_TOKENS,
        metadata={
            "help": "Fixed cost of one more micro-batch, in forwarded tokens that would take as long. Higher values "
            "give fewer micro-batches and more padding."
        },
    )
    balance_across_ranks: bool = field(
        default=True,
        metadata={"help": "Whether rows of one optimizer step may move between ranks, so that no rank waits."},
    )
    probe: bool = field(
        default=False,
        metadata={
            "help": "Whether to score a few short rows at start, left-padded, tokens first and each alone, and print "
            "which layouts the model scores right."
        },
    )

    def __post_init__(self):
        if hasattr(super(), "__post_init__"):
            super().__post_init__()  # first: it turns a `pad_to_multiple_of` of "auto" or "64" into a number or `None`
        self.check_padding_options(getattr(self, "pad_to_multiple_of", None))

    @classmethod
    def of(
        cls, config: object | None, defaults: "PaddingMinimizationOptions | None" = None
    ) -> "PaddingMinimizationOptions":
        """The options of any config, checked; those of `defaults`, or ours, where it has none."""
        defaults = defaults or cls()
        options = cls(**{f.name: getattr(config, f.name, getattr(defaults, f.name)) for f in fields(cls)})
        options.check_padding_options(getattr(config, "pad_to_multiple_of", None))
        return options

    def check_padding_options(self, pad_to_multiple_of: int | None = None) -> None:
        """Raises `TypeError` or `ValueError` for an option that is out of its range."""
        for name in ("padding_minimization", "balance_across_ranks", "probe"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}`={getattr(self, name)!r} must be `True` or `False`.")
        check_token_budget(self.token_budget, pad_to_multiple_of)
        check_int("overhead_tokens", self.overhead_tokens, at_least=0)


def config_among(args: tuple, kwargs: dict) -> TrainingArguments | None:
    """The config among the arguments of a trainer, wherever a subclass of it takes them."""
    return next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, TrainingArguments)), None)


@dataclass
class PadminGRPOConfig(PaddingMinimizationOptions, GRPOConfig):
    """[`trl.GRPOConfig`] with the options of padding minimization.

    Every argument of `trl.GRPOConfig` keeps its place, name and default; ours are keywords:
    [`PaddingMinimizationOptions`].
    """


@dataclass
class PadminRLOOConfig(PaddingMinimizationOptions, RLOOConfig):
    """[`trl.RLOOConfig`] with the options of padding minimization.

    Every argument of `trl.RLOOConfig` keeps its place, name and default; ours are keywords:
    [`PaddingMinimizationOptions`].
    """
