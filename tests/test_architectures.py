"""A fast part of `architectures.py`: one architecture or two of every family, and what would break them.

What this does not exercise: the other architectures (`python tests/architectures.py` does), fused GPU kernels.
"""

import math
import re
from pathlib import Path

import architectures
import pytest
import trl.trainer.utils as trl_utils
from architectures import EXCLUDED, LIMITS, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, VARIANTS, measure

from trl_padmin import probe
from trl_padmin.layout import TokensFirst


FAMILIES = {
    "dense": ["llama", "qwen3", "gemma3_text"],
    "absolute positions": ["gpt2", "opt"],
    "mixture of experts": ["mixtral", "qwen3_moe", "deepseek_v3"],
    "Mamba": ["mamba, biases", "mamba2, biases"],
    "attention and Mamba": [
        "jamba, biases",
        "bamba, biases",
        "granitemoehybrid, biases",
        "nemotron_h, biases",
        "falcon_h1, biases",
        "zamba2, biases",
    ],
    "short convolutions": ["lfm2, biases"],
    "linear attention": ["qwen3_next", "kimi_linear"],
    "recurrent": ["rwkv", "xlstm", "recurrent_gemma"],
}
PRESENT = [
    name for names in FAMILIES.values() for name in names if name.split(",")[0] in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]
WRONG_IN_STOCK = {"gpt2", *FAMILIES["Mamba"], *FAMILIES["attention and Mamba"], *FAMILIES["recurrent"]}


def outcome_of(name):
    model_type, overrides = VARIANTS.get(name, (name, {}))
    outcome = measure(name, model_type, overrides)
    assert outcome.probe, outcome.failure
    return outcome


@pytest.mark.parametrize("name", PRESENT)
def test_each_row_is_scored_as_if_it_were_alone(name):
    outcome = outcome_of(name)
    error, limit = outcome.probe.tokens_first, LIMITS[outcome.probe.dtype]
    assert error.log_prob <= limit and error.gradient <= limit
    if name in WRONG_IN_STOCK:  # so the rows can tell
        assert outcome.probe.left_padded.log_prob > 1e-2


@pytest.mark.skipif(not hasattr(trl_utils, "add_fused_lm_head"), reason="this TRL has no fused head")
@pytest.mark.parametrize("name", PRESENT)
def test_the_same_through_the_head_that_trl_trains_with(monkeypatch, float64_head, name):
    """TRL scores from hidden states and labels, never from logits."""

    def scores(model, ids, mask, logits_to_keep):
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, :-logits_to_keep] = -100
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return outputs.log_probs[:, -logits_to_keep:]

    def with_head(*args):
        model = tiny_model(*args)
        trl_utils.add_fused_lm_head(model, temperature=1.0)
        return model

    tiny_model = architectures.tiny_model
    monkeypatch.setattr(architectures, "tiny_model", with_head)
    monkeypatch.setattr(probe, "_scores", scores)
    outcome = outcome_of(name)
    assert outcome.is_right(outcome.probe.tokens_first)


def test_families_are_many():
    assert len(PRESENT) >= 20 or len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) < 150  # an older transformers has fewer


@pytest.mark.parametrize("name", ["llama", "jamba, biases", "gpt2", "mixtral"])
def test_control_a_lost_mask_is_seen(monkeypatch, name):
    """Padding that counts as real is invisible to what comes before it, so the pads go to the front."""
    apply = TokensFirst.apply
    monkeypatch.setattr(TokensFirst, "apply", lambda self, values: apply(self, values).roll(1, dims=1))
    assert outcome_of(name).probe.tokens_first.log_prob > 1e-2


@pytest.mark.parametrize("name", ["llama", "mamba, biases"])
def test_control_swapped_rows_are_seen_in_gradients(monkeypatch, name):
    monkeypatch.setattr(probe, "_tokens_first", lambda *args: 1.0001 * probe._alone(*args))
    error = outcome_of(name).probe.tokens_first
    assert 5e-5 < error.gradient < 2e-4


def test_the_committed_table_covers_what_is_installed():
    """Every causal architecture is measured or left out with a reason, none failed, and ours is right in all."""
    page = (Path(architectures.__file__).parent / "architectures.md").read_text(encoding="utf-8")
    verdicts = dict(re.findall(r"^\| ([^|]+) \| \S+ \| \S+ \| (\S+) \|", page, flags=re.MULTILINE))
    verdicts.pop("architecture", None)
    assert set(verdicts.values()) == {"right"}
    assert "Failed:" not in page
    assert sum(name not in VARIANTS for name in verdicts) >= 120
    version = re.search(r"transformers (\S+) ", page)[1]
    if version == architectures.transformers.__version__:
        assert verdicts.keys() == (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - EXCLUDED.keys()) | VARIANTS.keys()


def test_the_table_tells_right_from_wrong_from_nan():
    error = probe.LayoutError
    verdicts = [
        architectures.right(1e-6, error(*pair)) for pair in ((0, 1e-7), (0, 1e-5), (math.nan, 0), (0, math.nan))
    ]
    assert verdicts == ["right", "**wrong**", "NaN", "NaN"]
