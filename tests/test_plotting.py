"""What users see of a run: a picture of its micro-batches, a table in Jupyter, TensorBoard, `trainer_state.json`."""

import json
import sys

import pytest
from harness import COMPLETIONS, PROMPTS, make_rows, run, tiny_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer, plan_micro_batches, plot_padding


ROWS = list(zip(PROMPTS, COMPLETIONS, strict=True))


def bars(ax):
    """(real, pad) of each micro-batch, as drawn."""
    real, pad = ([bar.get_height() for bar in container] for container in ax.containers)
    assert [bar.get_y() for bar in ax.containers[1]] == real  # padding stands on the real tokens
    return list(zip(real, pad, strict=True))


def train(**options):
    return run(PadminGRPOTrainer, make_rows(), tiny_model(), config_class=PadminGRPOConfig, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    options = {"report_to": ["tensorboard"], "save_strategy": "steps", "save_steps": 2, "optimizer_steps": 2}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "events"))
        return folder, train(output_dir=str(folder), **options)


def test_rows_are_drawn_as_stock_and_as_planned():
    stock, ours = plot_padding(ROWS, batch_size=2, overhead_tokens=5).axes
    lengths = [p + c for p, c in ROWS]
    width = max(PROMPTS) + max(COMPLETIONS)
    pairs = [sum(lengths[i : i + 2]) for i in range(0, 8, 2)]
    assert bars(stock) == [(real, 2 * width - real) for real in pairs]
    plan = plan_micro_batches(lengths, 2 * width, overhead_tokens=5, min_micro_batches=4)
    expected = [sum(lengths[row] for row in group) for group in plan]
    assert [real for real, _ in bars(ours)] == expected
    assert sum(map(sum, bars(ours))) == plan.forwarded_tokens < sum(map(sum, bars(stock)))


def test_reads_without_a_caption():
    stock, ours = plot_padding(ROWS, batch_size=2).axes
    assert stock.get_ylabel() == "forwarded tokens" and "micro-batch" in ours.get_xlabel()
    assert stock.get_title().startswith("stock TRL: 408 tokens") and ours.get_title().startswith("trl_padmin: ")
    assert [text.get_text() for text in ours.get_legend().get_texts()] == ["real tokens", "padding"]


def test_a_trainer_shows_the_forwards_that_it_ran(trained, tmp_path):
    _, result = trained
    stock, ours = plot_padding(result.trainer).axes
    policy = [forward for forward in result.forwards if forward["grad"]]
    last_window = policy[len(policy) // 2 :]
    assert [sum(bar) for bar in bars(ours)] == [forward["ids"].numel() for forward in last_window]
    assert [real for real, _ in bars(ours)] == [int(forward["mask"].sum()) for forward in last_window]
    assert sum(map(sum, bars(stock))) == 8 * (max(PROMPTS) + max(COMPLETIONS))
    figure = plot_padding(result.trainer)
    figure.savefig(tmp_path / "padding.png")
    for png in ((tmp_path / "padding.png").read_bytes(), figure._repr_png_()):  # the latter is what Jupyter shows
        assert png.startswith(b"\x89PNG")


def test_metrics_are_in_tensorboard_and_in_the_trainer_state(trained):
    folder, result = trained
    logged = [{k: v for k, v in log.items() if k.startswith("padding/")} for log in result.logs[:2]]
    assert len(logged[0]) == 7
    (events,) = {file.parent for file in (folder / "events").rglob("*tfevents*")} or {None}
    reader = EventAccumulator(str(events)).Reload()
    state = json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())
    for name in logged[0]:
        values = [log[name] for log in logged]
        assert [scalar.value for scalar in reader.Scalars(f"train/{name}")] == pytest.approx(values, rel=1e-6)
        assert [log[name] for log in state["log_history"]] == values
    assert logged[0]["padding/pad_frac"] < logged[0]["padding/pad_frac_stock"]


def test_the_stats_of_a_run_are_a_table_in_jupyter(trained):
    _, result = trained
    html = result.trainer.padding_stats._repr_html_()
    assert html.startswith("<table>") and f"{result.trainer.padding_stats.real_tokens:,}" in html


def test_a_trainer_that_planned_nothing_has_nothing_to_show():
    def fail_to_plot(trainer):
        with pytest.raises(ValueError, match="planned no micro-batches yet"):
            plot_padding(trainer)

    stock = train(padding_minimization=False, prepare=fail_to_plot).trainer
    fail_to_plot(stock)


def test_wrong_rows_and_options():
    for rows, options, message in (
        ([], {"batch_size": 2}, "it has none"),
        ([(1, 2, 3)], {"batch_size": 2}, r"\(1, 2, 3\)"),
        (ROWS, {}, "`batch_size` is missing"),
        (ROWS, {"batch_size": 0}, "`batch_size`=0"),
        (ROWS, {"batch_size": 2, "token_budget": -1}, "`token_budget`=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_padding(rows, **options)


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install trl-padmin\[plot\]"):
        plot_padding(ROWS, batch_size=2)
