"""Architectures of transformers beside the usual ones: latent attention, scans, spectra, series."""

from __future__ import annotations

from typing import Any

from families import data, encoders, images
from families.decoders import EAGER, NO_DROPOUT, TINY, make
from families.family import Family, register

KIND = "newer"
# What each kind of model is made of; names that a configuration does not have are ignored by it.
DECODER = {**TINY, **NO_DROPOUT}
ENCODER = encoders.TINY
VISION = images.TINY
LATENT = {
    **EAGER,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SCANS = {"num_heads": 6, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 4}


def forecasts() -> Any:
    return data.fields(past_values=data.normal(16, 2), future_values=data.normal(4, 2))()


T5 = {
    "d_model": 24,
    "d_kv": 4,
    "d_ff": 36,
    "num_layers": 3,
    "num_heads": 6,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "deepseek-v3": ("DeepseekV3ForCausalLM", {**DECODER, **LATENT}, data.causal),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {
            **DECODER,
            **EAGER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        data.causal,
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        {
            **DECODER,
            **EAGER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
        data.causal,
    ),
    "mamba2": ("Mamba2ForCausalLM", {**DECODER, **SCANS}, data.causal),
    "rwkv": ("RwkvForCausalLM", {**DECODER, "context_length": 16, "attention_hidden_size": 24}, data.causal),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", DECODER, data.causal),
    "olmo3": ("Olmo3ForCausalLM", {**DECODER, "sliding_window": 4}, data.causal),
    "glm4": ("Glm4ForCausalLM", DECODER, data.causal),
    "nemotron": ("NemotronForCausalLM", DECODER, data.causal),
    "persimmon": ("PersimmonForCausalLM", DECODER, data.causal),
    "granite-moe": (
        "GraniteMoeForCausalLM",
        {**DECODER, **EAGER, "num_local_experts": 4, "num_experts_per_tok": 2},
        data.causal,
    ),
    "esm": ("EsmForMaskedLM", {**ENCODER, "mask_token_id": data.MASK, "token_dropout": True}, data.masked),
    "fnet": ("FNetForMaskedLM", ENCODER, data.masked),
    "mobilebert": (
        "MobileBertForSequenceClassification",
        {**ENCODER, "embedding_size": 8, "intra_bottleneck_size": 12, "num_attention_heads": 4},
        data.classified,
    ),
    "longt5": ("LongT5ForConditionalGeneration", {**T5, **ENCODER, "local_radius": 2}, data.pairs_of_texts),
    "umt5": ("UMT5ForConditionalGeneration", {**ENCODER, **T5}, data.pairs_of_texts),
    "timesformer": (
        "TimesformerForVideoClassification",
        {**VISION, "num_frames": 2, "drop_path_rate": 0},
        data.fields(pixel_values=data.normal(2, 3, 8, 8), labels=data.whole(0, images.CLASSES)),
    ),
    "vit, masked pictures": (
        "ViTMAEForPreTraining",
        {
            **VISION,
            "decoder_hidden_size": 24,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": 6,
            "decoder_intermediate_size": 36,
        },
        data.fields(pixel_values=data.normal(3, 8, 8)),
    ),
    "patchtst": (
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 24,
            "num_attention_heads": 6,
            "ffn_dim": 36,
            "num_hidden_layers": 3,
            "attention_dropout": 0.0,
            "ff_dropout": 0.0,
            "head_dropout": 0.0,
        },
        forecasts,
    ),
    "patchtsmixer": (
        "PatchTSMixerForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "patch_length": 4,
            "patch_stride": 4,
            "prediction_length": 4,
            "d_model": 16,
            "num_layers": 3,
            "dropout": 0.0,
            "head_dropout": 0.0,
        },
        forecasts,
    ),
}
register(
    *(
        Family(
            name,
            KIND,
            make(architecture, options),
            batches,
            random=name == "vit, masked pictures",
            single_precision=True,
        )
        for name, (architecture, options, batches) in MODELS.items()
    )
)
