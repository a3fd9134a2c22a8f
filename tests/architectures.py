"""Scores every causal architecture of the installed transformers in our layout, in stock TRL's, and each row alone.

    python tests/architectures.py --output tests/architectures.md [--only gpt2 jamba]

Each architecture is built tiny from its config with random weights, in float64 where the model runs in it. Four rows
of 11 to 22 tokens are scored by [`trl_padmin.probe.probe_architecture`]: log-probabilities, and gradients of all
weights. The table has the largest difference from each row alone. What is left out is named with the reason.
"""

import argparse
import math
import re
import signal
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_padmin.probe import ArchitectureProbe, LayoutError, probe_architecture


# Largest differences that count as right: log-probabilities in nats, gradients relative to the largest.
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}

# Small values of config fields, by the name of the field.
SMALL = {
    r"(decoder_)?vocab_size|unpadded_vocab_size|vocab_size_per_layer_input|output_vocab_size": 64,
    r"(attention_)?hidden_size|d_model|n_embd|embed_dim|embedding_dim|emb_dim|embedding_size|dim|lru_width": 32,
    r"(input|output)_embedding_size|word_embed_proj_dim|mamba_d_ssm": 32,
    r"(num_|n_)?(hidden_|decoder_|encoder_)?layers?|num_(decoder|encoder)_layers|num_blocks|num_layers_per_stack": 2,
    r"(num_|n_)?(decoder_|encoder_)?(attention_)?heads?|num_(decoder|encoder)_attention_heads": 4,
    r"swa_num_attention_heads": 4,
    r"(swa_)?num_(key_value|kv)_heads|num_query_groups": 2,
    r"(attention_|swa_)?head_dim|d_head|dim_head|kv_channels|attention_head_size": 8,
    r"qk_(nope|rope)_head_dim|v_head_dim|query_pre_attn_scalar|rotary_dim": 8,
    r"qk_head_dim": 16,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|feed_forward_size)|n_inner|d_ff|dff|dim_ff|d_inner": 48,
    r"moe_shared_expert_intermediate_size|.*experts?_intermediate_size|intermediate_size_mlp": 48,
    r"max_position_embeddings|n_positions|n_ctx|context_length|max_seq_len|model_max_length|max_target_positions": 128,
    r"max_source_positions|rel_extent": 128,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts": 4,
    r"num_experts_per_(tok|token)|moe_(topk|k)|top_k_experts": 2,
    r"(n|num)_expert_groups?|n_group|topk_group": 1,
    r"(q|kv|o)_lora_rank|laurel_rank|adapter_rank|gated_norm_rank|loop_gate_rank|hc_lowrank": 8,
    r"(mamba_)?(d_state|state_size)|ssm_state_size|mamba_d_head|mamba_head_?dim|linear_(key_|value_)?head_dim": 8,
    r"(mamba_)?(dt_rank|time_step_rank)": 4,
    r"(mamba_)?(n_heads|num_heads)|n_mamba_heads": 8,
    r"(mamba_)?(n_groups|ngroups)": 2,
    r"(mamba_)?chunk_size": 8,
    r"linear_num_(key_|value_)?heads": 4,
    r"index_n_heads": 4,
    r"sliding_window(_size)?|attention_window_size|local_attention|window_size|attention_chunk_size": 8,
    r"log_scaling_n_floor|index_topk": 4,
    r"index_head_dim": 16,
    r"router_hidden_size|ple_embed_dim": 16,
}

# What the sizes above do not cover: layers in turn, parts that must fit together, what stays `None` by default.
_BOTH = ["linear_attention", "full_attention"]
OVERRIDES: dict[str, dict] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dory": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ...},
    "granitemoehybrid": {"layer_types": _BOTH},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "layers_block_type": ...},
    "kimi_linear": {"layer_types": _BOTH, "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": ...},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1]},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "roc_bert": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "num_mem_blocks": 2,
        "mamba_ngroups": 1,
        "hybrid_layer_ids": ...,
        "attention_hidden_size": ...,
        "attention_head_dim": ...,
        "mamba_headdim": ...,
        "kv_channels": ...,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# A second configuration of an architecture: name in the table, model type, overrides.
VARIANTS: dict[str, tuple[str, dict]] = {
    "bamba, biases": ("bamba", {"mamba_proj_bias": True}),
    "falcon_h1, biases": ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True}),
    "falcon_mamba, biases": ("falcon_mamba", {"use_bias": True}),
    "granitemoehybrid, biases": ("granitemoehybrid", {"mamba_proj_bias": True}),
    "jamba, biases": ("jamba", {"mamba_proj_bias": True}),
    "jamba, dense": ("jamba", {"num_experts": 1}),
    "lfm2, biases": ("lfm2", {"conv_bias": True}),
    "llama4_text, scaled attention": ("llama4_text", {"floor_scale": 4, "attn_scale": 1.0}),
    "mamba, biases": ("mamba", {"use_bias": True}),
    "mamba2, biases": ("mamba2", {"use_bias": True}),
    "nemotron_h, biases": ("nemotron_h", {"use_bias": True, "mamba_proj_bias": True}),
    "zamba, biases": ("zamba", {"mamba_proj_bias": True}),
    "zamba2, biases": ("zamba2", {"add_bias_linear": True}),
}

