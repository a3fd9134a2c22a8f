"""`python -m trl_padmin env`: what a bug report needs."""

import argparse

from .compat import installed_versions


def main() -> None:
    parser = argparse.ArgumentParser(prog="trl_padmin", description="GRPO without padding.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print the versions that a bug report needs")
    parser.parse_args()
    for name, version in installed_versions().items():
        print(f"- {name}: {version}")


if __name__ == "__main__":
    main()
