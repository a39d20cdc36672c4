"""Do trainers that other libraries derive from transformers' come to the same under Saturn as alone?

    pip install trl sentence-transformers datasets
    python benchmarks/library_trainers.py [NAME ...] [--out FILE]

Small models from configurations, one device, 22 samples in batches of four. Each trainer trains once by
itself (``Trainer.train()``), once as a job, and once as a job that is stopped after each of ``--stops``
steps and resumed in a new process. Prints the largest difference of any weight of the last two to the first,
or with which reason the job is refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe

from saturn_airflow import Job
from saturn_airflow.launch.request import Measure, TrainRequest
from saturn_airflow.model.errors import SaturnError
from saturn_airflow.training import ranks as ranks_module
from saturn_airflow.training.exports import load_exported
from saturn_airflow.training.guarding import guarded
from saturn_airflow.training.loop import train
from saturn_airflow.training.ranks import Ranks

LIBRARIES = ("transformers", "trl", "sentence-transformers", "datasets", "peft", "torch")
WORDS = [a + b for a in ("ka", "lo", "mi", "ru") for b in ("ba", "do", "fe", "ni", "su")]
SPECIAL = ["<pad>", "<eos>", "<unk>", "<bos>"]
IDS: Any = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
SAMPLES = 22


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    named: Any = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=words, **named)


def sentences(**columns: int) -> Any:
    """A dataset with so many words in each column; 0 for three to nine."""
    from datasets import Dataset

    chance = random.Random(1)
    return Dataset.from_list(
        [
            {
                name: " ".join(["", *chance.choices(WORDS, k=count or chance.randint(3, 9))])
                for name, count in columns.items()
            }
            for _ in range(SAMPLES)
        ]
    )


def arguments(kind: Any, output_dir: str | None, **more: Any) -> Any:
    """What all have in common, as ``kind`` of TrainingArguments."""
    common: Any = {
        "use_cpu": True,
        "bf16": False,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "save_strategy": "no",
        "report_to": "none",
    }
    return kind(**{**common, **({"output_dir": output_dir} if output_dir else {}), **more})


def saved(model: Any, name: str) -> Any:
    """The model as one that was loaded from disk, with its tokenizer: some trainers load another."""
    folder = Path(tempfile.gettempdir()) / f"library-trainers-{name}"
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return type(model).from_pretrained(folder)


def language_model() -> Any:
    """A GPT-2 with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(1)
    return GPT2LMHeadModel(GPT2Config(n_positions=64, n_embd=16, n_layer=2, n_head=2, **IDS))


def llama() -> Any:
    """A Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(1)
    sizes: Any = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, max_position_embeddings=64, **sizes, **IDS))


def lora() -> Any:
    """Adapters with dropout."""
    from peft import LoraConfig

    return LoraConfig(r=2, task_type="CAUSAL_LM", lora_dropout=0.1)


def of_trl(name: str, data: Callable[[], Any], output_dir: str | None, **more: Any) -> Any:
    """One of TRL's trainers; ``model`` and ``peft_config`` are its own, the rest goes into its arguments."""
    import trl

    model = more.pop("model", lambda: saved(language_model(), "gpt2"))()
    adapters = {"peft_config": more.pop("peft_config")()} if "peft_config" in more else {}
    more = {"gradient_checkpointing": False, "max_length": 32, **more}
    args = arguments(getattr(trl, f"{name}Config"), output_dir, **more)
    return getattr(trl, f"{name}Trainer")(
        model=model, args=args, train_dataset=data(), processing_class=tokenizer(), **adapters
    )


