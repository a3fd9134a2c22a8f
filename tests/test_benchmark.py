"""The benchmark measures what it says: its layouts are those of the trainers, and figures name their commit."""

import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import make_rows, run, tiny_model
from transformers.models.jamba import modeling_jamba
from trl import GRPOTrainer

from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer


FOLDER = Path(__file__).parents[1] / "examples" / "benchmark"
sys.path.insert(0, str(FOLDER))

import measure  # noqa: E402
import models  # noqa: E402
import report  # noqa: E402
import run as run_script  # noqa: E402
from layouts import LAYOUTS, PACKED, Setting, count_tokens, group_rows  # noqa: E402
from profiles import PROFILES, Profile, trace_hash  # noqa: E402


ROWS = PROFILES["gsm8k_blog"].rows(16, seed=5, scale=64)
PROFILE = Profile("", 4096, 8192, None)
SETTING = Setting(batch_size=4, scale=64)


def shapes(forwards, grad):
    return [tuple(forward["ids"].shape) for forward in forwards if forward["grad"] is grad]


@pytest.mark.parametrize("overhead_tokens", [128, 8192])  # the latter leaves no more micro-batches than stock's
def test_stock_and_ours_are_what_the_trainers_forward(overhead_tokens):
    setting = Setting(batch_size=4, scale=64, overhead_tokens=overhead_tokens)
    rows = make_rows([c for _, c in ROWS], [p for p, _ in ROWS])
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_completion_length": 200}
    model = {"dtype": torch.float32, "max_position_embeddings": 512}
    stock = run(GRPOTrainer, rows, tiny_model(**model), **options)
    ours = run(
        PadminGRPOTrainer,
        rows,
        tiny_model(**model),
        config_class=PadminGRPOConfig,
        overhead_tokens=setting.scaled_overhead,
        **options,
    )
    lengths, width = [p + c for p, c in ROWS], sum(map(max, zip(*ROWS, strict=True)))

    def expected(layout):
        groups = group_rows(layout, lengths, width, setting)
        return [(len(g), width if layout == "stock" else max(lengths[row] for row in g)) for g in groups]

    assert shapes(stock.forwards, grad=True) == expected("stock")
    assert shapes(ours.forwards, grad=True) == expected("ours")
    assert expected("greedy") != expected("ours") != expected("stock")  # negative control


@pytest.mark.parametrize("model_type", ["qwen2", "jamba"])
def test_every_layout_computes_the_same_gradient_and_forwards_what_it_says(model_type):
    """`time_rounds` raises otherwise; here in the small, with rows joined end to end where the model allows it."""
    jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}
    config = {name: value for name, value in harness._SMALL.items() if "token_id" not in name}
    spec = models.Model(model_type, config | (jamba if model_type == "jamba" else {}), device="cpu")
    layouts = [*LAYOUTS, *(PACKED if model_type == "qwen2" else {})]
    runs, threads = measure.time_rounds(spec, ROWS, PROFILE, SETTING, layouts, 2)
    assert threads == 1
    assert [r["layout"] for r in runs].count("config_max") == 1
    assert sorted({r["layout"] for r in runs}) == sorted(layouts)
    assert max(r["grad_norm"] for r in runs) > 0
    assert all(r["policy_s"] > 0 and r["scoring_s"] > 0 and r["saved_mib"] > 0 for r in runs)
    broken = [runs[0], {**runs[1], "grad_norm": 1.01 * runs[1]["grad_norm"]}]
    with pytest.raises(RuntimeError, match="another gradient"):
        measure.check(broken, ROWS, PROFILE, SETTING, tolerance=1e-3)
    broken = [{**runs[1], "policy_tokens": runs[1]["policy_tokens"] + 1}]
    with pytest.raises(RuntimeError, match="forwarded"):
        measure.check(broken, ROWS, PROFILE, SETTING, tolerance=1e-3)


@pytest.mark.parametrize("layout", [*LAYOUTS, *PACKED])
@pytest.mark.parametrize("profile", PROFILES)
def test_layouts_place_every_row_once(layout, profile):
    rows = PROFILES[profile].rows(32, seed=1)
    lengths = [p + c for p, c in rows]
    groups = group_rows(layout, lengths, sum(map(max, zip(*rows, strict=True))), Setting(4))
    assert sorted(row for group in groups for row in group) == list(range(32))
    tokens = count_tokens(layout, rows, PROFILES[profile], Setting(4))
    assert tokens["forwarded_tokens"] >= sum(lengths)
    assert (tokens["forwarded_tokens"] == sum(lengths)) >= (layout in ("row_by_row", "packed"))


