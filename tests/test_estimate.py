"""`trl-padmin estimate`: its figures are the trainer's own, and what it cannot read it says so."""

import json
import subprocess
import sys

import harness
import pyarrow
import pyarrow.parquet
import pytest
from harness import COMPLETIONS, PROMPTS, make_rows, run, tiny_model

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer
from trl_padmin.__main__ import main
from trl_padmin.estimate import Setting, estimate, format_table, plot_estimate
from trl_padmin.row_files import read_rows


ROWS = list(zip(PROMPTS, COMPLETIONS, strict=True))


def write_csv(path, rows=ROWS, header="prompt_tokens,completion_tokens"):
    path.write_text("\n".join([header, *(f"{p},{c}" for p, c in rows)]) + "\n")
    return path


def call(*arguments):
    return main(["estimate", *map(str, arguments), "--rows-per-window", "8", "--per-device-batch-size", "2"])


@pytest.mark.parametrize("options", [{}, {"token_budget": 30}, {"overhead_tokens": 5}, {"pad_to_multiple_of": 8}])
def test_the_estimate_is_what_the_trainer_logs(options):
    logged = run(PadminGRPOTrainer, make_rows(), tiny_model(), config_class=PadminGRPOConfig, **options).logs[0]
    planner = {name: value for name, value in options.items() if name != "token_budget"}

    def metrics(batch_size):
        _, ours = estimate(ROWS, Setting(8, batch_size, **planner), [options.get("token_budget")])
        return ours.stats.as_metrics()

    assert metrics(2) == {name: value for name, value in logged.items() if name.startswith("padding/")}
    assert metrics(1) != metrics(2)  # negative control: another run than the trainer's gives other figures


def test_stock_is_padded_rank_by_rank():
    rows = [(3, 10), (5, 20), (4, 8), (2, 2)]
    (stock, _) = estimate(rows, Setting(2, 1, ranks=2))
    assert stock.stats.forwarded_tokens == 2 * (5 + 20) + 2 * (4 + 8)
    assert stock.stats.critical_tokens == 2 * 2 * 25  # the second rank waits for the first
    assert stock.stats.micro_batches == 4
    assert stock.largest_tokens == 25
    assert stock.stats.real_tokens == 54


def test_rows_move_between_ranks():
    """One rank holds all the long rows, so it alone sets stock's pace; spread over both it does not."""
    rows = [(2, 38)] * 4 + [(2, 3)] * 4
    stock, ours = estimate(rows, Setting(4, 1, ranks=2, overhead_tokens=1))
    assert stock.stats.rank_imbalance == pytest.approx(160 / 90)
    assert ours.stats.rank_imbalance == 1.0
    assert ours.stats.forwarded_tokens == ours.stats.real_tokens == 180
    assert "critical path" in format_table([stock, ours], ranks=2).splitlines()[0]
    assert len(plot_estimate([stock, ours], ranks=2).axes) == 3
    assert len(plot_estimate([stock, ours], ranks=1).axes) == 2


def test_windows_are_cut_in_order_and_the_rest_is_left_out():
    rows = [(1, 1), (1, 9), (1, 3), (1, 3), (1, 500)]
    stock, ours = estimate(rows, Setting(2, 1))
    assert (stock.windows, stock.stats.rows, stock.stats.forwarded_tokens) == (2, 4, 2 * 10 + 2 * 4)
    assert ours.stats.stock_tokens == stock.stats.forwarded_tokens


def test_the_files_that_trl_logs(tmp_path):
    """What a run logged, twice for each generation, is counted once, with the end token that TRL's text leaves out."""
    rows = make_rows()
    options = {"log_completions": True, "num_completions_to_print": 0, "num_iterations": 2, "optimizer_steps": 4}
    run(PadminGRPOTrainer, rows, tiny_model(), config_class=PadminGRPOConfig, output_dir=str(tmp_path), **options)
    harness.tokenizer().save_pretrained(tmp_path / "tokenizer")
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    assert len(files) == 4
    text_tokens = [sum(token not in (harness.PAD, harness.EOS) for token in row.completion) for row in rows]
    expected = [(1, tokens + 1) for tokens in text_tokens]  # a prompt of the data set is one word
    assert read_rows([files[0]], str(tmp_path / "tokenizer")) == expected
    assert len(read_rows([tmp_path / "completions"], str(tmp_path / "tokenizer"))) == 2 * len(rows)
    assert call(tmp_path / "completions", "--tokenizer", tmp_path / "tokenizer", "--no-figure") == 0


def test_conversations_are_counted_with_their_template(tmp_path):
    tokenizer = harness.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}2 {{ m['content'] }} 3 {% endfor %}{% if add_generation_prompt %}4 {% endif %}"
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prompt = [{"role": "user", "content": "5 6 7"}]
    answer = [{"role": "assistant", "content": "8 9"}]
    turns = [
        {"role": "assistant", "content": "8 9", "tool": "f"},
        {"role": "tool", "content": "5", "tool": None},
        {"role": "assistant", "content": "6", "tool": None},
    ]
    table = pyarrow.table({"prompt": [prompt, prompt], "completion": [answer, turns]})
    pyarrow.parquet.write_table(table, tmp_path / "completions.parquet")
    rows = read_rows([tmp_path / "completions.parquet"], str(tmp_path / "tokenizer"))
    assert rows == [(6, 2 + 1), (6, (5 + 4 + 3 + 3) - 6)]


