"""Renders the benchmark page, its figures and the section of the project's README from the JSON in `results/`.

```sh
python examples/benchmark/report.py
```
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from string import Template

from figures import draw_overhead, draw_rows, draw_tokens, draw_update
from layouts import LAYOUTS, PACKED
from profiles import PROFILES


FOLDER = Path(__file__).parent
PAGE, README = FOLDER / "README.md", FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"
HEADLINE = ("qwen2-30m-gsm8k_blog-seed2", "jamba-30m-gsm8k_blog-seed2")


def load(folder: Path = FOLDER / "results") -> dict[str, dict]:
    """Results by the name of their file."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def spread(values: Sequence[float]) -> str:
    """Median, and the 20 % and 80 % quantiles where there are several values."""
    median = statistics.median(values)
    if len(values) == 1:
        return f"{median:.2f}"
    low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def by_layout(result: dict) -> dict[str, list[dict]]:
    """Steps of a timing run, by layout, in the order of the rounds."""
    steps = {}
    for step in result["runs"]:
        steps.setdefault(step["layout"], []).append(step)
    return {layout: steps[layout] for layout in (*LAYOUTS, *PACKED) if layout in steps}


def update_s(step: dict) -> float:
    return step["scoring_s"] + step["policy_s"]


def summarize(result: dict) -> dict[str, dict]:
    """Figures of each layout: seconds, ratios to the bound, share of the improvement that is reached."""
    steps = by_layout(result)
    bound = steps["row_by_row"]
    summary = {}
    for layout, runs in steps.items():
        ratios = [update_s(run) / update_s(base) for run, base in zip(runs, bound, strict=False)]
        summary[layout] = {
            "tokens_ratio": runs[0]["policy_tokens"] / result["real_tokens"],
            "micro_batches": runs[0]["micro_batches"],
            "scoring_s": [run["scoring_s"] for run in runs],
            "policy_s": [run["policy_s"] for run in runs],
            "update_s": statistics.median(map(update_s, runs)),
            "update_ratio": ratios,
            "saved_mib": runs[0]["saved_mib"],
            "peak_mib": max((run["peak_mib"] for run in runs if run["peak_mib"] is not None), default=None),
        }
    if "config_max" in steps:
        worst = summary["config_max"]
        for figures in summary.values():
            figures["time_share"] = (worst["update_s"] - figures["update_s"]) / (
                worst["update_s"] - summary["row_by_row"]["update_s"]
            )
            figures["token_share"] = (worst["tokens_ratio"] - figures["tokens_ratio"]) / (worst["tokens_ratio"] - 1)
    return summary


def tokens_ratio(results: dict, profile: str, rows: int, layout: str) -> dict:
    """The case of a profile, with forwarded tokens of all draws divided by real ones as `ratio`."""
    (case,) = (
        c for c in results["tokens"]["cases"] if (c["profile"], c["rows"], c["layout"]) == (profile, rows, layout)
    )
    return case | {"ratio": case["forwarded_tokens"] / case["real_tokens"]}


def tokens_by_profile(results: dict) -> str:
    rows = []
    for profile in PROFILES:
        ratios = [tokens_ratio(results, profile, 32, layout)["ratio"] for layout in LAYOUTS]
        rows.append([f"`{profile}`", *(f"{ratio:.2f}" for ratio in ratios)])
    return table(["", *(f"`{layout}`" for layout in LAYOUTS)], rows)


def tokens_by_rows(results: dict, profile: str) -> str:
    rows = []
    for layout in LAYOUTS:
        cells = [f"`{layout}`"]
        for count in (16, 32, 64, 256):
            case = tokens_ratio(results, profile, count, layout)
            cells += [f"{case['ratio']:.2f} ({case['ratio_p20']:.2f} to {case['ratio_p80']:.2f})"]
            cells += [f"{case['micro_batches']:.1f}"]
        rows.append(cells)
    header = [cell for count in (16, 32, 64, 256) for cell in (f"{count} rows", "micro-batches")]
    return table(["", *header], rows)