# Left out, and why.
_IMAGES = "too large for a tiny config because of its vision tower; its language model is in the table as `{}`"
EXCLUDED: dict[str, str] = {
    "blt": "not tiny: hashes groups of bytes into tables of fixed size, and cuts patches by a second model",
    "cpmant": "no padding leaves its scores alone: it attends to tokens behind, and to padding",
    "dots3_note": _IMAGES.format("dots3_note_text"),
    "fuyu": _IMAGES.format("persimmon"),
    "gemma3": _IMAGES.format("gemma3_text"),
    "gemma3n": _IMAGES.format("gemma3n_text"),
    "gemma4_assistant": "drafts tokens from the hidden states of another model",
    "gemma4_unified_assistant": "drafts tokens from the hidden states of another model",
    "got_ocr2": _IMAGES.format("qwen2"),
    "moshi": "reads two streams of audio codes next to the text",
    "moss_transcribe_diarize": "too large for a tiny config because of its audio tower; text alone is `qwen3`",
    "musicgen": "reads several streams of audio codes, no text",
    "musicgen_melody": "reads several streams of audio codes, no text",
    "prophetnet": "no padding leaves its scores alone: its n-gram streams do not mask it",
    "reformer": "no padding leaves its scores alone: it sorts all tokens of a row into buckets",
}


class _TooSlow(Exception):
    pass


@contextmanager
def time_limit(seconds: int):
    def stop(*_):
        raise _TooSlow(f"took more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _each_kind_of_layer(default: Mapping) -> dict:
    """Lists with one entry per layer, cut to the first layer of each kind, at least two in all."""
    count = default.get("num_hidden_layers")
    kinds = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
    lists = {name: default[name] for name in kinds if isinstance(default.get(name), list) and count}
    lists = {name: values for name, values in lists.items() if len(values) == count}
    if not lists:
        return {}
    layers = list(zip(*lists.values(), strict=True))
    first = sorted({layer: index for index, layer in reversed(list(enumerate(layers)))}.values())
    chosen = first if len(first) > 1 else [0, 1]
    return {"num_hidden_layers": len(chosen)} | {name: [v[i] for i in chosen] for name, v in lists.items()}


def small_fields(config_class: type) -> dict:
    """Arguments that make a config of this class tiny, without those that follow from others."""
    default = config_class().to_dict()
    fields = {}
    for name, value in default.items():
        if name.endswith("token_id") or isinstance(value, (bool, list, dict, str)):
            continue
        if isinstance(value, float) and re.search(r"drop|jitter", name):
            fields[name] = 0.0
        if isinstance(value, int):
            size = next((size for pattern, size in SMALL.items() if re.fullmatch(pattern, name)), None)
            if size is not None and value > 0:
                fields[name] = size
    if "kv_lora_rank" in default and "num_key_value_heads" in fields:  # multi-head latent attention shares no heads
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    fields |= _each_kind_of_layer(default)
    for name, part in getattr(config_class, "sub_configs", {}).items():
        part = CONFIG_MAPPING.get((default.get(name) or {}).get("model_type"), part)
        if isinstance(default.get(name), Mapping) and part in CONFIG_MAPPING.values():
            fields[name] = small_fields(part) | OVERRIDES.get(part.model_type, {}) | {"model_type": part.model_type}
            fields[name] = {key: value for key, value in fields[name].items() if value is not ...}
    special = {name for name in default if name.endswith("token_id") and default[name] is not None}
    fields |= {name: index % 8 for index, name in enumerate(sorted(special))}
    return fields | {"pad_token_id": 0, "eos_token_id": 1}


def tiny_config(model_type: str, overrides: Mapping = {}) -> transformers.PretrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    fields = small_fields(config_class) | OVERRIDES.get(model_type, {}) | dict(overrides)
    config = config_class(**{name: value for name, value in fields.items() if value is not ...})
    config.is_decoder = True
    config.is_encoder_decoder = False
    return config


def tiny_model(model_type: str, overrides: Mapping = {}, dtype: torch.dtype = torch.float64):
    """A model with random weights far from their small initial values, where a fault could hide."""
    config = tiny_config(model_type, overrides)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 3_000_000:
        raise ValueError(f"{size:,} parameters are not tiny: {config.to_diff_dict()}")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.5 if "conv" in name else 0.1) * torch.randn_like(parameter))
    model.set_experts_implementation("eager")
    return model.eval()


@dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    name: str
    probe: ArchitectureProbe | None
    failure: str = ""

    @property
    def has_nan(self) -> bool:
        layouts = self.probe.left_padded, self.probe.tokens_first
        return any(math.isnan(value) for error in layouts for value in (error.log_prob, error.gradient))

    def is_right(self, error: LayoutError) -> bool:
        return right(LIMITS[self.probe.dtype], error) == "right"


def measure(name: str, model_type: str, overrides: Mapping = {}, seconds: int = 120) -> Outcome:
    """Float64, or float32 where the model does not run in it; a failure of both is recorded."""
    failures = []
    for dtype in LIMITS:
        try:
            with time_limit(seconds):
                outcome = Outcome(name, probe_architecture(tiny_model(model_type, overrides, dtype), gradients=True))
            if dtype is not torch.float64 or not outcome.has_nan:
                return outcome
            # Eager attention takes a softmax in float32, which turns float64's mask of no key at all into NaN.
            failures.append("NaN in float64")
        except Exception as error:  # of any kind: the code of 200 models
            failures.append(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
            )
    return Outcome(name, None, failures[0])


def right(limit: float, error: LayoutError) -> str:
    """The verdict on a layout."""
    if math.isnan(error.log_prob) or math.isnan(error.gradient):
        return "NaN"
    return "right" if max(error.log_prob, error.gradient) <= limit else "**wrong**"


def table(outcomes: list[Outcome], seconds: float) -> str:
    """The committed page: counts, one line per architecture, what was left out, what failed."""
    measured = [outcome for outcome in outcomes if outcome.probe]
    failed = [outcome for outcome in outcomes if not outcome.probe]
    # Norms and rotary angles of many models are float32 inside a float64 model. Angles depend on where a row starts,
    # so left padding is off by rounding there; it counts as wrong above what float32 is allowed.
    verdicts = {
        outcome.name: (
            right(LIMITS[outcome.probe.dtype], outcome.probe.tokens_first),
            right(LIMITS[torch.float32], outcome.probe.left_padded),
        )
        for outcome in measured
    }
    ours_right = sum(ours == "right" for ours, _ in verdicts.values())
    stock_right = sum(stock == "right" for _, stock in verdicts.values())
    architectures = sum(outcome.name not in VARIANTS for outcome in measured)
    lines = [
        "# Causal architectures, against each row alone",
        "",
        f"Written by `python tests/architectures.py --output FILE` with transformers {transformers.__version__} and "
        f"torch {torch.__version__.split('+')[0]} on one CPU core, in {seconds:.0f} seconds.",
        "",
        f"{architectures} architectures and {len(measured) - architectures} variants, tiny and with random weights. "
        f"Tokens first, as trl_padmin lays rows out, is right for {ours_right} of {len(measured)}; left-padded, as "
        f"stock TRL does, for {stock_right}. A cell is the largest difference from scoring each row alone, over log-"
        "probabilities (nats) and over gradients (relative to the largest). Right is at most 1e-6 in float64 and 1e-4 "
        "in float32 for trl_padmin, and 1e-4 for stock TRL: rotary angles are float32 in most float64 models, and "
        "depend on where a row starts. float32 stands where a model does not run in float64.",
        "",
        "| architecture | trl_padmin: log-prob | gradient | | stock TRL: log-prob | gradient | | precision |",
        "|---|---:|---:|---|---:|---:|---|---|",
    ]
    for outcome in sorted(measured, key=lambda each: each.name):
        ours, stock = outcome.probe.tokens_first, outcome.probe.left_padded
        lines.append(
            f"| {outcome.name} | {ours.log_prob:.0e} | {ours.gradient:.0e} | {verdicts[outcome.name][0]} "
            f"| {stock.log_prob:.0e} | {stock.gradient:.0e} | {verdicts[outcome.name][1]} "
            f"| {str(outcome.probe.dtype).removeprefix('torch.')} |"
        )
    lines += ["", "Left out:", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in sorted(EXCLUDED.items())]
    if failed:
        lines += ["", "Failed:", ""] + [f"- `{outcome.name}`: {outcome.failure}" for outcome in failed]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="Markdown file to write; printed by default")
    parser.add_argument("--only", nargs="+", help="names of the table, for a part of it")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    cases = {name: (name, {}) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in EXCLUDED} | VARIANTS
    started, outcomes = time.perf_counter(), []
    for name, case in cases.items():
        if arguments.only is None or name in arguments.only:
            outcomes.append(measure(name, *case))
            print(".", end="", file=sys.stderr, flush=True)
    page = table(outcomes, time.perf_counter() - started)
    if arguments.output is None:
        print(page)
    else:
        arguments.output.write_text(page, encoding="utf-8")
    return 0 if all(each.probe and each.is_right(each.probe.tokens_first) for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
