"""Models of sound: connectionist temporal classification and classes."""

from __future__ import annotations

from typing import Any

import torch

from families import data
from families.decoders import make
from families.family import Family, register

TINY: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 36,
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [4, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "vocab_size": 9,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
    "num_labels": 3,
    "initializer_range": 0.1,
}
WAVLM = {"num_buckets": 8, "max_bucket_distance": 8}
SEW = {"squeeze_factor": 2}
AST = {"patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 12, "num_mel_bins": 8}


def spoken() -> Any:
    """Sounds with texts of several lengths."""

    def row(number: int, generator: torch.Generator) -> Any:
        labels = torch.randint(1, 9, (5,), generator=generator)
        labels[5 - number % 4 :] = -100
        return {
            "input_values": torch.randn(160, generator=generator),
            "attention_mask": torch.ones(160, dtype=torch.long),
            "labels": labels,
        }

    return data.loader(row)


SOUNDS = data.fields(input_values=data.normal(160), labels=data.whole(0, 3))
SPECTRA = data.fields(input_values=data.normal(12, 8), labels=data.whole(0, 3))

SPEECH: dict[str, tuple[str, dict[str, Any], Any]] = {
    "wav2vec2, ctc mean": ("Wav2Vec2ForCTC", {}, spoken),
    "wav2vec2, ctc sum": ("Wav2Vec2ForCTC", {"ctc_loss_reduction": "sum"}, spoken),
    "hubert": ("HubertForCTC", {}, spoken),
    "wavlm": ("WavLMForCTC", WAVLM, spoken),
    "sew": ("SEWForCTC", SEW, spoken),
    "wav2vec2, classes": ("Wav2Vec2ForSequenceClassification", {"classifier_proj_size": 8}, SOUNDS),
    "audio-spectrogram": ("ASTForAudioClassification", AST, SPECTRA),
}
register(
    *(
        Family(name, "speech", make(architecture, {**TINY, **changes}), batches, single_precision=True)
        for name, (architecture, changes, batches) in SPEECH.items()
    )
)
