"""Models of several modalities, and models put together of others."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from families import data, decoders, encoders, images
from families.decoders import make
from families.family import Family, register

TEXT: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 16,
    "attention_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "pad_token_id": data.PAD,
    "sep_token_id": 3,
    "initializer_range": 0.2,
}
IMAGE: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "image_size": 8,
    "patch_size": 4,
    "attention_dropout": 0.0,
}
BOTH = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}

PAIRS = data.fields(
    input_ids=data.whole(4, data.VOCABULARY, 7),
    attention_mask=data.ones(7),
    pixel_values=data.normal(3, 8, 8),
)
CAPTIONS = data.fields(pixel_values=data.normal(3, 8, 8), labels=data.whole(4, data.VOCABULARY, 6))


class Contrastive(nn.Module):
    """A model that is asked for its contrastive loss in every call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch, return_loss=True)


def contrastive(architecture: str) -> Any:
    return lambda: Contrastive(make(architecture, BOTH)())


def captioner() -> nn.Module:
    """An image encoder and a text decoder with attention from one to the other."""
    encoder = transformers.ViTModel(transformers.ViTConfig(**images.TINY), add_pooling_layer=False)
    config = transformers.GPT2Config(
        **{**decoders.TINY, **decoders.NO_DROPOUT}, add_cross_attention=True, is_decoder=True
    )
    model = transformers.VisionEncoderDecoderModel(
        encoder=encoder, decoder=transformers.GPT2LMHeadModel(config)
    )
    model.config.decoder_start_token_id, model.config.pad_token_id = 2, data.PAD
    return model


def translator() -> nn.Module:
    """Two BERTs, one of them a decoder."""
    encoder = transformers.BertModel(transformers.BertConfig(**encoders.TINY), add_pooling_layer=False)
    config = transformers.BertConfig(**encoders.TINY, is_decoder=True, add_cross_attention=True)
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(config))
    model.config.decoder_start_token_id, model.config.pad_token_id = 2, data.PAD
    return model


def text_and_image() -> nn.Module:
    vision = transformers.ViTModel(transformers.ViTConfig(**images.TINY))
    text = transformers.BertModel(transformers.BertConfig(**encoders.TINY))
    return Contrastive(transformers.VisionTextDualEncoderModel(vision_model=vision, text_model=text))


FORECAST = {
    "prediction_length": 4,
    "context_length": 6,
    "lags_sequence": [1, 2],
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "num_time_features": 1,
}
SERIES = data.fields(
    past_values=data.normal(8),
    past_time_features=data.normal(8, 1),
    past_observed_mask=lambda number, generator: data.torch.ones(8),
    future_values=data.normal(4),
    future_time_features=data.normal(4, 1),
)

register(
    Family("clip", "contrastive", contrastive("CLIPModel"), PAIRS, couples=True),
    Family("siglip", "contrastive", contrastive("SiglipModel"), PAIRS, couples=True),
    Family("vision-text-dual-encoder", "contrastive", text_and_image, PAIRS, couples=True),
    Family("vision-encoder-decoder", "encoder-decoder", captioner, CAPTIONS, single_precision=True),
    Family(
        "encoder-decoder of BERTs", "encoder-decoder", translator, data.pairs_of_texts, single_precision=True
    ),
    Family(
        "git",
        "several modalities",
        make("GitForCausalLM", {**TEXT, "vision_config": IMAGE, "num_hidden_layers": 3}),
        data.fields(
            input_ids=data.whole(4, data.VOCABULARY, 7),
            attention_mask=data.ones(7),
            pixel_values=data.normal(3, 8, 8),
            labels=data.whole(4, data.VOCABULARY, 7),
        ),
        single_precision=True,
    ),
    Family(
        "blip",
        "several modalities",
        make("BlipForConditionalGeneration", {**BOTH, "text_config": {**TEXT, "encoder_hidden_size": 24}}),
        data.fields(
            input_ids=data.whole(4, data.VOCABULARY, 7),
            pixel_values=data.normal(3, 8, 8),
            labels=data.whole(4, data.VOCABULARY, 7),
        ),
        single_precision=True,
    ),
    Family(
        "time-series-transformer",
        "forecast",
        make("TimeSeriesTransformerForPrediction", FORECAST),
        SERIES,
        single_precision=True,
    ),
)
