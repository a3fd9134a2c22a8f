"""Times and counts the layouts of the policy update on the same rows; writes one JSON a run. `report.py` renders them.

```sh
pip install trl-padmin[plot]
python examples/benchmark/run.py cpu                        # all that the page shows, minutes on two CPU cores
python examples/benchmark/run.py time --model qwen2.5-7b    # on one H100 or H200, under ten minutes
python examples/benchmark/run.py time --model jamba2-3b
python examples/benchmark/report.py
```
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path

from layouts import LAYOUTS, PACKED, Setting, count_tokens
from profiles import PROFILES, trace_hash

import trl_padmin
from trl_padmin.planning import DEFAULT_OVERHEAD_TOKENS


RESULTS = Path(__file__).parent / "results"
REPOSITORY = Path(__file__).resolve().parents[2]


def clean_commit(repository: Path) -> str:
    """The commit that is checked out; refuses where figures could not be traced to one."""

    def git(*arguments):
        result = subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(
                f"{repository}: the commit is unknown ({result.stderr.strip()}). Run from a git checkout."
            )
        return result.stdout.strip()

    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed:
        raise SystemExit(f"{repository}: there are changes that are in no commit. Commit or undo them:\n{changed}")
    return commit


def provenance(argv: list[str]) -> dict:
    """What a reader needs to repeat a run."""
    from trl_padmin.compat import installed_versions

    if REPOSITORY not in Path(trl_padmin.__file__).resolve().parents:
        raise SystemExit(
            f"`trl_padmin` comes from {trl_padmin.__file__}, not from {REPOSITORY}: the commit is unknown."
        )
    return {
        "argv": argv,
        "commit": clean_commit(REPOSITORY),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": installed_versions(),
        "device": device_name(),
    }


def device_name() -> str:
    """The GPU, or the processor."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [
        line.split(":")[1].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def save(name: str, result: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"saved {RESULTS / name}.json", flush=True)


