"""Transformers with mechanisms of their own: hashes, latents, matched boxes, masks, pictures within texts."""

from __future__ import annotations

from typing import Any

import torch

from families import data, encoders, newer, seq2seq, several, speech
from families.decoders import EAGER, make
from families.family import Family, register
from families.pictures_in_texts import SEVERAL

ENCODER, VISION, DECODER = encoders.TINY, newer.VISION, newer.DECODER
ENCODERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "big-bird": (
        "BigBirdForMaskedLM",
        {
            "block_size": 2,
            "num_random_blocks": 1,
            "attention_type": "block_sparse",
            "max_position_embeddings": 40,
        },
        lambda: data.masked(32),
    ),
    "funnel": (
        "FunnelForMaskedLM",
        {
            "num_hidden_layers": ...,
            "d_model": 24,
            "n_head": 6,
            "d_head": 4,
            "d_inner": 36,
            "block_sizes": [2, 2],
            "num_decoder_layers": 1,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "activation_dropout": 0.0,
        },
        data.masked,
    ),
    "reformer": (
        "ReformerForMaskedLM",
        {
            "is_decoder": False,
            "attention_head_size": 4,
            "num_hidden_layers": ...,
            "attn_layers": ["local", "lsh", "local"],
            "axial_pos_embds": False,
            "local_attn_chunk_length": 4,
            "lsh_attn_chunk_length": 4,
            "num_hashes": 1,
            "num_buckets": 2,
            "feed_forward_size": 36,
            "hash_seed": 0,
            "lsh_attention_probs_dropout_prob": 0.0,
            "local_attention_probs_dropout_prob": 0.0,
        },
        lambda: data.masked(12),
    ),
    "nystromformer": (
        "NystromformerForMaskedLM",
        {"num_landmarks": 3, "segment_means_seq_len": 9, "conv_kernel_size": 3},
        data.masked,
    ),
    "xlm": (
        "XLMWithLMHeadModel",
        {"emb_dim": 24, "n_layers": 3, "n_heads": 6, "dropout": 0.0, "attention_dropout": 0.0, "n_words": 48},
        data.masked,
    ),
    "ibert": ("IBertForMaskedLM", {"quant_mode": True, "bos_token_id": 2, "eos_token_id": 3}, data.masked),
    "tapas": (
        "TapasForQuestionAnswering",
        {
            "type_vocab_sizes": [2, 8, 8, 2, 2, 2, 2],
            "max_position_embeddings": 20,
            "use_answer_as_supervision": False,
            "select_one_column": True,
            "max_num_rows": 4,
            "max_num_columns": 4,
        },
        data.fields(
            input_ids=data.whole(4, 48, 9),
            attention_mask=data.ones(9),
            token_type_ids=data.whole(0, 2, 9, 7),
            labels=data.whole(0, 2, 9),
        ),
    ),
    "luke, entities": (
        "LukeForEntityClassification",
        {"entity_vocab_size": 8, "entity_emb_size": 8, "bos_token_id": 2, "eos_token_id": 3},
        data.fields(
            input_ids=data.whole(4, 48, 9),
            entity_ids=data.whole(1, 8, 1),
            entity_attention_mask=data.ones(1),
            entity_position_ids=lambda n, g: torch.arange(4)[None],
            labels=data.whole(0, 3),
        ),
    ),
    "lxmert": (
        "LxmertForQuestionAnswering",
        {"num_qa_labels": 3, "visual_feat_dim": 8, "l_layers": 2, "x_layers": 2, "r_layers": 1},
        data.fields(
            input_ids=data.whole(4, 48, 9),
            visual_feats=data.normal(4, 8),
            visual_pos=lambda n, g: torch.rand(4, 4, generator=g),
            labels=data.whole(0, 3),
        ),
    ),
    "perceiver, text": (
        "PerceiverForMaskedLM",
        {
            "max_position_embeddings": 9,
            "num_latents": 4,
            "d_latents": 24,
            "d_model": 24,
            "num_blocks": 1,
            "num_self_attends_per_block": 3,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
            "qk_channels": 24,
            "v_channels": 24,
        },
        data.masked,
    ),
}
BART = {
    **seq2seq.BART,
    "attention_window": 4,
    "max_encoder_position_embeddings": 16,
    "max_decoder_position_embeddings": 16,
}
SEQ2SEQ: dict[str, tuple[str, dict[str, Any], Any]] = {
    "mvp": (
        "MvpForConditionalGeneration",
        {**BART, "use_prompt": True, "prompt_length": 3, "prompt_mid_dim": 8},
        data.pairs_of_texts,
    ),
    "nllb-moe": (
        "NllbMoeForConditionalGeneration",
        {
            **BART,
            **EAGER,
            "num_experts": 4,
            "expert_capacity": 64,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
            "moe_token_dropout": 0.0,
            "router_dtype": "float32",
            "second_expert_policy": "all",
        },
        data.pairs_of_texts,
    ),
    "pegasus-x": (
        "PegasusXForConditionalGeneration",
        {**BART, "block_size": 4, "num_global_tokens": 2, "stagger_local_blocks": True},
        data.pairs_of_texts,
    ),
    "informer": (
        "InformerForPrediction",
        {**several.FORECAST, "num_time_features": 1, "sampling_factor": 2, "distil": False},
        several.SERIES,
    ),
}
DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
        "out_features": ["stage2"],
    },
    "d_model": 24,
    "num_queries": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "num_labels": 3,
    "auxiliary_loss": True,
}