def test_profiles_are_as_stated():
    stated = {"gsm8k_blog": (200, 707), "gsm8k_measured": (102, 273), "rag_long_prompt": (1469, 13)}
    for name, medians in stated.items():
        profile = PROFILES[name]
        rows = profile.rows(4000, seed=0)
        for column, median, cap in zip(
            zip(*rows, strict=True), medians, (profile.prompt_cap, profile.completion_cap), strict=True
        ):
            assert sorted(column)[2000] == pytest.approx(median, rel=0.05), name
            assert max(column) <= cap
    outliers = sum(completion >= 6000 for _, completion in PROFILES["gsm8k_blog"].rows(4000, seed=0)) / 4000
    assert outliers == pytest.approx(0.015, abs=0.005)
    assert PROFILES["gsm8k_blog"].rows(8, seed=1) == PROFILES["gsm8k_blog"].rows(8, seed=1)


def test_the_scan_of_the_benchmark_equals_that_of_transformers():
    """Else the times of the Jamba-like model would be those of another model."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    inputs = {
        "hidden_states": normal(3, 8, 11),
        "dt": normal(3, 8, 11),
        "A": -normal(8, 4).exp(),
        "B": normal(3, 4, 11),
        "C": normal(3, 4, 11),
        "D": normal(8),
        "z": normal(3, 8, 11),
        "delta_bias": normal(8),
    }
    weight = normal(3, 8, 11)
    results = []
    for scan in (models.selective_scan, TRANSFORMERS_SCAN):
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        output, state = scan(**leaves, delta_softplus=True, return_last_state=True)
        ((output * weight).sum() + state.sum()).backward()
        results.append([output.detach(), state.detach(), *(leaf.grad for leaf in leaves.values())])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-4, atol=1e-5)


TRANSFORMERS_SCAN = modeling_jamba.mamba_selective_scan


def test_figures_are_refused_without_a_commit(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    with pytest.raises(SystemExit, match="the commit is unknown"):
        run_script.clean_commit(tmp_path)
    git("init")
    with pytest.raises(SystemExit, match="the commit is unknown"):
        run_script.clean_commit(tmp_path)
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    assert len(run_script.clean_commit(tmp_path)) == 40
    (tmp_path / "file").write_text("2")
    with pytest.raises(SystemExit, match="changes that are in no commit"):
        run_script.clean_commit(tmp_path)


@pytest.fixture(scope="module")
def results():
    return report.load()


def test_the_page_is_rendered_from_the_committed_json(results):
    assert report.PAGE.read_text() == report.page(results)
    for name in ("tokens", "rows", "update", "overhead"):
        assert f"({name}.png)" in report.PAGE.read_text()
        assert (FOLDER / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_shows_the_committed_json(results):
    text = report.README.read_text()
    assert report.replace_section(text, report.readme_section(results)) == text
    tampered = text.replace("| 1.02 |", "| 1.01 |")  # negative control
    assert tampered != text and report.replace_section(tampered, report.readme_section(results)) == text


def test_figures_name_their_commit_and_their_rows(results):
    assert {result["kind"] for result in results.values()} == {"tokens", "overhead", "time"}
    for name, result in results.items():
        assert len(result["commit"]) == 40 and result["date"] and result["device"] and result["argv"], name
        assert result["versions"]["trl"] != "not installed"
        if result["kind"] == "time":
            rows = PROFILES[result["profile"]].rows(result["rows"], result["seed"], result["scale"])
            assert result["trace"] == trace_hash(rows)
            setting = Setting(result["batch_size"], result["scale"], result["overhead_tokens"])
            measure.check(result["runs"], rows, PROFILES[result["profile"]], setting, tolerance=1e-3)


def test_what_the_figures_must_show(results):
    """At most 1.03 forwarded per real token, at most 1.05 x the time of each row alone, 95 % of the improvement."""
    ratio = {layout: report.tokens_ratio(results, "gsm8k_blog", 32, layout)["ratio"] for layout in LAYOUTS}
    assert ratio["ours"] <= 1.03 < ratio["greedy"] < ratio["stock"] < ratio["config_max"]
    for name in report.HEADLINE:
        ours = report.summarize(results[name])["ours"]
        assert max(ours["update_ratio"]) <= 1.05
        assert min(ours["time_share"], ours["token_share"]) >= 0.95
    for profile in PROFILES:  # nowhere more than any other layout that does not need as many micro-batches as rows
        ratios = [report.tokens_ratio(results, profile, 32, layout)["ratio"] for layout in LAYOUTS]
        assert ratios[list(LAYOUTS).index("ours")] <= min(ratios[:-1])
