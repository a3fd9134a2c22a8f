"""Runs scripts and notebooks that were written for TRL's trainers, unchanged, with ours in their place.

```bash
trl-padmin run [our options] script.py [arguments of the script]
accelerate launch [its options] -m trl_padmin run -m trl.scripts.grpo [arguments of the module]
```

In a notebook, `trl_padmin.install()` or `%load_ext trl_padmin` does the same until `trl_padmin.uninstall()`.
"""

import os
import runpy
import sys
from argparse import REMAINDER
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import cache, wraps
from types import TracebackType

import trl
from transformers import HfArgumentParser

import trl_padmin

from .config import PaddingMinimizationOptions


# Trainer in `trl`: ours that stands in for it.
REPLACED = {
    "GRPOTrainer": "PadminGRPOTrainer",
    "RLOOTrainer": "PadminRLOOTrainer",
    "SFTTrainer": "PadminSFTTrainer",
    "DPOTrainer": "PadminDPOTrainer",
}

_installed: PaddingMinimizationOptions | None = None
_made: set[str] = set()  # names of the replaced trainers that were constructed


def install(**options) -> None:
    """Lets TRL's trainers be ours, wherever they are looked up from now on: in `trl`, in its modules, in a notebook.

    Installing again changes the options. A class that was derived from a trainer of TRL before stays as it is, and is
    named in the line that is printed.

    Args:
        options: Those of [`PaddingMinimizationOptions`], for every config that does not have them.

    Raises:
        `TypeError`, `ValueError`: an option is unknown or out of its range.
    """
    _report(_install(PaddingMinimizationOptions(**options)), sys.stdout)


def uninstall() -> None:
    """Undoes [`install`]. Classes that were derived from the replaced trainers meanwhile are stock again."""
    _report(_uninstall(), sys.stdout)


@contextmanager
def installed(**options) -> Iterator[None]:
    """[`install`] for the time of a `with` block; prints nothing. What was installed before comes back at its end."""
    before = _installed
    _install(PaddingMinimizationOptions(**options))
    try:
        yield
    finally:
        if before is None:
            _uninstall()
        else:
            _install(before)


def load_ipython_extension(shell: object) -> None:
    """`%load_ext trl_padmin`"""
    install()


def unload_ipython_extension(shell: object) -> None:
    """`%unload_ext trl_padmin`"""
    uninstall()


def main(argv: Sequence[str]) -> int:
    """`trl-padmin run`: runs a script or a module with TRL's trainers replaced by ours.

    The script sees its own `sys.argv`, `__file__` and `sys.path`. How it exits, and the traceback of an error in it,
    are its own too.

    Args:
        argv (`Sequence[str]`): Our options, the script, and its arguments.

    Returns:
        `int`: exit status 0, at the normal end of the script.
    """
    parser = HfArgumentParser(
        PaddingMinimizationOptions,
        prog="trl-padmin run",
        usage="%(prog)s [options] script.py ...\n       %(prog)s [options] -m module ...",
        description="Runs a script, unchanged, with TRL's trainers replaced by ours.",
        allow_abbrev=False,
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="Run a module, as `python -m` does.")
    parser.add_argument("script", help="Script or module to run.")
    parser.add_argument("script_args", nargs=REMAINDER, metavar="...", help="Arguments of the script.")
    parsed = parser.parse_args(argv)
    if not parsed.is_module and not os.path.exists(parsed.script):
        parser.error(f"there is no script `{parsed.script}`")
    options = {f.name: getattr(parsed, f.name) for f in fields(PaddingMinimizationOptions)}
    try:
        line = _install(PaddingMinimizationOptions(**options))
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    _report(line, sys.stderr)
    _made.clear()
    sys.excepthook = _without_our_frames(sys.excepthook)
    try:
        _run(parsed.script, parsed.script_args, parsed.is_module)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    finally:
        _uninstall()
    if not _made:
        _report(f"{_names()} were replaced, but the script made none of them: it ran as without us", sys.stderr)
    return 0


