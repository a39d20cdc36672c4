"""Architectures that transformers has had for a short time, or that few train, each with its own loss."""

from __future__ import annotations

from typing import Any

from families import data, encoders, hybrids, newer, seq2seq
from families.decoders import make
from families.family import Family, register

KIND = "recent architectures"
DECODER = {**newer.DECODER, **newer.LATENT, **hybrids.EXPERTS, **hybrids.SCANS, "sliding_window": 4}
ENCODER = {**newer.DECODER, **encoders.TINY, "bos_token_id": 2, "eos_token_id": 3, "attention_window": 4}
DECODERS = {
    "aria": "AriaText",
    "axk1": "AXK1",
    "axk2": "AXK2",
    "beam": "Beam",
    "bitnet": "BitNet",
    "cohere2, experts": "Cohere2Moe",
    "cwm": "Cwm",
    "deepseek-v3.2": "DeepseekV32",
    "deepseek-v4": "DeepseekV4",
    "emu3": "Emu3",
    "ernie-4.5": "Ernie4_5",
    "exaone, experts": "ExaoneMoe",
    "flint": "Flint",
    "glm": "Glm",
    "glm4, few experts": "Glm4MoeLite",
    "glm5": "GlmMoeDsa",
    "granite, windows": "GraniteSWA",
    "granite, windows and experts": "GraniteMoeSWA",
    "granite, shared experts": "GraniteMoeShared",
    "hrm": "HrmText",
    "hunyuan, experts": "HunYuanMoEV1",
    "hunyuan-v3": "HYV3",
    "hunyuan-v4": "HYV4",
    "hyperclova": "HyperCLOVAX",
    "jais2": "Jais2",
    "kolibri": "Kolibri1",
    "laguna": "Laguna",
    "lfm3": "Lfm3",
    "llama4": "Llama4",
    "mellum": "Mellum",
    "minimax-m2": "MiniMaxM2",
    "minimax-m3": "MiniMaxM3VL",
    "ministral3": "Ministral3",
    "mistral4": "Mistral4",
    "mllama": "Mllama",
    "solar, open": "SolarOpen",
    "youtu": "Youtu",
}
ENCODERS = {
    "ernie": "Ernie",
    "esmc": "Esmc",
    "gte": "Gte",
    "jina-v3": "JinaEmbeddingsV3",
    "nomic-bert": "NomicBert",
    "ultrabert": "Ultrabert",
    "xlm-roberta, large": "XLMRobertaXL",
}
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    **{name: (f"{kind}ForCausalLM", DECODER, data.causal) for name, kind in DECODERS.items()},
    **{name: (f"{kind}ForMaskedLM", ENCODER, data.masked) for name, kind in ENCODERS.items()},
    "blenderbot, small": ("BlenderbotSmallForConditionalGeneration", seq2seq.BART, data.pairs_of_texts),
}
register(
    *(
        Family(name, KIND, make(architecture, options), batches, single_precision=True)
        for name, (architecture, options, batches) in MODELS.items()
    )
)
