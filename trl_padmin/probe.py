"""Which layouts a model scores right, measured on the model itself against each row alone.

```sh
trl-padmin probe HuggingFaceTB/SmolLM2-135M-Instruct
```

A causal model should give a token the same log-probability whatever stands around its row. Many do not when rows are
padded on the left: positions shift, convolutions and states take padding in.
"""

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from .layout import TokensFirst, row_lengths


# Tokens of the rows to score. They differ, so that every row but the longest gets padding on both sides.
PROMPTS = (3, 11, 5, 7)
COMPLETIONS = (9, 2, 17, 4)

# Models that no padding leaves alone, and why.
_SEES_PADDING = {
    "cpmant": "it attends to padding",
    "prophetnet": "its n-gram streams do not mask padding",
    "reformer": "it sorts all tokens of a row into buckets, padding too",
}
_CAUSAL_WITHOUT_SAYING_SO = {"gpt_neox", "gpt_neox_japanese"}  # `is_decoder` means nothing to them

# Below this difference in nats a layout counts as right. In half precision, where a logit of 20 is rounded to 0.125 in
# bfloat16, a small leak cannot be told from rounding.
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class LayoutError:
    """How far a layout is from each row alone.

    Args:
        log_prob (`float`): Largest difference of a completion token's log-probability, in nats.
        gradient (`float`, *optional*): Largest difference of a gradient, relative to the largest gradient.
    """

    log_prob: float
    gradient: float | None = None


