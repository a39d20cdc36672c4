"""Still more architectures of transformers: boxes on pages, pixels as tokens, pyramids, mobile networks."""

from __future__ import annotations

from typing import Any

import torch

from families import data, encoders, hybrids, images, newer, seq2seq, speech
from families.decoders import EAGER, make
from families.family import Family, register

KIND = "further architectures"
DECODER = {**newer.DECODER, **EAGER}
ENCODER = {**encoders.TINY, "bos_token_id": 2, "eos_token_id": 3}
BART, VISION, SPEECH = seq2seq.BART, images.TINY, speech.TINY
EXPERTS = {**DECODER, **hybrids.EXPERTS, **newer.LATENT}
CLASSES = images.CLASSES
NO_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "hidden_dropout": 0.0}


def pages(**more: Any) -> Any:
    """Tokens with boxes on a page, and a class for each token."""
    return data.fields(
        input_ids=data.whole(4, 48, 9),
        bbox=lambda n, g: torch.randint(0, 10, (9, 4), generator=g).sort(-1).values,
        attention_mask=data.ones(9),
        labels=data.whole(0, 3, 9),
        **more,
    )


def texts(**more: Any) -> Any:
    """Tokens and a class for each sample."""
    return data.fields(
        input_ids=data.whole(4, 48, 9), attention_mask=data.ones(9), labels=data.whole(0, 3), **more
    )


