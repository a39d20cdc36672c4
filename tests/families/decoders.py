"""Language models that predict the next token, most with the loss that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from families import data
from families.family import Family, register

NO_DROPOUT = {
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
}
TINY: dict[str, Any] = {
    "vocab_size": data.VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 16,
    "pad_token_id": data.PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "head_dim": 4,
    "initializer_range": 0.2,
}
# The experts' fused kernels are for the formats of training alone, not for float64.
EAGER = {"experts_implementation": "eager"}
EXPERTS = {"output_router_logits": True, "router_aux_loss_coef": 0.1, **EAGER}


def decoder(name: str, architecture: str, **changes: Any) -> Family:
    """A decoder with its own loss."""
    options = {**TINY, **NO_DROPOUT, **changes}
    return Family(name, "decoder", make(architecture, options), data.causal, single_precision=True)


def make(architecture: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """What makes an architecture of transformers from options; those that are ``...`` are left out."""

    def model() -> nn.Module:
        cls = getattr(transformers, architecture)
        return cls(cls.config_class(**{key: value for key, value in options.items() if value is not ...}))

    return model


def token_loss(outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss function of the user's own: sum over the tokens that count, and their number."""
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return cross_entropy(logits, labels, reduction="sum", ignore_index=-100), (labels != -100).sum()


DECODERS = {
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            "num_hidden_layers": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
        },
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "gpt-j": (
        "GPTJForCausalLM",
        {"n_embd": 24, "n_layer": 3, "n_head": 6, "rotary_dim": 4, "n_positions": 16},
    ),
    "opt": ("OPTForCausalLM", {"ffn_dim": 36, "word_embed_proj_dim": 24}),
    "bloom": ("BloomForCausalLM", {"n_head": 6, "n_layer": 3}),
    "llama": ("LlamaForCausalLM", {}),
    "llama, grouped heads": (
        "LlamaForCausalLM",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 4, "query_pre_attn_scalar": 4}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 4,
            "query_pre_attn_scalar": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi": ("PhiForCausalLM", {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "falcon": (
        "FalconForCausalLM",
        {"head_dim": ..., "new_decoder_architecture": False, "multi_query": True},
    ),
    "stablelm": ("StableLmForCausalLM", {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2ForCausalLM", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "cohere": ("CohereForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "mpt": ("MptForCausalLM", {"d_model": 24, "n_heads": 6, "n_layers": 3, "max_seq_len": 16}),
    "biogpt": (
        "BioGptForCausalLM",
        {
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "activation_dropout": 0.0,
            "layerdrop": 0.0,
        },
    ),
    "mamba": ("MambaForCausalLM", {"state_size": 4, "expand": 2, "conv_kernel": 3, "time_step_rank": 3}),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        {"lru_width": 24, "attention_window_size": 4, "block_types": ["recurrent", "recurrent", "attention"]},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, **EXPERTS}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 1,
            **EXPERTS,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, **EXPERTS}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, **EAGER},
    ),
}
register(*(decoder(name, architecture, **changes) for name, (architecture, changes) in DECODERS.items()))

PADDED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
register(
    *(
        Family(f"{name}, {what}", "decoder", make(*of), batches, loss, single_precision=True)
        for name, of in {
            "gpt2": ("GPT2LMHeadModel", {**TINY, **NO_DROPOUT}),
            "llama": ("LlamaForCausalLM", {**TINY, **PADDED}),
        }.items()
        for what, batches, loss in (
            ("own collator", data.padded_causal, None),
            ("a loss function", data.causal, "families.decoders:token_loss"),
        )
    )
)
# What the auxiliary loss of a mixture of experts depends on is the whole batch; without it nothing does.
register(
    Family(
        "mixtral, no auxiliary loss",
        "decoder",
        make(
            "MixtralForCausalLM",
            {**TINY, **NO_DROPOUT, "num_local_experts": 4, "num_experts_per_tok": 2, **EAGER},
        ),
        data.causal,
        single_precision=True,
    )
)