def boxes_with_classes(**more: Any) -> Any:
    """Pictures, and for each a dictionary of the classes and boxes that are in it, of several numbers."""
    generator = torch.Generator().manual_seed(7)

    def row(number: int, _: torch.Generator) -> Any:
        count = 1 + number % 3
        boxes = 0.2 + 0.3 * torch.rand(count, 4, generator=generator)
        labels = torch.randint(0, 3, (count,), generator=generator)
        return {
            "pixel_values": torch.randn(3, 16, 16, generator=generator),
            "labels": {"class_labels": labels, "boxes": boxes},
        }

    def collate(samples: list[Any]) -> Any:
        return {
            "pixel_values": torch.stack([sample["pixel_values"] for sample in samples]),
            "labels": [sample["labels"] for sample in samples],
        }

    return data.loader(row, collate=collate)


IMAGES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "conditional-detr": ("ConditionalDetrForObjectDetection", DETR, boxes_with_classes),
    "hiera, masked": (
        "HieraForPreTraining",
        {
            "image_size": [32, 32],
            "embed_dim": 8,
            "depths": [1, 1, 1],
            "num_heads": [1, 2, 2],
            "patch_size": [3, 3],
            "patch_stride": [4, 4],
            "patch_padding": [1, 1],
            "masked_unit_size": [4, 4],
            "query_stride": [2, 2],
            "num_query_pool": 2,
            "decoder_hidden_size": 8,
            "decoder_depth": 1,
            "decoder_num_heads": 2,
            "drop_path_rate": 0.0,
        },
        data.fields(pixel_values=data.normal(3, 32, 32)),
    ),
    "videomae, masked": (
        "VideoMAEForPreTraining",
        {
            **VISION,
            "num_frames": 2,
            "tubelet_size": 1,
            "decoder_num_attention_heads": 2,
            "decoder_hidden_size": 24,
            "decoder_num_hidden_layers": 2,
            "decoder_intermediate_size": 36,
            "norm_pix_loss": True,
        },
        data.fields(
            pixel_values=data.normal(2, 3, 8, 8), bool_masked_pos=lambda n, g: torch.arange(8) % 2 == n % 2
        ),
    ),
}
SOUND = {
    **speech.TINY,
    "proj_codevector_dim": 8,
    "codevector_dim": 8,
    "num_codevectors_per_group": 8,
    "num_codevector_groups": 2,
    "num_negatives": 3,
    "feat_quantizer_dropout": 0.0,
}


def pretraining_sounds() -> Any:
    def row(number: int, generator: torch.Generator) -> Any:
        masked = torch.zeros(20, dtype=torch.bool)
        masked[number % 5 :: 4] = True
        negatives = torch.randint(0, 20, (20, 3), generator=generator)
        return {
            "input_values": torch.randn(160, generator=generator),
            "mask_time_indices": masked,
            "sampled_negative_indices": negatives,
        }

    return data.loader(row)


SPEECH: dict[str, tuple[str, dict[str, Any], Any]] = {
    "wav2vec2, pretraining": ("Wav2Vec2ForPreTraining", SOUND, pretraining_sounds),
    "sew-d": (
        "SEWDForCTC",
        {**SOUND, "squeeze_factor": 2, "feature_layer_norm_eps": 1e-5, "position_buckets": 8},
        speech.spoken,
    ),
    "hubert, classes": (
        "HubertForSequenceClassification",
        {**SOUND, "classifier_proj_size": 8, "use_weighted_layer_sum": True},
        speech.SOUNDS,
    ),
    "wav2vec2, masks of its own": (
        "Wav2Vec2ForCTC",
        {
            **SOUND,
            "apply_spec_augment": True,
            "mask_time_prob": 0.5,
            "mask_time_length": 2,
            "mask_time_min_masks": 1,
        },
        speech.spoken,
    ),
    "parakeet": (
        "ParakeetForCTC",
        {
            "vocab_size": 9,
            "pad_token_id": 0,
            "ctc_loss_reduction": "mean",
            "encoder_config": {
                "hidden_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 36,
                "conv_kernel_size": 3,
                "subsampling_factor": 4,
                "subsampling_conv_channels": 8,
                "num_mel_bins": 8,
                "dropout": 0.0,
                "attention_dropout": 0.0,
                "activation_dropout": 0.0,
                "layerdrop": 0.0,
                "dropout_positions": 0.0,
            },
        },
        data.fields(
            input_features=data.normal(40, 8), attention_mask=data.ones(40), labels=data.whole(1, 9, 5)
        ),
    ),
}


RANDOM = {"ibert", "informer", "hiera, masked", "wav2vec2, pretraining", "wav2vec2, masks of its own"}
MODELS = {
    **{name: (made, {**ENCODER, **options}, batches) for name, (made, options, batches) in ENCODERS.items()},
    **SEQ2SEQ,
    **IMAGES,
    **SPEECH,
    **SEVERAL,
}
register(
    *(
        Family(
            name,
            "further mechanisms",
            make(architecture, options),
            batches,
            single_precision=True,
            random=name in RANDOM,
        )
        for name, (architecture, options, batches) in MODELS.items()
    )
)
