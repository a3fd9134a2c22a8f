import dataclasses
import json

import pytest

from trl_padmin import PaddingStats


STATS = PaddingStats(
    rows=32,
    micro_batches=10,
    real_tokens=1000,
    forwarded_tokens=1250,
    stock_tokens=4000,
    critical_tokens=1500,
    oversized_rows=1,
)


def test_counts_add_up_and_fractions_follow():
    total = STATS + STATS
    assert dataclasses.astuple(total) == tuple(2 * count for count in dataclasses.astuple(STATS))
    assert (total.pad_frac, total.pad_frac_stock, total.saved_frac) == (0.2, 0.75, 0.6875)
    assert total.rank_imbalance == 1.2
    assert sum([STATS, STATS], PaddingStats()) == total


def test_nothing_counted_is_not_an_error():
    assert PaddingStats().as_metrics()["padding/pad_frac"] == 0.0
    assert PaddingStats().rank_imbalance == 1.0


def test_metrics_have_the_documented_names_and_are_json_numbers():
    metrics = STATS.as_metrics()
    assert set(metrics) == {
        f"padding/{name}"
        for name in (
            "pad_frac",
            "pad_frac_stock",
            "forwarded_tokens",
            "saved_frac",
            "micro_batches",
            "rank_imbalance",
            "oversized_rows",
        )
    }
    assert json.loads(json.dumps(metrics)) == metrics


def test_text_and_table():
    assert str(STATS) == (
        "padding: 75.0 % -> 20.0 % of forwarded tokens (stock TRL -> now); 32 rows in 10 micro-batches"
    )
    html = STATS._repr_html_()
    assert "1,250" in html and "75.0 %" in html and html.startswith("<table>")


def test_only_stats_can_be_added():
    with pytest.raises(TypeError):
        STATS + 1