def count(args: argparse.Namespace) -> None:
    """Tokens of every layout on every profile, full lengths, averaged over draws. Nothing is forwarded."""
    cases = []
    for profile_name, profile in PROFILES.items():
        for row_count in (16, 32, 64, 256):
            setting = Setting(batch_size=8 if row_count == 256 else 4)
            draws = [
                profile.rows(row_count, seed) for seed in range(args.draws if row_count < 256 else args.draws // 4)
            ]
            real = [sum(map(sum, rows)) for rows in draws]
            for layout in LAYOUTS:
                counts = [count_tokens(layout, rows, profile, setting) for rows in draws]
                ratios = [c["forwarded_tokens"] / r for c, r in zip(counts, real, strict=True)]
                cuts = statistics.quantiles(ratios, n=5)
                cases.append(
                    {
                        "profile": profile_name,
                        "rows": row_count,
                        "batch_size": setting.batch_size,
                        "layout": layout,
                        "draws": len(draws),
                        "real_tokens": sum(real),
                        "forwarded_tokens": sum(c["forwarded_tokens"] for c in counts),
                        "ratio_p20": round(cuts[0], 4),
                        "ratio_p80": round(cuts[-1], 4),
                        "micro_batches": statistics.mean(c["micro_batches"] for c in counts),
                        "largest_tokens": statistics.mean(c["largest_tokens"] for c in counts),
                        "trace": trace_hash(draws),
                    }
                )
    found = provenance(args.argv)
    save("tokens", found | {"kind": "tokens", "cases": cases, "sensitivity": sensitivity(args.draws // 4)})


def sensitivity(draws: int) -> list[dict]:
    """What plans with the default `overhead_tokens` cost too much, if a micro-batch truly costs something else."""
    cases = []
    for profile_name, profile in PROFILES.items():
        windows = [profile.rows(32, seed) for seed in range(draws)]
        for overhead in (0, 16, 32, 64, 128, 256, 512, 1024):
            costs = []
            for planned in (Setting(4), Setting(4, overhead_tokens=overhead)):
                counts = [count_tokens("ours", rows, profile, planned) for rows in windows]
                costs.append(sum(c["forwarded_tokens"] + overhead * c["micro_batches"] for c in counts))
            excess = costs[0] / costs[1] - 1
            cases.append({"profile": profile_name, "true_overhead_tokens": overhead, "excess_frac": round(excess, 5)})
    return cases


def time_layouts(args: argparse.Namespace) -> None:
    """Scoring and update of one window in every layout, interleaved."""
    from measure import time_rounds
    from models import MODELS

    found = provenance(args.argv)
    spec, profile = MODELS[args.model], PROFILES[args.profile]
    scale = args.scale or spec.scale
    setting = Setting(args.batch_size, scale, args.overhead_tokens)
    rows = profile.rows(args.rows, args.seed, scale)
    layouts = args.layouts or [*LAYOUTS, *(PACKED if spec.can_pack else {})]
    started = time.perf_counter()
    runs, threads = time_rounds(spec, rows, profile, setting, layouts, args.rounds)
    save(
        f"{args.model}-{args.profile}-seed{args.seed}",
        found
        | {
            "kind": "time",
            "model": args.model,
            "profile": args.profile,
            "scale": scale,
            "rows": args.rows,
            "batch_size": args.batch_size,
            "overhead_tokens": args.overhead_tokens,
            "threads": threads,
            "seed": args.seed,
            "trace": trace_hash(rows),
            "real_tokens": sum(map(sum, rows)),
            "wall_s": round(time.perf_counter() - started, 1),
            "runs": runs,
        },
    )


def fit_overhead(args: argparse.Namespace) -> None:
    """Seconds of a micro-batch against its tokens; the intercept is what one more micro-batch costs."""
    from measure import time_micro_batches
    from models import MODELS

    found = provenance(args.argv)
    threads, samples = time_micro_batches(MODELS[args.model], args.rounds)
    save(f"overhead-{args.model}", found | {"kind": "overhead", "model": args.model, "threads": threads} | samples)


def cpu(args: argparse.Namespace) -> None:
    """Everything that the page shows, each run in a process of its own, two at a time."""
    few = ["--layouts", "stock", "truncate", "ours", "row_by_row"]
    commands = [
        ["tokens"],
        ["overhead", "--model", "qwen2-30m"],
        ["overhead", "--model", "jamba-30m"],
        # Seed 2 is the first draw of 32 rows with one completion above 6000 tokens; seed 0 has none.
        ["time", "--model", "jamba-30m", "--seed", "2"],
        ["time", "--model", "qwen2-30m", "--seed", "2"],
        ["time", "--model", "qwen2-30m", "--profile", "gsm8k_measured", "--scale", "8", *few],
        ["time", "--model", "qwen2-30m", "--seed", "0", *few],
        ["time", "--model", "qwen2-30m", "--profile", "equal", *few],
    ]

    def start(command):
        print(" ".join(command), flush=True)
        subprocess.run([sys.executable, __file__, *command], check=True)

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(start, commands))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cpu", help=cpu.__doc__).set_defaults(call=cpu)
    tokens = commands.add_parser("tokens", help=count.__doc__)
    tokens.add_argument("--draws", type=int, default=200)
    tokens.set_defaults(call=count)
    timed = commands.add_parser("time", help=time_layouts.__doc__)
    timed.add_argument("--model", required=True, help="a name in models.py")
    timed.add_argument("--profile", default="gsm8k_blog", choices=PROFILES)
    timed.add_argument("--rows", type=int, default=32)
    timed.add_argument("--seed", type=int, default=0, help="which draw of rows")
    timed.add_argument("--batch-size", type=int, default=4, help="rows of one of TRL's micro-batches")
    timed.add_argument("--scale", type=int, help="divide lengths by this; default of the model")
    timed.add_argument("--overhead-tokens", type=int, default=DEFAULT_OVERHEAD_TOKENS)
    timed.add_argument(
        "--rounds", type=int, default=3, help="the first one is all layouts, later ones leave out config_max"
    )
    timed.add_argument("--layouts", nargs="+", choices=[*LAYOUTS, *PACKED])
    timed.set_defaults(call=time_layouts)
    fit = commands.add_parser("overhead", help=fit_overhead.__doc__)
    fit.add_argument("--model", required=True)
    fit.add_argument("--rounds", type=int, default=3)
    fit.set_defaults(call=fit_overhead)
    args = parser.parse_args(argv)
    args.argv = argv
    args.call(args)


if __name__ == "__main__":
    main(sys.argv[1:])