def test_csv_jsonl_and_parquet_hold_the_same(tmp_path):
    csv = write_csv(tmp_path / "rows.csv")
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_text("".join(json.dumps({"prompt_tokens": p, "completion_tokens": c, "x": 1}) + "\n" for p, c in ROWS))
    parquet = tmp_path / "rows.parquet"
    columns = dict(zip(("prompt_tokens", "completion_tokens"), zip(*ROWS, strict=True), strict=True))
    pyarrow.parquet.write_table(pyarrow.table({name: list(values) for name, values in columns.items()}), parquet)
    assert read_rows([csv]) == read_rows([jsonl]) == read_rows([parquet]) == ROWS


def test_prints_a_table_and_saves_a_picture(tmp_path, capsys):
    picture = tmp_path / "estimate.png"
    assert call(write_csv(tmp_path / "rows.csv", [*ROWS, (1, 1)]), "--token-budget", 30, 60, "--figure", picture) == 0
    out = capsys.readouterr().out
    assert "1 optimizer step(s) of 8 rows" in out and "the last 1 of 9 rows" in out
    lines = [line for line in out.splitlines() if line.startswith(("stock", "trl_padmin"))]
    assert len(lines) == 4 and lines[0].split()[2] == f"{100 * (1 - sum(map(sum, ROWS)) / (8 * 51)):.1f}"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_needs_neither_torch_nor_trl(tmp_path):
    arguments = [str(write_csv(tmp_path / "rows.csv")), "--figure", str(tmp_path / "estimate.png")]
    script = (
        "import sys\nfrom trl_padmin.__main__ import main\n"
        f"assert main(['estimate', *{arguments!r}, '--rows-per-window', '8', '--per-device-batch-size', '2']) == 0\n"
        "assert not {'torch', 'trl', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_without_matplotlib_the_table_is_there_and_the_error_says_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = write_csv(tmp_path / "rows.csv")
    assert call(file, "--figure", tmp_path / "estimate.png") == 2
    captured = capsys.readouterr()
    assert "stock TRL" in captured.out and "pip install" in captured.err
    assert call(file, "--no-figure") == 0


BAD = {
    "rows.txt": ("prompt_tokens,completion_tokens\n1,1\n", ".csv, .jsonl, .parquet"),
    "column.csv": (
        "prompt_tokens,tokens\n1,1\n",
        "no column `completion_tokens`; its columns are prompt_tokens, tokens",
    ),
    "header.csv": ("prompt_tokens,completion_tokens\n", "has no rows"),
    "empty.csv": ("", "has no rows"),
    "empty.jsonl": ("\n", "has no rows"),
    "broken.jsonl": ('{"prompt_tokens": 1', "line 1 is not JSON"),
    "list.jsonl": ("[1, 2]\n", "line 1 is not an object"),
    "word.csv": ("prompt_tokens,completion_tokens\n1,long\n", "`completion_tokens`='long' is not a number of tokens"),
    "hole.jsonl": ('{"prompt_tokens": 1, "completion_tokens": 2}\n{"prompt_tokens": 1}\n', "`completion_tokens`=None"),
    "negative.csv": ("prompt_tokens,completion_tokens\n-1,1\n", "`prompt_tokens`='-1'"),
    "fraction.csv": ("prompt_tokens,completion_tokens\n1,1.5\n", "`completion_tokens`='1.5'"),
    "text.parquet": ("this is not parquet", "is not a parquet file"),
    "few.csv": ("prompt_tokens,completion_tokens\n1,1\n", "1 rows do not fill one optimizer step of 8 rows x 1 ranks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_a_clear_error(name, tmp_path, capsys):
    text, message = BAD[name]
    (tmp_path / name).write_text(text)
    assert call(tmp_path / name, "--no-figure") == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_more_errors(tmp_path, capsys):
    file = write_csv(tmp_path / "rows.csv")
    table = pyarrow.table({"prompt": ["2"], "completion": ["3"]})
    pyarrow.parquet.write_table(table, tmp_path / "text.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"prompt_tokens": [2]}), tmp_path / "column.parquet")
    (tmp_path / "folder").mkdir()
    for arguments, message in (
        ([tmp_path / "missing.csv"], "missing.csv"),
        ([tmp_path / "folder"], "a folder without parquet files"),
        ([tmp_path / "text.parquet"], "Give `--tokenizer`"),
        ([tmp_path / "column.parquet"], "no column `completion_tokens`"),
        ([file, "--ranks", 0], "`ranks`=0"),
        ([file, "--token-budget", 0], "`token_budget`=0"),
        ([file, "--overhead-tokens", -1], "`overhead_tokens`=-1"),
    ):
        assert call(*arguments, "--no-figure") == 2
        assert message in capsys.readouterr().err
    assert main(["estimate", str(file), "--rows-per-window", "8", "--per-device-batch-size", "3", "--no-figure"]) == 2
    assert "`rows_per_window`=8 is not a multiple of `batch_size`=3" in capsys.readouterr().err