def classifier() -> Any:
    """A GPT-2 with a score for each text."""
    from transformers import GPT2Config, GPT2ForSequenceClassification, set_seed

    set_seed(1)
    sizes: Any = {"n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "num_labels": 1}
    return GPT2ForSequenceClassification(GPT2Config(**sizes, **IDS))


def judged() -> Any:
    """Completions, each good or bad."""
    chance = random.Random(2)
    data = sentences(prompt=3, completion=0)
    return data.add_column("label", [chance.random() < 0.5 for _ in range(SAMPLES)])


def of_sentence_transformers(loss: str, data: Callable[[], Any], output_dir: str | None, **more: Any) -> Any:
    """Sentence Transformers' trainer with one of its losses."""
    import sentence_transformers as st
    from sentence_transformers import losses, models
    from transformers import BertConfig, BertModel, set_seed

    set_seed(1)
    sizes: Any = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    saved(BertModel(BertConfig(vocab_size=IDS["vocab_size"], **sizes)), "bert")
    words = models.Transformer(str(Path(tempfile.gettempdir()) / "library-trainers-bert"))
    model = st.SentenceTransformer(modules=[words, models.Pooling(16)], device="cpu")
    made: Any = getattr(losses, loss)
    arguments_of_loss: Any = {"mini_batch_size": 2} if loss.startswith("Cached") else {}
    if loss == "SoftmaxLoss":
        arguments_of_loss = {"sentence_embedding_dimension": 16, "num_labels": 2}
    return st.SentenceTransformerTrainer(
        model=model,
        args=arguments(st.SentenceTransformerTrainingArguments, output_dir, **more),
        train_dataset=data(),
        loss=made(model, **arguments_of_loss),
    )


def scored(name: str, values: tuple[float, ...]) -> Any:
    """Pairs of sentences with a score or a label."""
    chance = random.Random(3)
    return sentences(first=0, second=0).add_column(name, [chance.choice(values) for _ in range(SAMPLES)])


TEXTS = partial(sentences, text=0)
PREFERENCES = partial(sentences, prompt=3, chosen=0, rejected=0)
PAIRS = partial(sentences, anchor=0, positive=0)
TRAINERS: dict[str, Callable[..., Any]] = {
    "sft": partial(of_trl, "SFT", TEXTS),
    "sft packed": partial(of_trl, "SFT", TEXTS, packing=True, max_length=16),
    "sft completions": partial(of_trl, "SFT", partial(sentences, prompt=3, completion=0)),
    "sft lora": partial(of_trl, "SFT", TEXTS, model=llama, peft_config=lora),
    "sft recomputed": partial(
        of_trl, "SFT", TEXTS, model=llama, gradient_checkpointing=True, gradient_accumulation_steps=2
    ),
    "dpo": partial(of_trl, "DPO", PREFERENCES),
    "dpo lora": partial(of_trl, "DPO", PREFERENCES, model=llama, peft_config=lora),
    "dpo precomputed": partial(of_trl, "DPO", PREFERENCES, precompute_ref_log_probs=True),
    "dpo moving reference": partial(
        of_trl, "DPO", PREFERENCES, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.5
    ),
    "reward": partial(of_trl, "Reward", PREFERENCES, model=classifier),
    "kto": partial(of_trl, "KTO", judged),
    "multiple negatives": partial(of_sentence_transformers, "MultipleNegativesRankingLoss", PAIRS),
    "cached negatives": partial(of_sentence_transformers, "CachedMultipleNegativesRankingLoss", PAIRS),
    "no duplicates": partial(
        of_sentence_transformers, "MultipleNegativesRankingLoss", PAIRS, batch_sampler="no_duplicates"
    ),
    "cosine": partial(
        of_sentence_transformers, "CosineSimilarityLoss", partial(scored, "score", (0.1, 0.5, 0.9))
    ),
    "softmax": partial(of_sentence_transformers, "SoftmaxLoss", partial(scored, "label", (0, 1))),
}


def trainer(name: str, output_dir: str | None = None) -> Any:
    """The job's ``load_model``."""
    return TRAINERS[name](output_dir)


def alone(name: str, file: str, ranks: Ranks) -> int:
    """Train without Saturn and leave the weights in ``file``; how many steps were taken."""
    made = trainer(name, str(Path(file).parent / "alone"))
    made.train()
    torch.save(dict(made.model.state_dict()), file)
    return int(made.state.global_step)


def guard(request: TrainRequest, ranks: Ranks) -> str:
    """What the guard says of the job."""
    return str(guarded.measure(request, ranks)["guard"])


def trained(request: TrainRequest, ranks: Ranks) -> None:
    """Train, from the last checkpoint if there is one."""
    train(request, ranks)


def difference(file: Path, folder: Path) -> float:
    """The largest of any weight."""
    plain, model = torch.load(file), load_exported(folder / "model").state_dict()
    assert plain.keys() == model.keys(), "the same weights are exported"
    return max(float((plain[k].double() - model[k].double()).abs().max()) for k in plain)


def measure(name: str, stops: list[int]) -> dict[str, Any]:
    """One trainer's row."""
    job = Job("job", load_model="library_trainers:trainer", trainer=True, model_args={"name": name})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "alone.pt"

        def request(of: str, **more: Any) -> TrainRequest:
            return TrainRequest(
                job=job,
                technique="single",
                folder=of and str(Path(folder, of)),
                checkpoint_seconds=None,
                **more,
            )

        try:
            (said,) = ranks_module.launch(guard, request("", measure=Measure(batches=4)), size=1)
        except SaturnError as error:
            return {"refused": " ".join(str(error).split())[:300]}
        (steps,) = ranks_module.launch(alone, name, str(file), size=1)
        ranks_module.launch(trained, request("whole"), size=1)
        for count in stops:
            ranks_module.launch(trained, request("stopped", batch_count=count), size=1)
        ranks_module.launch(trained, request("stopped"), size=1)
        whole, stopped = (difference(file, Path(folder, of)) for of in ("whole", "stopped"))
    return {"guard": said, "steps": steps, "whole": whole, "stopped": stopped}


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="; ".join(TRAINERS))
    parser.add_argument("--stops", type=int, nargs="+", default=[3, 4], help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the results")
    args = parser.parse_args()
    rows = {}
    for name in args.names or TRAINERS:
        rows[name] = measure(name, args.stops)
        print(json.dumps({name: rows[name]}), flush=True)
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    if args.out:
        results = {"machine": describe(), "versions": versions, "stops": args.stops, "trainers": rows}
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
