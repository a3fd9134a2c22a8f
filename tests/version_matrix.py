"""Runs the parity suite against every minor release of TRL 1.x, each installed into its own folder.

    python tests/version_matrix.py [--folder DIR] [--minors 1.0 1.8 1.16] [--keyword EXPRESSION]

Prints one line a release. Everything but TRL is what is installed. TRL 1.15.0 scores with a Triton kernel only and
cannot run on a CPU, so there it is installed and its contract is checked, not its gradients.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path


MINORS = [f"1.{minor}" for minor in range(17)]
NEEDS_GPU = {"1.15": "its scoring kernel needs Triton; contract checked only"}
TESTS = Path(__file__).parent


def install(minor: str, folder: Path) -> Path:
    target = folder / minor
    if not (target / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
        subprocess.run([*command, f"trl=={minor}.*"], check=True)
    return target


def run_suite(minor: str, target: Path, keyword: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "import trl; print(trl.__version__, trl.__file__)"],
        env=environment,
        capture_output=True,
        text=True,
    )
    version, location = found.stdout.split()
    if not location.startswith(str(target)):
        raise RuntimeError(f"`trl` was imported from {location}, not from {target}.")
    tests, expression = (
        (["test_parity.py"], keyword) if minor not in NEEDS_GPU else (["test_compat.py"], "contract and not batch")
    )  # a batch is scored
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", expression]
    result = subprocess.run(
        [*command, *(str(TESTS / test) for test in tests)], env=environment, capture_output=True, text=True
    )
    lines = result.stdout.splitlines()
    counts = lines[-1] if lines else result.stderr[-300:]
    worst = next((re.search(r"error (\S+)", line)[1] for line in lines if line.startswith("parity:")), "-")
    verdict = "ok" if result.returncode == 0 else "FAILED"
    note = NEEDS_GPU.get(minor, f"worst gradient error {worst}")
    return f"TRL {version:8} {verdict:6} {counts.strip('= ')}; {note}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "trl_padmin" / "versions")
    parser.add_argument("--minors", nargs="+", default=MINORS)
    parser.add_argument("--keyword", default="", help="pytest -k expression, to run a part of the suite")
    arguments = parser.parse_args()
    verdicts = []
    for minor in arguments.minors:
        line = run_suite(minor, install(minor, arguments.folder.resolve()), arguments.keyword)
        print(line, flush=True)
        verdicts.append("FAILED" not in line.split(maxsplit=3)[2])
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