def update_table(result: dict) -> str:
    summary = summarize(result)
    header = [
        "",
        "forwarded ÷ real",
        "micro-batches",
        "scoring, s",
        "forward and backward, s",
        "update ÷ `row_by_row`",
    ]
    has_share, on_gpu = "config_max" in summary, result["runs"][0]["peak_mib"] is not None
    header += ["share of the improvement in time", "in tokens"] * has_share + [
        "peak memory, GiB" if on_gpu else "kept for backward, MiB"
    ]
    rows = []
    for layout, figures in summary.items():
        row = [
            f"`{layout}`",
            f"{figures['tokens_ratio']:.2f}",
            figures["micro_batches"],
            spread(figures["scoring_s"]),
            spread(figures["policy_s"]),
            spread(figures["update_ratio"]),
        ]
        row += [f"{100 * figures[name]:.1f} %" for name in ("time_share", "token_share")] if has_share else []
        row += [f"{figures['peak_mib'] / 1024:.1f}" if on_gpu else f"{figures['saved_mib']:.0f}"]
        rows.append(row)
    return table(header, rows)


def describe(result: dict) -> str:
    """The whole setting of a timing run."""
    clock = "processor seconds of one thread" if result["threads"] == 1 else "seconds"
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("trl", "transformers", "torch"))
    return (
        f"`{result['model']}` on {result['device']}, {clock}; {result['rows']} rows of `{result['profile']}` "
        f"(draw {result['seed']}, trace `{result['trace']}`), lengths divided by {result['scale']}: "
        f"{result['real_tokens']:,} real tokens; {result['batch_size']} rows in each of TRL's micro-batches; "
        f"`overhead_tokens` {result['overhead_tokens']} before scaling; {versions}; "
        f"commit `{result['commit'][:12]}`, {result['date'][:10]}."
    )