@dataclass(frozen=True)
class ArchitectureProbe:
    """What [`probe_architecture`] measured; printing it gives a small table.

    Args:
        architecture (`str`): Class of the model.
        dtype (`torch.dtype`): Precision it computed in.
        left_padded ([`LayoutError`]): Of stock TRL's layout, prompts padded on the left and completions on the right.
        tokens_first ([`LayoutError`]): Of ours, real tokens first and padding last.
    """

    architecture: str
    dtype: torch.dtype
    left_padded: LayoutError
    tokens_first: LayoutError

    @property
    def limit(self) -> float:
        """The largest difference that counts as rounding, in nats."""
        return LIMITS[self.dtype]

    def is_right(self, error: LayoutError) -> bool:
        """Whether a layout is within [`limit`] of each row alone; NaN is not."""
        return error.log_prob <= self.limit

    def __str__(self) -> str:
        lengths = [p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
        dtype = str(self.dtype).removeprefix("torch.")
        lines = [
            f"{self.architecture} in {dtype}, {len(lengths)} rows of {min(lengths)} to {max(lengths)} tokens; "
            "log-probabilities against each row alone:"
        ]
        for name, error in (
            ("left-padded (stock TRL)", self.left_padded),
            ("tokens first (trl_padmin)", self.tokens_first),
        ):
            verdict = "right" if self.is_right(error) else "WRONG"
            lines.append(f"  {name:<26} {verdict}, off by at most {error.log_prob:.1e} nats (limit {self.limit:g})")
        if self.limit > LIMITS[torch.float32]:
            lines.append(f"  {dtype} hides errors below the limit; float32 shows them.")
        return "\n".join(lines)


def why_scores_are_in_doubt(config: PretrainedConfig) -> str | None:
    """Why a model's log-probabilities are not those that its tokens were sampled with, in any layout; or `None`."""
    text = config.get_text_config(decoder=True)
    if text.model_type in _SEES_PADDING:
        return f"scores of `{text.model_type}` depend on padding: {_SEES_PADDING[text.model_type]}"
    bidirectional = {
        "is_decoder": getattr(text, "is_decoder", True) is False and text.model_type not in _CAUSAL_WITHOUT_SAYING_SO,
        "causal": text.model_type == "xlm" and not text.causal,
        "use_bidirectional_attention": getattr(text, "use_bidirectional_attention", None) in (True, "all"),
        "model_type": text.model_type == "xlnet",
    }
    for name, is_set in bidirectional.items():
        if is_set:
            return f"the model is not causal (`{name}`={getattr(text, name)!r}): a token sees those behind it"
    return None


def batch_dependent_rope(config: PretrainedConfig) -> tuple[str, int] | None:
    """The kind of rotary embedding whose angles follow the longest row, and the width in tokens above which they do.

    Equals `None` for the kinds that give a row the same angles in every batch.
    """
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = parameters.values() if all(isinstance(each, dict) for each in parameters.values()) else [parameters]
    found = []
    for kind in kinds:
        if "dynamic" in kind.get("rope_type", ""):
            found.append((kind["rope_type"], text.max_position_embeddings))
        elif kind.get("rope_type") == "longrope":
            found.append(("longrope", kind["original_max_position_embeddings"]))
    return min(found, key=lambda each: each[1], default=None)


def probe_architecture(model: nn.Module, *, gradients: bool = False) -> ArchitectureProbe:
    """Scores a few short rows left-padded, tokens first, and each alone, which is the truth.

    The model runs in evaluation mode, as it is and where it is, and is left as it was.

    Args:
        model (`transformers.PreTrainedModel`): A causal language model.
        gradients (`bool`, *optional*, defaults to `False`): Compare gradients too. Needs gradients to be `None`.

    Returns:
        [`ArchitectureProbe`]: the largest difference of each layout.

    Raises:
        `ValueError`: the model computes in a precision for which we know no limit.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    if dtype not in LIMITS:
        known = ", ".join(str(each).removeprefix("torch.") for each in LIMITS)
        raise ValueError(f"The model is in {dtype}; load it in one of {known}.")
    was_training = model.training
    model.eval()
    try:
        with torch.set_grad_enabled(gradients):
            truth, left_padded, tokens_first = (
                _outcome(score, model, gradients) for score in (_alone, _left_padded, _tokens_first)
            )
    finally:
        model.train(was_training)
    return ArchitectureProbe(
        type(model).__name__, dtype, _difference(left_padded, truth), _difference(tokens_first, truth)
    )


def _outcome(score, model: nn.Module, gradients: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor] | None]:
    """Scores of all completion tokens in one vector, and the gradients of a weighted sum of them."""
    config = model.config.get_text_config(decoder=True)
    special = _special_ids(model.config.to_dict() | config.to_dict())
    pad = config.pad_token_id if config.pad_token_id in special else min(special, default=0)
    ids = torch.tensor([i for i in range(min(config.vocab_size, 10_000)) if i not in special and i != pad])
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    prompt_columns, completion_columns = max(PROMPTS), max(COMPLETIONS)
    mask = torch.zeros(len(PROMPTS), prompt_columns + completion_columns, dtype=torch.long)
    for row, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        mask[row, prompt_columns - p : prompt_columns + c] = 1
    drawn = ids[torch.randint(len(ids), mask.shape, generator=generator)].masked_fill(mask == 0, pad)
    scores = score(model, drawn.to(device), mask.to(device), completion_columns)
    scores = scores[mask[:, prompt_columns:].bool().to(device)]
    if not gradients:
        return scores, None
    weights = torch.randn(len(scores), generator=generator).to(scores)
    (weights * scores).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return scores.detach(), found


def _special_ids(config: dict) -> set[int]:
    """Ids that rows of plain text do not hold: of padding, ends, pictures."""
    found = set()
    for name, value in config.items():
        if name.endswith(("_token_id", "_token_index")):  # there may be several ends
            found |= {i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)}
    return {i for i in found if i >= 0}


def _scores(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
    """Log-probabilities of the last `logits_to_keep` tokens of each row."""
    parameters = inspect.signature(model.forward).parameters
    no_cache = {"use_cache": False} if "use_cache" in parameters or "kwargs" in parameters else {}
    logits = model(input_ids=ids, attention_mask=mask, **no_cache).logits[:, -logits_to_keep - 1 : -1]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return logits.log_softmax(dim=-1).gather(2, ids[:, -logits_to_keep:, None]).squeeze(2)


def _left_padded(model, ids, mask, completion_columns):
    return _scores(model, ids, mask, completion_columns)


def _tokens_first(model, ids, mask, completion_columns):
    layout = TokensFirst(mask, completion_columns, row_lengths(mask, completion_columns))
    return layout.restore(_scores(model, layout.apply(ids), layout.attention_mask, layout.logits_to_keep))


def _alone(model, ids, mask, completion_columns):
    rows = []
    for row_ids, row_mask in zip(ids, mask, strict=True):
        real = row_mask.bool()
        count = int(real[-completion_columns:].sum())
        scores = _scores(model, row_ids[real][None], row_mask[real][None], count)
        rows.append(nn.functional.pad(scores, (0, completion_columns - count)))
    return torch.cat(rows)


def _difference(outcome, truth) -> LayoutError:
    (scores, gradients), (true_scores, true_gradients) = outcome, truth
    log_prob = (scores - true_scores).abs().max().item()
    if true_gradients is None:
        return LayoutError(log_prob)
    zero = torch.zeros(())
    scale = max(gradient.abs().max().item() for gradient in true_gradients.values())
    differences = [
        (gradients.get(name, zero) - true_gradients.get(name, zero)).abs().max()
        for name in gradients.keys() | true_gradients.keys()
    ]
    return LayoutError(log_prob, torch.stack(differences).max().item() / scale)


def main(argv: Sequence[str] = ()) -> int:
    """`trl-padmin probe MODEL`: measures which layouts the model scores right; status 1 if ours is not one of them."""
    parser = argparse.ArgumentParser(prog="trl-padmin probe", description=main.__doc__)
    parser.add_argument("model", help="a causal language model: hub name or folder")
    parser.add_argument(
        "--dtype", default="float32", choices=[str(each).removeprefix("torch.") for each in LIMITS], help="precision"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the code that comes with the model")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), trust_remote_code=args.trust_remote_code
    )
    probe = probe_architecture(model.to(args.device))
    print(probe)
    return 0 if probe.is_right(probe.tokens_first) else 1
