"""Hugging Face's models, recomputed and spilled, train as loops of plain PyTorch train them.

Their caches are on by default, their blocks pass tuples, keyword arguments and what other stacks computed,
and some are called several times in a pass.
"""

# Models without types.
# mypy: disable-error-code="index, misc, no-any-return, no-untyped-call, operator, union-attr"

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from saturn_airflow.launch.request import DoesNotFit
from saturn_airflow.model.jobs import HParams, Job
from saturn_airflow.parallelism import caches
from saturn_airflow.parallelism.blocks import recompute_blocks
from saturn_airflow.parallelism.module_state import ModuleState
from saturn_airflow.parallelism.parallel import Parallel
from saturn_airflow.parallelism.spilling import Spilled
from saturn_airflow.training.losses.objective import Objective
from saturn_airflow.training.model_attributes import ModelAttributes
from saturn_airflow.training.ranks import Ranks

pytestmark = pytest.mark.slow

VOCABULARY, STEPS = 20, 3


def t5() -> nn.Module:
    config = transformers.T5Config(  # type: ignore[call-arg]
        vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    sizes: dict[str, Any] = {
        f"{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")
    }
    widths: dict[str, Any] = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 16}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=VOCABULARY, d_model=8, **sizes, **widths)
    )


def albert(groups: int) -> nn.Module:
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=8,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_hidden_groups=groups,
        num_attention_heads=2,
        hidden_dropout_prob=0.1,
    )
    return transformers.AlbertForMaskedLM(config)


def encoder_decoder() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    parts = [transformers.BertConfig(intermediate_size=16, **sizes) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    return transformers.EncoderDecoderModel(config=config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(  # type: ignore[call-arg]
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=VOCABULARY, hidden_size=8, n_layer=2, n_head=2, hidden_dropout=0.1
        )
    )


TWO_STACKS = {"t5": t5, "bart": bart, "encoder-decoder": encoder_decoder}
ONE_STACK: dict[str, Callable[[], nn.Module]] = {
    "albert, two groups": lambda: albert(2),
    "mixtral": mixtral,
    "bloom": bloom,
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield Ranks(rank=0, size=1, device=torch.device("cpu"))
    dist.destroy_process_group()


def loss(outputs: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["targets"].flatten())


def batches(two_stacks: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    names = ["input_ids", "decoder_input_ids"] if two_stacks else ["input_ids"]
    return [
        {name: torch.randint(0, VOCABULARY, (2, 5), generator=generator) for name in [*names, "targets"]}
        for _ in range(STEPS)
    ]


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make().double().train()
    forward = model.forward

    def without_targets(targets: Any = None, **inputs: Any) -> Any:
        return forward(**inputs)

    model.forward = without_targets
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def truth(make: Callable[[], nn.Module], two_stacks: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = made(make)
    losses = []
    for step, batch in enumerate(batches(two_stacks)):
        torch.manual_seed(step)
        total = loss(model(**batch), batch)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, model.state_dict()


def trained(
    make: Callable[[], nn.Module], two_stacks: bool, how: str, ranks: Ranks
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = made(make)
    caches.switch_off(model)
    reference = "test_recomputed_transformers:loss"
    goal = Objective(
        Job("j", "x:y", "x:y", reference, hparams=HParams(precision="float64")), model, ranks.device
    )
    if how == "recompute":
        recompute_blocks(model)
    parallel = Spilled(model, ranks, 2, None) if how == "spill" else Parallel(model, ranks)
    losses = []
    for step, batch in enumerate(batches(two_stacks)):
        torch.manual_seed(step)
        total, over = parallel.backward(goal, batch, 2, 0.5, True)
        parallel.finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / over).item())
    return losses, model.state_dict()


@pytest.mark.parametrize("how", ["recompute", "spill"])
@pytest.mark.parametrize("name", [*TWO_STACKS, *ONE_STACK])
def test_trains_as_a_plain_loop(ranks: Ranks, name: str, how: str) -> None:
    two_stacks = name in TWO_STACKS
    make = (TWO_STACKS | ONE_STACK)[name]
    losses, state = trained(make, two_stacks, how, ranks)
    true_losses, true_state = truth(make, two_stacks)
    assert losses == pytest.approx(true_losses, abs=1e-12)
    for key, value in state.items():
        torch.testing.assert_close(value, true_state[key], rtol=0, atol=1e-11, msg=key)


def test_a_block_that_all_layers_share_is_no_stack(ranks: Ranks) -> None:
    with pytest.raises(DoesNotFit, match="no repeated blocks"):
        trained(lambda: albert(1), False, "spill", ranks)
    assert trained(lambda: albert(1), False, "recompute", ranks)[0] == pytest.approx(
        truth(lambda: albert(1), False)[0], abs=1e-12
    )


def test_caches_are_off_in_every_part() -> None:
    model = encoder_decoder()
    model.decoder.config.use_cache = model.config.decoder.use_cache = True
    model.decoder.bert.encoder.use_cache = True
    caches.switch_off(model)
    assert not model.decoder.config.use_cache
    assert not model.config.decoder.use_cache
    assert not model.decoder.bert.encoder.use_cache
    own = nn.Linear(1, 1)
    own.use_cache = True  # type: ignore[assignment]
    caches.switch_off(own)
    assert own.use_cache


def test_a_model_that_hooks_itself_is_hooked_once_and_anew_when_resumed() -> None:
    """Transformers hooks a model when outputs of its layers are first asked for, and notes that it did."""
    cpu = torch.device("cpu")

    def states(model: nn.Module) -> int:
        return len(model(input_ids=torch.arange(5)[None], output_hidden_states=True).hidden_states)

    wanted = states(mixtral())
    looked_at, resumed = mixtral(), mixtral()
    attributes = ModelAttributes(looked_at, cpu)
    with ModuleState(looked_at.modules()).put_back():
        assert states(looked_at) == wanted
    assert states(looked_at) == wanted
    ModelAttributes(resumed, cpu).set(attributes.values()[0])
    assert states(resumed) == wanted