def fit(samples: Sequence[dict]) -> tuple[float, float]:
    """Seconds per micro-batch and seconds per token: least squares of the relative error, medians of each shape."""
    shapes = {}
    for sample in samples:
        shapes.setdefault((sample["rows"], sample["width"]), []).append(sample["s"])
    points = [(rows * width, statistics.median(seconds)) for (rows, width), seconds in shapes.items()]
    # (a + b x tokens) / seconds should be 1: the normal equations of that, solved for a and b.
    u, v = [1 / seconds for _, seconds in points], [tokens / seconds for tokens, seconds in points]
    uu, uv, vv = (sum(x * y for x, y in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv**2
    return (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant


def overhead_in_full_tokens(results: dict) -> int:
    """What a micro-batch of the Qwen2-like model costs, in tokens before scaling."""
    per_micro_batch, per_token = fit(results["overhead-qwen2-30m"]["samples"])
    return 10 * round(per_micro_batch / per_token * results[HEADLINE[0]]["scale"] / 10)


def overhead_table(results: dict) -> str:
    rows = []
    for result in results.values():
        if result["kind"] == "overhead":
            per_micro_batch, per_token = fit(result["samples"])
            name = f"`{result['model']}`, {result['device']}"
            figures = f"{1000 * per_micro_batch:.0f}", f"{1000 * per_token:.2f}", f"{per_micro_batch / per_token:.0f}"
            rows.append([name, *figures])
    return table(["", "ms per micro-batch", "ms per token", "one micro-batch, tokens"], rows)


def sensitivity_table(results: dict) -> str:
    cases = results["tokens"]["sensitivity"]
    true = sorted({case["true_overhead_tokens"] for case in cases})
    rows = [
        [f"`{profile}`"]
        + [
            f"{100 * case['excess_frac']:.1f} %"
            for overhead in true
            for case in cases
            if (case["profile"], case["true_overhead_tokens"]) == (profile, overhead)
        ]
        for profile in PROFILES
    ]
    return table(["true cost of a micro-batch, tokens", *map(str, true)], rows)


def readme_section(results: dict) -> str:
    """The table and the figure of the project's README, between the markers."""
    pooled = {layout: tokens_ratio(results, "gsm8k_blog", 32, layout)["ratio"] for layout in LAYOUTS}
    timed = [summarize(results[name]) for name in HEADLINE]
    rows = []
    for layout, text in LAYOUTS.items():
        name = text.split(":")[0].split(",")[0].split(" (")[0]
        rows.append(
            [
                f"**{name}**" if layout == "ours" else f"{name} (`{layout}`)",
                f"{pooled[layout]:.2f}",
                f"{tokens_ratio(results, 'gsm8k_blog', 256, layout)['ratio']:.2f}",
                *(f"{summary[layout]['update_s'] / summary['stock']['update_s']:.2f}" for summary in timed),
            ]
        )
    header = ["", "tokens, 32 rows", "tokens, 256 rows", "time, Qwen2-like", "time, Jamba-like"]
    share = (pooled["config_max"] - pooled["ours"]) / (pooled["config_max"] - 1)
    return "\n\n".join(
        [
            BEGIN,
            "Tokens forwarded, divided by real tokens, on GSM8K-like rows (1.5 % of the completions are ten times as "
            "long as the others); and time of an update (scoring, forward, backward), divided by stock TRL's, on 32 "
            "rows with one such completion among them:",
            table(header, rows),
            f"Of the padding between the configured maximum and none at all, {100 * share:.1f} % is gone. Times are "
            "those of models with 30 M parameters on one CPU thread, with lengths scaled down (no GPU was at hand), "
            f"where one more micro-batch costs as much as {overhead_in_full_tokens(results)} tokens; that "
            "favors `greedy`, whose micro-batches are fewer and larger. All of the setting, other lengths, a case "
            "without gain and how to run it: [examples/benchmark](examples/benchmark/README.md).",
            "![Tokens forwarded per real token in each layout, by profile](examples/benchmark/tokens.png)",
            END,
        ]
    )


def page(results: dict) -> str:
    """`README.md` of the benchmark."""
    timed = {name: result for name, result in results.items() if result["kind"] == "time"}
    plausible = [c for c in results["tokens"]["sensitivity"] if 16 <= c["true_overhead_tokens"] <= 512]
    parts = {
        "layouts": "\n".join(f"- `{name}`: {text}." for name, text in (LAYOUTS | PACKED).items()),
        "draws": str(results["tokens"]["cases"][0]["draws"]),
        "tokens_by_profile": tokens_by_profile(results),
        "tokens_by_rows": tokens_by_rows(results, "gsm8k_blog"),
        "profiles": "\n".join(
            f"- `{name}`: {p.source}. Configured maximum: {p.prompt_cap:,} + {p.completion_cap:,} tokens."
            for name, p in PROFILES.items()
        ),
        "updates": "\n\n".join(
            part for name, result in timed.items() for part in (f"### {name}", describe(result), update_table(result))
        ),
        "overhead": overhead_table(results),
        "overhead_tokens": str(overhead_in_full_tokens(results)),
        "sensitivity": sensitivity_table(results),
        "worst_excess": f"{100 * max(c['excess_frac'] for c in plausible):.1f}",
    }
    return Template((FOLDER / "template.md").read_text()).substitute(parts)


def replace_section(text: str, section: str) -> str:
    """`text` with what is between the markers replaced.

    Raises:
        `ValueError`: the markers are missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"`{BEGIN}` and `{END}` are not in the text.")
    before, rest = text.split(BEGIN, 1)
    return before + section + rest.split(END, 1)[1]


def main() -> None:
    results = load()
    draw_tokens(results, FOLDER / "tokens.png")
    draw_rows(results, FOLDER / "rows.png")
    draw_update({name: (results[name], summarize(results[name])) for name in HEADLINE}, FOLDER / "update.png")
    overheads = {name: r for name, r in results.items() if r["kind"] == "overhead"}
    draw_overhead({r["model"]: (r["samples"], fit(r["samples"])) for r in overheads.values()}, FOLDER / "overhead.png")
    PAGE.write_text(page(results))
    text = README.read_text()
    if BEGIN in text:
        README.write_text(replace_section(text, readme_section(results)))


if __name__ == "__main__":
    main()