LANGUAGE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "openai-gpt": ("OpenAIGPTLMHeadModel", DECODER, data.causal),
    "codegen": (
        "CodeGenForCausalLM",
        {**DECODER, "hidden_size": 32, "num_attention_heads": 4, "rotary_dim": 4, "n_ctx": 16},
        data.causal,
    ),
    "imagegpt": ("ImageGPTForCausalImageModeling", {**DECODER, "vocab_size": 49}, data.causal),
    "gpt-neox-japanese": ("GPTNeoXJapaneseForCausalLM", DECODER, data.causal),
    "helium": ("HeliumForCausalLM", DECODER, data.causal),
    "olmo": ("OlmoForCausalLM", {**DECODER, "clip_qkv": 0.5}, data.causal),
    "arcee": ("ArceeForCausalLM", DECODER, data.causal),
    "seed-oss": ("SeedOssForCausalLM", {**DECODER, "residual_dropout": 0.0}, data.causal),
    "ministral": ("MinistralForCausalLM", {**DECODER, "sliding_window": 4}, data.causal),
    "vaultgemma": (
        "VaultGemmaForCausalLM",
        {**DECODER, "query_pre_attn_scalar": 4, "sliding_window": 4},
        data.causal,
    ),
    "nanochat": ("NanoChatForCausalLM", DECODER, data.causal),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", DECODER, data.causal),
    "dots1": ("Dots1ForCausalLM", EXPERTS, data.causal),
    "glm4-moe": ("Glm4MoeForCausalLM", EXPERTS, data.causal),
    "afmoe": ("AfmoeForCausalLM", {**EXPERTS, "num_dense_layers": 1}, data.causal),
    "flex-olmo": ("FlexOlmoForCausalLM", EXPERTS, data.causal),
    "minicpm3": ("MiniCPM3ForCausalLM", EXPERTS, data.causal),
    "modernbert, decoder": (
        "ModernBertDecoderForCausalLM",
        {**DECODER, "cls_token_id": 2, "sep_token_id": 3},
        data.causal,
    ),
    "bert-generation": ("BertGenerationDecoder", {**ENCODER, "is_decoder": True}, data.causal),
    "rembert": (
        "RemBertForMaskedLM",
        {**ENCODER, "input_embedding_size": 8, "output_embedding_size": 16},
        data.masked,
    ),
    "megatron-bert": ("MegatronBertForMaskedLM", ENCODER, data.masked),
    "roberta, norm first": ("RobertaPreLayerNormForMaskedLM", ENCODER, data.masked),
    "camembert, answers": (
        "CamembertForQuestionAnswering",
        {**ENCODER, "num_labels": 2},
        data.fields(
            input_ids=data.whole(4, 48, 9),
            attention_mask=data.ones(9),
            start_positions=data.whole(0, 9),
            end_positions=data.whole(0, 9),
        ),
    ),
    "deberta": (
        "DebertaForMaskedLM",
        {
            **ENCODER,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_biased_input": False,
        },
        data.masked,
    ),
    "yoso": ("YosoForMaskedLM", {**ENCODER, "use_expectation": True}, data.masked),
    "data2vec, text": ("Data2VecTextForMaskedLM", ENCODER, data.masked),
    "flaubert": (
        "FlaubertWithLMHeadModel",
        {
            **ENCODER,
            "emb_dim": 24,
            "n_layers": 3,
            "n_heads": 6,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "n_words": 48,
            "layerdrop": 0.0,
        },
        data.masked,
    ),
    "eurobert": ("EuroBertForMaskedLM", {**DECODER, "num_labels": 3}, data.masked),
    "layoutlm": ("LayoutLMForTokenClassification", {**ENCODER, "max_2d_position_embeddings": 32}, pages()),
    "lilt": (
        "LiltForTokenClassification",
        {**ENCODER, "max_2d_position_embeddings": 32, "channel_shrink_ratio": 2},
        pages(),
    ),
    "markuplm": (
        "MarkupLMForSequenceClassification",
        {
            **ENCODER,
            "max_xpath_tag_unit_embeddings": 8,
            "max_xpath_subs_unit_embeddings": 8,
            "tag_pad_id": 7,
            "subs_pad_id": 7,
            "xpath_unit_hidden_size": 4,
            "max_depth": 3,
        },
        texts(),
    ),
    "plbart": ("PLBartForConditionalGeneration", BART, data.pairs_of_texts),
    "bigbird-pegasus": (
        "BigBirdPegasusForConditionalGeneration",
        {**BART, "attention_type": "original_full"},
        data.pairs_of_texts,
    ),
    "bart, classes": (
        "BartForSequenceClassification",
        {**BART, "num_labels": 3},
        data.fields(
            input_ids=lambda n, g: torch.cat([torch.randint(4, 48, (8,), generator=g), torch.tensor([3])]),
            attention_mask=data.ones(9),
            labels=data.whole(0, 3),
        ),
    ),
    "t5, classes": (
        "T5ForSequenceClassification",
        {
            **newer.T5,
            "vocab_size": 48,
            "num_labels": 3,
            "eos_token_id": 3,
            "pad_token_id": 0,
            "initializer_factor": 1.0,
        },
        data.fields(
            input_ids=lambda n, g: torch.cat([torch.randint(4, 48, (8,), generator=g), torch.tensor([3])]),
            attention_mask=data.ones(9),
            labels=data.whole(0, 3),
        ),
    ),
}
pictures, several = images.pictures, images.several
PYRAMID = {
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_encoder_blocks": 2,
    "patch_sizes": [3, 2],
    "strides": [2, 2],
    "sequence_reduction_ratios": [2, 1],
    "sr_ratios": [2, 1],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "image_size": 8,
    "num_channels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "num_labels": CLASSES,
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
}
SEEN: dict[str, tuple[str, dict[str, Any], Any]] = {
    "vit-msn": ("ViTMSNForImageClassification", VISION, pictures),
    "ijepa": ("IJepaForImageClassification", VISION, pictures),
    "dinov2, registers": ("Dinov2WithRegistersForImageClassification", {**VISION, "mlp_ratio": 2}, pictures),
    "data2vec, vision": (
        "Data2VecVisionForImageClassification",
        {**VISION, "use_relative_position_bias": True},
        pictures,
    ),
    "vit, pixels masked": (
        "ViTForMaskedImageModeling",
        {**VISION, "encoder_stride": 4},
        data.fields(
            pixel_values=data.normal(3, 8, 8), bool_masked_pos=lambda n, g: torch.arange(4) % 3 == n % 3
        ),
    ),
    "pvt-v2": ("PvtV2ForImageClassification", {**PYRAMID, "image_size": 8}, pictures),
    "focalnet": (
        "FocalNetForImageClassification",
        {
            **VISION,
            "embed_dim": 8,
            "depths": [1, 1],
            "focal_levels": [1, 1],
            "focal_windows": [3, 3],
            "patch_size": 2,
            "hidden_sizes": [8, 16],
        },
        pictures,
    ),
    "swiftformer": (
        "SwiftFormerForImageClassification",
        {
            "depths": [1, 1],
            "embed_dims": [8, 16],
            "mlp_ratio": 2,
            "downsamples": [True, True],
            "drop_path_rate": 0.0,
            "num_labels": CLASSES,
        },
        lambda: images.pictures(16, 14),
    ),
    "mobilenet-v2": (
        "MobileNetV2ForImageClassification",
        {"depth_multiplier": 0.25, "image_size": 32, "num_labels": CLASSES, "classifier_dropout_prob": 0.0},
        lambda: images.pictures(32, 14),
    ),
    "mobilevit": (
        "MobileViTForImageClassification",
        {
            "hidden_sizes": [12, 16, 16],
            "neck_hidden_sizes": [4, 8, 8, 12, 16, 16, 16],
            "num_attention_heads": 2,
            "mlp_ratio": 2.0,
            "image_size": 32,
            "patch_size": 2,
            "num_labels": CLASSES,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout_prob": 0.0,
        },
        lambda: images.pictures(32, 14),
    ),
    "regnet": (
        "RegNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 2],
            "groups_width": 4,
            "num_labels": CLASSES,
        },
        several,
    ),
    "big transfer": (
        "BitForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [32, 64],
            "depths": [1, 1],
            "num_groups": 4,
            "num_labels": CLASSES,
        },
        lambda: images.pictures(16, 14),
    ),
    "levit": (
        "LevitForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "mlp_ratio": [2, 2, 2],
            "attention_ratio": [2, 2, 2],
            "num_labels": CLASSES,
            "drop_path_rate": 0,
        },
        lambda: images.pictures(32, 14),
    ),
    "cvt": (
        "CvtForImageClassification",
        {
            "patch_sizes": [3, 3],
            "patch_stride": [2, 2],
            "patch_padding": [1, 1],
            "embed_dim": [8, 16],
            "num_heads": [2, 4],
            "depth": [1, 2],
            "mlp_ratio": [2.0, 2.0],
            "drop_rate": [0.0, 0.0],
            "attention_drop_rate": [0.0, 0.0],
            "drop_path_rate": [0.0, 0.0],
            "qkv_bias": [True, True],
            "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn", "dw_bn"],
            "kernel_qkv": [3, 3],
            "padding_kv": [1, 1],
            "stride_kv": [2, 2],
            "padding_q": [1, 1],
            "stride_q": [1, 1],
            "num_labels": CLASSES,
        },
        lambda: images.pictures(8, 14),
    ),
    "vivit": (
        "VivitForVideoClassification",
        {**VISION, "num_frames": 2, "tubelet_size": [1, 4, 4]},
        data.fields(pixel_values=data.normal(2, 3, 8, 8), labels=data.whole(0, CLASSES)),
    ),
    "wav2vec2-conformer": (
        "Wav2Vec2ConformerForCTC",
        {
            **SPEECH,
            "conv_depthwise_kernel_size": 3,
            "position_embeddings_type": "rotary",
            "conformer_conv_dropout": 0.0,
        },
        speech.spoken,
    ),
    "unispeech": ("UniSpeechForCTC", {**SPEECH, "num_ctc_classes": 9}, speech.spoken),
    "data2vec, sounds": ("Data2VecAudioForCTC", {**SPEECH, "num_conv_pos_embeddings": 2}, speech.spoken),
    "wav2vec2-bert": (
        "Wav2Vec2BertForSequenceClassification",
        {
            **SPEECH,
            "feature_projection_input_dim": 8,
            "conv_depthwise_kernel_size": 3,
            "classifier_proj_size": 8,
            "conformer_conv_dropout": 0.0,
        },
        data.fields(input_features=data.normal(12, 8), labels=data.whole(0, 3)),
    ),
}
COUPLED = ("mobilenet-v2", "mobilevit", "regnet", "levit", "cvt", "swiftformer")
register(
    *(
        Family(
            name,
            KIND,
            make(architecture, options),
            batches,
            single_precision=True,
            couples=name in COUPLED,
        )
        for name, (architecture, options, batches) in {**LANGUAGE, **SEEN}.items()
    )
)
