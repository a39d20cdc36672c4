"""Encoders of text: masked tokens, classes, tags, and losses that are sums of several means."""

from __future__ import annotations

from typing import Any

from families import data
from families.decoders import make
from families.family import Family, register

TINY: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 20,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
    "pad_token_id": data.PAD,
    "num_labels": 3,
    "initializer_range": 0.2,
}
DISTILBERT = {
    "dim": 24,
    "hidden_dim": 36,
    "n_layers": 3,
    "n_heads": 6,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
MODERN = {
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
    "local_attention": 4,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 3,
    "sep_token_id": 2,
    "bos_token_id": 3,
    "eos_token_id": 2,
}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 4,
    "pos_att_type": ["p2c", "c2p"],
    "pooler_dropout": 0.0,
    "pooler_hidden_size": 24,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
WITH_SPECIAL = {"bos_token_id": 3, "eos_token_id": 2}

ENCODERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "bert, masked tokens": ("BertForMaskedLM", {}, data.masked),
    "bert, masked by the collator": ("BertForMaskedLM", {}, data.masked_by_collator),
    "bert, classes": ("BertForSequenceClassification", {}, data.classified),
    "bert, next sentence": ("BertForNextSentencePrediction", {}, lambda: data.classified(2)),
    "bert, tags": ("BertForTokenClassification", {}, data.tagged),
    "bert, pretraining": (
        "BertForPreTraining",
        {},
        lambda: with_field(data.masked(), "next_sentence_label", 2),
    ),
    "bert, answers": (
        "BertForQuestionAnswering",
        {"num_labels": 2},
        data.fields(
            input_ids=data.whole(4, data.VOCABULARY, 9),
            start_positions=data.whole(0, 9),
            end_positions=data.whole(0, 12),
        ),
    ),
    "bert, choices": (
        "BertForMultipleChoice",
        {},
        data.fields(
            input_ids=data.whole(4, data.VOCABULARY, 2, 9),
            attention_mask=data.ones(2, 9),
            labels=data.whole(0, 2),
        ),
    ),
    "bert, several labels each": (
        "BertForSequenceClassification",
        {"problem_type": "multi_label_classification"},
        lambda: as_floats(
            data.fields(input_ids=data.whole(4, data.VOCABULARY, 9), labels=data.whole(0, 2, 3))()
        ),
    ),
    "bert, regression": (
        "BertForSequenceClassification",
        {"num_labels": 1},
        data.fields(input_ids=data.whole(4, data.VOCABULARY, 9), labels=data.normal()),
    ),
    "roberta": ("RobertaForMaskedLM", WITH_SPECIAL, data.masked_by_collator),
    "xlm-roberta, tags": ("XLMRobertaForTokenClassification", WITH_SPECIAL, data.tagged),
    "distilbert": ("DistilBertForMaskedLM", DISTILBERT, data.masked),
    "distilbert, classes": (
        "DistilBertForSequenceClassification",
        {**DISTILBERT, "seq_classif_dropout": 0.0},
        data.classified,
    ),
    "albert": ("AlbertForMaskedLM", {"embedding_size": 8}, data.masked),
    "electra, replaced tokens": (
        "ElectraForPreTraining",
        {"embedding_size": 8},
        data.fields(
            input_ids=data.whole(4, data.VOCABULARY, 9),
            attention_mask=data.ones(9),
            labels=data.whole(0, 2, 9),
        ),
    ),
    "electra, masked tokens": ("ElectraForMaskedLM", {"embedding_size": 8}, data.masked),
    "deberta-v2": ("DebertaV2ForMaskedLM", DEBERTA, data.masked),
    "deberta-v2, classes": ("DebertaV2ForSequenceClassification", DEBERTA, data.classified),
    "modernbert": ("ModernBertForMaskedLM", MODERN, data.masked),
    "mpnet": ("MPNetForMaskedLM", WITH_SPECIAL, data.masked),
    "roformer": ("RoFormerForMaskedLM", {"embedding_size": 24}, data.masked),
    "convbert": (
        "ConvBertForMaskedLM",
        {"embedding_size": 24, "head_ratio": 1, "conv_kernel_size": 3},
        data.masked,
    ),
    "squeezebert": (
        "SqueezeBertForMaskedLM",
        {
            "embedding_size": 24,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "post_attention_groups": 1,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
        data.masked,
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        {
            "max_position_embeddings": ...,
            "d_model": 24,
            "n_layer": 3,
            "n_head": 6,
            "d_inner": 36,
            "dropout": 0.0,
        },
        data.masked,
    ),
}


def with_field(loader: Any, name: str, classes: int) -> Any:
    """The same data with a class more in each sample."""
    for number, row in enumerate(loader.dataset.rows):
        row[name] = data.torch.tensor(number % classes)
    return loader


def as_floats(loader: Any) -> Any:
    """The same data with labels that are floating-point numbers."""
    for row in loader.dataset.rows:
        row["labels"] = row["labels"].float()
    return loader


register(
    *(
        Family(name, "encoder", make(architecture, {**TINY, **changes}), batches, single_precision=True)
        for name, (architecture, changes, batches) in ENCODERS.items()
    )
)
