"""The notebooks run, their committed outputs are complete, and figures that do not depend on time are still right."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = ["1_quickstart", "2_how_it_works", "3_benchmark"]


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(notebook):
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return notebook


def outputs(notebook, kind):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [out["data"][kind] for cell in cells for out in cell.outputs if kind in out.get("data", {})]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run_and_show_what_is_committed(name):
    committed = read(name)
    executed = execute(read(name))
    assert outputs(executed, "text/markdown") == outputs(committed, "text/markdown")
    assert len(outputs(executed, "image/png")) == len(outputs(committed, "image/png")) > 0


def test_all_notebooks_are_committed_with_their_outputs():
    assert sorted(file.stem for file in FOLDER.glob("*.ipynb")) == NOTEBOOKS
    for name in NOTEBOOKS:
        cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), name
        assert not any(out.output_type == "error" for cell in cells for out in cell.outputs), name


def test_a_cell_that_fails_is_noticed():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 1 == 2")])
    with pytest.raises(CellExecutionError):
        execute(notebook)
