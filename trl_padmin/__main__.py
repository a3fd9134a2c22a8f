"""The command line: `python -m trl_padmin COMMAND`, or `trl-padmin COMMAND`.

Each command is a module's `main`, loaded when it is asked for, so that none pays for the imports of another.
"""

import sys
from collections.abc import Sequence
from importlib import import_module


# Command: module, what it is for.
COMMANDS = {
    "env": ("compat", "print the versions that a bug report needs"),
    "run": ("launcher", "run a script, unchanged, with TRL's trainers replaced by ours"),
    "estimate": ("estimate", "tell from row lengths what a run of yours would save; needs no GPU and no model"),
    "probe": ("probe", "measure on a model of yours which layouts it scores right"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command with the arguments behind its name.

    Args:
        argv (`Sequence[str]`, *optional*): The command and its arguments; those of the process by default.

    Returns:
        `int`: exit status, 2 where there is no such command.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        asked_for_help = argv[:1] in (["-h"], ["--help"])
        width = max(map(len, COMMANDS))
        usage = ["usage: trl-padmin COMMAND ...", ""]
        usage += [f"  {name:<{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
        if argv and not asked_for_help:
            usage += ["", f"trl-padmin: `{argv[0]}` is not a command"]
        print("\n".join(usage), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    module, _ = COMMANDS[argv[0]]
    return import_module(f".{module}", __package__).main(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
