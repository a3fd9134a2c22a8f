"""Imports go downwards only."""

import ast
import sys
from pathlib import Path

import pytest

import trl_padmin


PACKAGE = Path(trl_padmin.__file__).parent
# A module imports only those before it.
ORDER = (
    "planning",
    "stats",
    "layout",
    "row_files",
    "plotting",
    "estimate",
    "compat",
    "images",
    "distributed",
    "window",
    "config",
    "collators",
    "probe",
    "scoring",
    "trainer",
    "supervised_compat",
    "example_window",
    "supervised",
    "launcher",
    "__init__",
    "__main__",
)
STDLIB_ONLY = ("planning", "stats")


def imports(name):
    """Modules of the package that a module imports, and names of other packages."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    own, others = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            own |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            others.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
    return own, others


def test_every_module_has_its_place():
    assert sorted(ORDER) == sorted(path.stem for path in PACKAGE.glob("*.py"))


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_downwards(name):
    own, _ = imports(name)
    assert own <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_planning_needs_nothing(name):
    _, others = imports(name)
    assert others <= sys.stdlib_module_names
