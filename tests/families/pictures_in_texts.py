"""Transformers of texts with pictures in them, and what they need besides."""

from __future__ import annotations

from typing import Any

import torch

from families import data, encoders, newer, several

IMAGE_TOKEN = 47
ENCODER, DECODER = encoders.TINY, newer.DECODER


def with_image(tokens: int = 4, **more: Any) -> Any:
    """Texts with places for a picture's tokens."""

    def row(number: int, generator: torch.Generator) -> Any:
        text = torch.randint(4, 40, (6,), generator=generator)
        ids = torch.cat([torch.tensor([2]), torch.full((tokens,), IMAGE_TOKEN), text])
        labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
            "pixel_values": torch.randn(3, 8, 8, generator=generator),
        } | {k: make_one(number, generator) for k, make_one in more.items()}

    return lambda: data.loader(row)


def idefics_pictures() -> Any:
    loader = with_image(1)()
    for row in loader.dataset.rows:
        row["pixel_values"] = row["pixel_values"][None]
    return loader


def packed_pictures() -> Any:
    """Texts with pictures, whose patches lie one after the other as Qwen's processors give them."""

    def row(number: int, generator: torch.Generator) -> Any:
        text = torch.randint(4, 40, (6,), generator=generator)
        ids = torch.cat([torch.tensor([2, 44]), torch.full((1,), IMAGE_TOKEN), torch.tensor([45]), text])
        return {"ids": ids, "patches": torch.randn(4, 3 * 2 * 4 * 4, generator=generator)}

    def collate(samples: list[Any]) -> Any:
        ids = torch.stack([sample["ids"] for sample in samples])
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.where(ids > 43, -100, ids),
            "pixel_values": torch.cat([sample["patches"] for sample in samples]),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * len(samples)),
            "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        }

    return data.loader(row, collate=collate)


TEXT = {**DECODER, "max_position_embeddings": 32}


CLIP = {"model_type": "clip_vision_model", **several.IMAGE, "projection_dim": 16}


LLAMA = {"model_type": "llama", **TEXT}


QWEN = {
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0},
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
}


SEVERAL: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "vision_config": CLIP,
            "text_config": LLAMA,
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "vision_feature_layer": -2,
        },
        with_image(),
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **several.IMAGE},
            "text_config": {"model_type": "gemma", **TEXT},
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
            "projection_dim": 24,
            "hidden_size": 24,
        },
        with_image(token_type_ids=lambda n, g: (torch.arange(11) > 6).long()),
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {
            "vision_config": {**several.IMAGE},
            "text_config": LLAMA,
            "image_token_id": IMAGE_TOKEN,
            "scale_factor": 2,
            "pad_token_id": 0,
        },
        idefics_pictures,
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, **QWEN},
            "vision_config": {
                "depth": 2,
                "hidden_size": 16,
                "out_hidden_size": 24,
                "intermediate_size": 16,
                "num_heads": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "in_channels": 3,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": IMAGE_TOKEN,
            "vision_start_token_id": 44,
            "vision_end_token_id": 45,
            "video_token_id": 46,
        },
        packed_pictures,
    ),
    "pix2struct": (
        "Pix2StructForConditionalGeneration",
        {
            "text_config": {
                "vocab_size": 48,
                "hidden_size": 24,
                "d_kv": 4,
                "d_ff": 36,
                "num_layers": 2,
                "num_heads": 6,
                "dropout_rate": 0.0,
                "decoder_start_token_id": 0,
                "relative_attention_num_buckets": 8,
            },
            "vision_config": {
                "hidden_size": 24,
                "patch_embed_hidden_size": 48,
                "d_ff": 36,
                "d_kv": 4,
                "num_hidden_layers": 2,
                "num_attention_heads": 6,
                "seq_len": 4,
                "dropout_rate": 0.0,
                "attention_dropout": 0.0,
            },
        },
        data.fields(
            flattened_patches=lambda n, g: torch.cat(
                [torch.tensor([[1.0, 1], [1, 2], [2, 1], [2, 2]]), torch.randn(4, 48, generator=g)], -1
            ),
            attention_mask=data.ones(4),
            labels=data.whole(4, 48, 6),
        ),
    ),
    "blip-2": (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": several.IMAGE,
            "qformer_config": {**ENCODER, "encoder_hidden_size": 24, "cross_attention_frequency": 1},
            "text_config": {"model_type": "opt", **TEXT, "ffn_dim": 36, "word_embed_proj_dim": 24},
            "num_query_tokens": 4,
            "image_token_index": IMAGE_TOKEN,
            "image_token_id": IMAGE_TOKEN,
        },
        with_image(),
    ),
}