def _run(script: str, script_args: Sequence[str], is_module: bool) -> None:
    sys.argv = [script, *script_args]
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(os.path.abspath(script), run_name="__main__")


def _without_our_frames(hook):
    """An `excepthook` that shows what `python script.py` would: the traceback from the script's first frame on."""

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        entry = traceback
        while entry is not None and entry.tb_frame.f_code is not _run.__code__:
            entry = entry.tb_next
        if entry is not None:
            traceback = entry.tb_next
            while traceback is not None and traceback.tb_frame.f_globals.get("__name__") == "runpy":
                traceback = traceback.tb_next
        hook(kind, error.with_traceback(traceback), traceback)

    return excepthook


def _install(options: PaddingMinimizationOptions) -> str:
    """Replaces TRL's trainers, or changes the options if they are replaced already; returns what to tell."""
    global _installed
    options.check_padding_options()
    earlier = []
    for stock, stand_in in _stand_ins():
        stand_in.padding_defaults = options
        _rebind(stock, stand_in)
        earlier += [derived.__name__ for derived in stock.__subclasses__() if _is_users(derived)]
    _installed = options
    ours_by_default = asdict(PaddingMinimizationOptions())
    changed = [f"{name}={value!r}" for name, value in asdict(options).items() if value != ours_by_default[name]]
    line = f"{_names()} of trl forward almost no padding now" + (f" ({', '.join(changed)})" if changed else "")
    return line + (f"; derived before, so still stock: {', '.join(sorted(set(earlier)))}" if earlier else "")


def _uninstall() -> str:
    global _installed
    if _installed is None:
        return "nothing is installed"
    for stock, stand_in in _stand_ins():
        stand_in.padding_defaults = PaddingMinimizationOptions(padding_minimization=False)
        _rebind(stand_in, stock)
    _installed = None
    return f"{_names()} of trl are stock again"


@cache
def _stand_ins() -> list[tuple[type, type]]:
    """Each stock trainer with the class that stands in for it.

    Loads our trainers, and so what they know as TRL's, before anything is replaced. The classes are made once, so that
    what a notebook derived from them follows when the options change.
    """
    # Ours first, for all of them: they import TRL's trainers.
    ours = [getattr(trl_padmin, name) for name in REPLACED.values()]
    pairs = []
    for name, own in zip(REPLACED, ours, strict=True):
        stock = getattr(trl, name)
        if not issubclass(own, stock):
            raise RuntimeError(
                f"`trl.{name}` is `{stock.__module__}.{stock.__qualname__}`, which something put there after "
                "`trl_padmin` was loaded. Load that first, then install."
            )
        pairs.append((stock, _stand_in(stock, own)))
    return pairs


def _stand_in(stock: type, ours: type) -> type:
    """A class of its own, so that what we put in place of TRL's is told from what a script imports from us."""

    @wraps(stock.__init__)
    def __init__(self, *args, **kwargs):
        _made.add(stock.__name__)
        super(stand_in, self).__init__(*args, **kwargs)

    stand_in = type(stock.__name__, (ours,), {"__init__": __init__, "__module__": __name__, "__doc__": ours.__doc__})
    return stand_in


def _rebind(old: type, new: type) -> None:
    """Lets every loaded module that holds `old` under its name hold `new` instead; not our own modules."""
    for name, module in list(sys.modules.items()):
        is_ours = name.partition(".")[0] == trl_padmin.__name__
        # Not `getattr`: a lazy module would load what it is asked for.
        if not is_ours and (getattr(module, "__dict__", None) or {}).get(old.__name__) is old:
            setattr(module, old.__name__, new)


def _is_users(trainer_class: type) -> bool:
    is_trls = trainer_class.__module__.startswith("trl.")
    return not is_trls and not any(each.__module__.startswith("trl_padmin.") for each in trainer_class.__mro__)


def _names() -> str:
    *others, last = REPLACED
    return f"{', '.join(others)} and {last}" if others else last


def _report(line: str, stream) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"trl_padmin: {line}", file=stream)
