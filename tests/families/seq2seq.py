"""Encoder-decoders: of text, of speech to text, of images to text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersTop1Router

from families import data
from families.decoders import make
from families.family import Family, register

COMMON: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "pad_token_id": data.PAD,
    "eos_token_id": 3,
    "bos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "dropout_rate": 0.0,
    "use_cache": True,
    "init_std": 0.2,
}
BART: dict[str, Any] = {
    **COMMON,
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 16,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
}
T5: dict[str, Any] = {
    **COMMON,
    "d_model": 24,
    "d_kv": 4,
    "d_ff": 36,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 6,
    "relative_attention_num_buckets": 8,
}
WHISPER = {
    **BART,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 16,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
SPEECH2TEXT = {
    **BART,
    "max_source_positions": 24,
    "max_target_positions": 16,
    "num_conv_layers": 2,
    "conv_channels": 16,
    "input_feat_per_channel": 8,
    "input_channels": 1,
}
SWITCH: dict[str, Any] = {
    **T5,
    "num_experts": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "expert_capacity": 64,
    "router_jitter_noise": 0.0,
}


def switch_transformers() -> nn.Module:
    """Its routers compute in float32 and make their weights so; here in float64, as the others do."""
    model = make("SwitchTransformersForConditionalGeneration", SWITCH)()
    for module in model.modules():
        if isinstance(module, SwitchTransformersTop1Router):
            module.dtype = torch.float64
    return model


SEQ2SEQ: dict[str, tuple[str, dict[str, Any], Any]] = {
    "t5": ("T5ForConditionalGeneration", T5, data.pairs_of_texts),
    "mt5": ("MT5ForConditionalGeneration", T5, data.pairs_of_texts),
    "bart": ("BartForConditionalGeneration", BART, data.pairs_of_texts),
    "mbart": ("MBartForConditionalGeneration", BART, data.pairs_of_texts),
    "pegasus": ("PegasusForConditionalGeneration", BART, data.pairs_of_texts),
    "marian": ("MarianMTModel", {**BART, "decoder_vocab_size": data.VOCABULARY}, data.pairs_of_texts),
    "m2m100": ("M2M100ForConditionalGeneration", BART, data.pairs_of_texts),
    "blenderbot": ("BlenderbotForConditionalGeneration", BART, data.pairs_of_texts),
    "whisper": (
        "WhisperForConditionalGeneration",
        WHISPER,
        data.fields(input_features=data.normal(8, 20), labels=data.whole(4, data.VOCABULARY, 6)),
    ),
    "speech-to-text": (
        "Speech2TextForConditionalGeneration",
        SPEECH2TEXT,
        data.fields(input_features=data.normal(20, 8), labels=data.whole(4, data.VOCABULARY, 6)),
    ),
}
register(
    Family(
        "switch-transformers",
        "encoder-decoder",
        switch_transformers,
        data.pairs_of_texts,
        single_precision=True,
    ),
    *(
        Family(name, "encoder-decoder", make(architecture, changes), batches, single_precision=True)
        for name, (architecture, changes, batches) in SEQ2SEQ.items()
    ),
)
