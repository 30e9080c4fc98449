"""The fields of real config.json files that decide what a cache keeps, by built-in geometry.

Why: a config is understood when it comes to what is known of its model from elsewhere. Spellings
are those of the published files: some old, some new.
"""

from __future__ import annotations

from typing import Any, Final

Config = dict[str, Any]


def _llama(layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> Config:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "torch_dtype": "bfloat16",
        **more,
    }


def _latent(layers: int, **more: Any) -> Config:
    heads = _llama(layers, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, v_head_dim=128)
    return heads | {"model_type": "deepseek_v3", **more}


def _every(number: int, layers: int, last: str, others: str) -> list[str]:
    return [last if (place + 1) % number == 0 else others for place in range(layers)]


_GATED_DELTA: Final = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GPT_OSS: Final = {"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}
_QWEN2: Final = {
    "model_type": "qwen2",
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
_QWEN3: Final = {"model_type": "qwen3", "head_dim": 128, "sliding_window": None}
_MAMBA2: Final = {
    "mamba_head_dim": 64,
    "conv_kernel": 4,
    "n_groups": 8,
    "model_type": "nemotron_h",
}

CONFIGS: Final[dict[str, Config]] = {
    "SmolLM2-135M": _llama(30, 9, 3, 576),
    "Llama-3.2-1B": _llama(16, 32, 8, 2048, head_dim=64),
    "Llama-3.1-8B": _llama(32, 32, 8, 4096),
    "Llama-3.1-70B": _llama(80, 64, 8, 8192),
    "Llama-3.1-405B": _llama(126, 128, 8, 16384),
    "Qwen2.5-7B": _llama(28, 28, 4, 3584, **_QWEN2),
    "Qwen3-8B": _llama(36, 32, 8, 4096, **_QWEN3),
    "Qwen3-32B": _llama(64, 64, 8, 5120, **_QWEN3, use_sliding_window=False),
    "Qwen3-30B-A3B": _llama(48, 32, 4, 2048, head_dim=128, model_type="qwen3_moe"),
    "Mistral-7B-v0.1": _llama(32, 32, 8, 4096, model_type="mistral", sliding_window=4096),
    "Phi-3.5-mini": _llama(32, 32, 32, 3072, model_type="phi3", sliding_window=262144),
    "Phi-4-mini": _llama(32, 24, 8, 3072, model_type="phi3", sliding_window=262144),
    "Gemma-2-9B": _llama(42, 16, 8, 3584, model_type="gemma2", head_dim=256, sliding_window=4096),
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "hidden_size": 5376,
            "sliding_window": 1024,
        },
        "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16},
    },
    "Gemma-3-1B": _llama(
        26, 4, 1, 1152, head_dim=256, model_type="gemma3_text", sliding_window=512,
        sliding_window_pattern=6,
    ),
    "Gemma-4-26B-A4B": {
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "text_config": _llama(
            30, 16, 8, 2816, head_dim=256, global_head_dim=512, num_global_key_value_heads=2,
            attention_k_eq_v=True, sliding_window=1024, layer_types=_every(6, 30, _FULL, _SLIDING),
        ),
    },
    "gpt-oss-20b": _llama(
        24, 64, 8, 2880, **_GPT_OSS, layer_types=_every(2, 24, _FULL, _SLIDING)
    ),
    "gpt-oss-120b": _llama(36, 64, 8, 2880, **_GPT_OSS),
    "MiMo-V2-Flash": _llama(
        48, 64, 4, 4096, head_dim=192, v_head_dim=128, sliding_window=128,
        swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128,
        hybrid_layer_pattern=[0, *[int((place + 1) % 6 != 0) for place in range(1, 48)]],
    ),
    "DeepSeek-V2-Lite": _latent(27, model_type="deepseek_v2"),
    "DeepSeek-V2-236B": _latent(60, model_type="deepseek_v2", head_dim=64),
    "DeepSeek-V3": _latent(61, torch_dtype="torch.bfloat16"),
    "DeepSeek-V3.2": _latent(61, index_head_dim=128, layer_types=["indexed_attention"] * 61),
    "Kimi-K2": _latent(61, model_type="kimi_k2"),
    "Mamba2-7B": {
        "model_type": "mamba2",
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "hidden_size": 4096,
        "state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "expand": 2,
    },
    "Jamba-1.5-Mini": _llama(
        32, 32, 8, 4096, model_type="jamba", attn_layer_period=8, attn_layer_offset=4,
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, sliding_window=None,
    ),
    "Nemotron-H-56B": _llama(
        118, 64, 8, 8192, **_MAMBA2, attention_head_dim=128, mamba_num_heads=256,
        ssm_state_size=256, hybrid_override_pattern="M-" * 54 + "*" * 10,
    ),
    "Nemotron-3-Nano-30B-A3B": _llama(
        52, 32, 2, 2688, **_MAMBA2, head_dim=128, mamba_num_heads=64, ssm_state_size=128,
        layers_block_type=["mamba", "moe"] * 23 + ["attention"] * 6,
    ),
    "Qwen3-Next-80B-A3B": _llama(
        48, 16, 2, 2048, **_GATED_DELTA, model_type="qwen3_next", linear_num_value_heads=32,
        full_attention_interval=4,
    ),
    "Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "text_config": _llama(
            64, 24, 4, 5120, **_GATED_DELTA, linear_num_value_heads=48,
            layer_types=_every(4, 64, _FULL, "linear_attention"),
        ),
    },
}  # fmt: skip
