"""More decoders: hybrids of scans and attention, experts of several sorts, convolutions, shared blocks."""

from __future__ import annotations

from typing import Any

from families import data, newer
from families.decoders import EAGER, make
from families.family import Family, register

EXPERTS = {
    **EAGER,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_intermediate_size": 16,
}
SCANS = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
    "mamba_d_ssm": 48,
    "mamba_dt_rank": 3,
    "n_mamba_heads": 2,
    "ssm_state_size": 8,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 4,
    "use_mamba_kernels": False,
}
SLIDING = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie-4.5 moe": (
        "Ernie4_5_MoeForCausalLM",
        {**EXPERTS, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            **EXPERTS,
            **SCANS,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "bamba": ("BambaForCausalLM", {**SCANS, "attn_layer_indices": [1]}),
    "zamba": (
        "ZambaForCausalLM",
        {
            **SCANS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_hidden_layers": 4,
            "attention_head_dim": 8,
            "attention_hidden_size": 48,
            "layer_types": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        {
            **SCANS,
            "mamba_ngroups": 2,
            "n_mamba_heads": 6,
            "mamba_headdim": 8,
            "num_hidden_layers": 4,
            "hybrid_layer_ids": [1, 3],
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_mem_blocks": 1,
            "attention_head_dim": 8,
            "attention_hidden_size": 48,
            "adapter_rank": 4,
        },
    ),
    "falcon-h1": ("FalconH1ForCausalLM", SCANS),
    "falcon-mamba": (
        "FalconMambaForCausalLM",
        {"state_size": 4, "expand": 2, "conv_kernel": 3, "time_step_rank": 3},
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        {**SCANS, "hybrid_override_pattern": "M*-", "layers_block_type": ["mamba", "attention", "mlp"]},
    ),
    "granite-moe hybrid": (
        "GraniteMoeHybridForCausalLM",
        {**EXPERTS, **SCANS, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 36},
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        {
            **EXPERTS,
            "block_size": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "cohere2": ("Cohere2ForCausalLM", SLIDING),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {**newer.LATENT, "topk_method": "greedy"}),
    "doge": ("DogeForCausalLM", {"keep_window_size": 4}),
    "doge, experts": (
        "DogeForCausalLM",
        {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "keep_window_size": 4},
    ),
    "exaone4": ("Exaone4ForCausalLM", SLIDING),
    "apertus": ("ApertusForCausalLM", {}),
    "phimoe": ("PhimoeForCausalLM", {**EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "jetmoe": ("JetMoeForCausalLM", {**EXPERTS, "kv_channels": 4, "num_key_value_heads": 3}),
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 24,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 16,
            "ffn_config": {"ffn_hidden_size": 36, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        },
    ),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    "longcat": (
        "LongcatFlashForCausalLM",
        {
            **newer.LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 36,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "zero_expert_num": 1,
        },
    ),
    "olmo-hybrid": (
        "OlmoHybridForCausalLM",
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {
            "vocab_size_per_layer_input": 48,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 4,
            "activation_sparsity_pattern": [0.0, 0.0, 0.0],
            "altup_num_inputs": 2,
        },
    ),
    "ctrl": ("CTRLLMHeadModel", {"n_embd": 24, "n_layer": 3, "n_head": 6, "dff": 36, "n_positions": 16}),
}
register(
    *(
        Family(
            name,
            "hybrid",
            make(architecture, {**newer.DECODER, **options}),
            data.causal,
            single_precision=True,
        )
        for name, (architecture, options) in MODELS.items()
    )
)
