"""Row lengths to benchmark with: named distributions, each with its source. Standard library only."""

import hashlib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass


Row = tuple[int, int]  # prompt tokens, completion tokens


@dataclass(frozen=True)
class Profile:
    """A distribution of row lengths.

    Args:
        source (`str`): Where it is from.
        prompt_cap (`int`): Most prompt tokens that a run would be configured for.
        completion_cap (`int`): Most completion tokens, `max_completion_length`.
        draw (`Callable`): Makes one row from a random generator; longer rows are cut to the caps.
    """

    source: str
    prompt_cap: int
    completion_cap: int
    draw: Callable[[random.Random], tuple[float, float]]

    def rows(self, count: int, seed: int, scale: int = 1) -> list[Row]:
        """Rows of one window, lengths divided by `scale`; the same for the same arguments on every machine."""
        generator = random.Random(seed)
        caps = self.prompt_cap, self.completion_cap
        drawn = [self.draw(generator) for _ in range(count)]
        return [tuple(max(2, round(min(cap, x) / scale)) for cap, x in zip(caps, row, strict=True)) for row in drawn]


def trace_hash(rows: list[Row]) -> str:
    """Names the rows of a run, so that figures can be compared only where the rows are the same."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _log_normal(median: float, sigma: float) -> Callable[[random.Random], float]:
    return lambda generator: median * generator.lognormvariate(0, sigma)


def _between_quantiles(low: float, median: float, high: float) -> Callable[[random.Random], float]:
    """A log-normal distribution on each side of the median, through the 5 % and the 95 % quantile."""

    def draw(generator):
        z = generator.gauss(0, 1)
        return median * math.exp(z / 1.645 * math.log((high if z > 0 else median) / (median if z > 0 else low)))

    return draw


def _blog(generator):
    prompt = _log_normal(200, 0.25)(generator)
    is_outlier = generator.random() < 0.015
    return prompt, generator.uniform(6000, 8192) if is_outlier else _log_normal(707, 0.27)(generator)


def _tools(generator):
    turns = generator.randint(1, 8)
    calls = sum(_log_normal(120, 0.5)(generator) for _ in range(turns))
    results = sum(_log_normal(250, 0.9)(generator) for _ in range(turns - 1))
    return _log_normal(600, 0.3)(generator), calls + results


def _independent(prompt, completion):
    return lambda generator: (prompt(generator), completion(generator))


PROFILES = {
    "gsm8k_blog": Profile(
        "GSM8K as described in the blog post on model-agnostic padding minimization: prompts about 200 tokens, "
        "completions 500 to 1000, one in a hundred 6k to 8k",
        4096,
        8192,
        _blog,
    ),
    "gsm8k_measured": Profile(
        "log-normal fits to the GSM8K questions and to the completion lengths of a published GRPO log",
        512,
        1024,
        _independent(_log_normal(102, 0.196), _log_normal(273, 0.334)),
    ),
    "reasoning_longtail": Profile(
        "assumed: long reasoning with a heavy tail, cut at 16k",
        1024,
        16384,
        _independent(_log_normal(200, 0.25), _log_normal(3000, 0.85)),
    ),
    "short_answer": Profile(
        "assumed: classification or a final answer only",
        1024,
        64,
        _independent(_log_normal(150, 0.5), _log_normal(8, 0.6)),
    ),
    "rag_long_prompt": Profile(
        "assumed: retrieval-augmented answers; 5, 50 and 95 % of the prompts below 75, 1469 and 7303 tokens, of the "
        "completions below 6, 13 and 90",
        8192,
        256,
        _independent(_between_quantiles(75, 1469, 7303), _between_quantiles(6, 13, 90)),
    ),
    "multi_turn_tools": Profile(
        "assumed: 1 to 8 calls of about 120 tokens with results of about 250 tokens in between",
        2048,
        8192,
        _tools,
    ),
    "equal": Profile("all rows alike: nothing to gain", 200, 700, lambda generator: (200, 700)),
}
