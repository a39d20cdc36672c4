"""Models of images: patches, windows and convolutions."""

from __future__ import annotations

from typing import Any

import torch

from families import data
from families.decoders import make
from families.family import Family, register

CLASSES = 5
TINY: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 36,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "drop_path_rate": 0.0,
    "num_labels": CLASSES,
    "initializer_range": 0.2,
}
SWIN = {
    "embed_dim": 8,
    "depths": [2, 2],
    "num_attention_heads": [2, 4],
    "num_hidden_layers": 2,
    "window_size": 2,
    "patch_size": 2,
}
SEGFORMER = {
    "num_hidden_layers": 2,
    "depths": [2, 2],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "classifier_dropout_prob": 0.0,
    "decoder_hidden_size": 16,
}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
CONVNEXT = {
    "num_hidden_layers": 2,
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "patch_size": 2,
    "layer_scale_init_value": 0.5,
}
POOLFORMER = {
    "hidden_sizes": [8, 16],
    "depths": [2, 2],
    "num_hidden_layers": ...,
    "num_encoder_blocks": 2,
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "padding": [1, 1],
    "layer_scale_init_value": 0.5,
}
VIDEO = {"num_frames": 2, "tubelet_size": 1}


def pictures(side: int = 8, samples: int = data.SAMPLES) -> Any:
    """Pictures and classes; with ``samples`` 14 the last batch has 4 of them, as BatchNorm needs several."""

    def row(number: int, generator: torch.Generator) -> Any:
        label = torch.randint(0, CLASSES, (), generator=generator)
        return {"pixel_values": torch.randn(3, side, side, generator=generator), "labels": label}

    return data.loader(row, samples)


def segmented() -> Any:
    """Pictures with a class for each pixel; some are ignored, more of them in some pictures."""

    def row(number: int, generator: torch.Generator) -> Any:
        labels = torch.randint(0, CLASSES, (8, 8), generator=generator)
        labels[: number % 4] = 255
        return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": labels}

    return data.loader(row)


def several() -> Any:
    return pictures(16, 14)


IMAGES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "vit": ("ViTForImageClassification", {}, pictures),
    "deit": ("DeiTForImageClassification", {}, pictures),
    "beit": (
        "BeitForImageClassification",
        {"use_relative_position_bias": True, "layer_scale_init_value": 0.1},
        pictures,
    ),
    "dinov2": ("Dinov2ForImageClassification", {"mlp_ratio": 2, "layerscale_value": 0.5}, pictures),
    "swin": ("SwinForImageClassification", SWIN, pictures),
    "swinv2": ("Swinv2ForImageClassification", SWIN, pictures),
    "convnext": ("ConvNextForImageClassification", CONVNEXT, pictures),
    "convnextv2": ("ConvNextV2ForImageClassification", CONVNEXT, pictures),
    "poolformer": ("PoolFormerForImageClassification", POOLFORMER, pictures),
    "segformer": ("SegformerForImageClassification", SEGFORMER, pictures),
    "segformer, pixels": (
        "SegformerForSemanticSegmentation",
        {**SEGFORMER, "semantic_loss_ignore_index": 255},
        segmented,
    ),
    "resnet": ("ResNetForImageClassification", RESNET, several),
    "videomae": (
        "VideoMAEForVideoClassification",
        VIDEO,
        data.fields(pixel_values=data.normal(2, 3, 8, 8), labels=data.whole(0, CLASSES)),
    ),
}
COUPLED = {"resnet", "segformer, pixels"}
register(
    *(
        Family(
            name,
            "vision",
            make(architecture, {**TINY, **changes}),
            batches,
            couples=name in COUPLED,
            ignored=changes.get("semantic_loss_ignore_index", -100),
        )
        for name, (architecture, changes, batches) in IMAGES.items()
    )
)
