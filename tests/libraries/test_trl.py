"""TRL's trainers below the mixin, beside the stock ones on one device with the rows of
all devices per call. TRL computes in float32 in places.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from harness.oracle import seeded
from harness.pages import example
from harness.trainers import (
    QUIET,
    VOCABULARY,
    assert_same_run,
    language_model,
    moved,
    quietly,
    sentences,
    tokenizer,
)

from scatterpar.integrations.transformers import ScatterOnceMixin

trl = pytest.importorskip("trl", reason="TRL's trainers: pip install '.[trl]'")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

# TRL takes ten seconds to import what a trainer needs.
pytestmark = [pytest.mark.trainers, pytest.mark.draws, pytest.mark.slow]
ROWS = 14  # in steps of 8: the last one is ragged
LOGGED = 1e-4  # relative: TRL computes some of what it logs in float32
COMMON = QUIET | {"learning_rate": 1e-2, "warmup_steps": 1, "bf16": False}
COMMON |= {"activation_checkpointing": False, "gradient_accumulation_steps": 2}
LAYOUTS = {"shared": ["cpu"] * 2, "virtual": ["cpu:0", "cpu:1"]}


def tokens():
    return tokenizer(eos_token="1", padding_side="left")


def text(row):
    return " ".join(map(str, row["input_ids"]))


def preferences(**more):
    rows = sentences(2 * ROWS)
    made = []
    for number, (chosen, rejected) in enumerate(
        zip(rows[:ROWS], rows[ROWS:], strict=True)
    ):
        row = {"prompt": "3 4", "chosen": f" {text(chosen)}"}
        row["rejected"] = f" {text(rejected)}"
        made.append(row | {name: make(number) for name, make in more.items()})
    return datasets.Dataset.from_list(made)


def texts():
    return datasets.Dataset.from_list([{"text": text(row)} for row in sentences(ROWS)])


def completions():
    made = []
    for number, row in enumerate(sentences(ROWS)):
        row = {"prompt": "3 4", "completion": " " + text(row)}
        made.append(row | {"label": number % 3 != 0})
    return datasets.Dataset.from_list(made)


def prompts():
    return datasets.Dataset.from_list(
        [{"prompt": text(row)} for row in sentences(ROWS)]
    )


def lora():
    with seeded():
        config = peft.LoraConfig(
            r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
        )
        return peft.get_peft_model(language_model(), config).double()


def experts():
    """A mixture of experts. TRL adds its load-balancing loss by default."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8}
    parts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    words = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    with seeded():
        config = transformers.Qwen3MoeConfig(
            experts_implementation="eager", **sizes, **parts, **words
        )
        return transformers.Qwen3MoeForCausalLM(config).double()


def scorer():
    with seeded():
        config = language_model().config
        config.num_labels, config.pad_token_id = 1, 0
        return transformers.GPT2ForSequenceClassification(config).double()


def rewards(completions, **_):
    """The share of words with an even number."""
    return [
        sum(int(word) % 2 == 0 for word in words.split()) / max(1, len(words.split()))
        for words in completions
    ]


GENERATED = {"max_completion_length": 4, "num_generations": 4, "temperature": 0.7}
# By name: options, the model, the rows, and what else the trainer takes.
CASES = {
    "SFT": ({}, language_model, texts, {}),
    "SFT packed": (
        {"packing": True, "max_length": 12, "packing_strategy": "bfd"},
        language_model,
        texts,
        {},
    ),
    "SFT smoothed": ({"label_smoothing_factor": 0.1}, language_model, texts, {}),
    "SFT of experts": ({"router_aux_loss_coef": 0.0}, experts, texts, {}),
    "DPO": ({}, language_model, preferences, {"ref_model": True}),
    "DPO LoRA": ({}, lora, preferences, {}),
    "DPO LoRA recomputed": ({"activation_checkpointing": True}, lora, preferences, {}),
    "DPO aot": ({"loss_type": "aot"}, language_model, preferences, {"ref_model": True}),
    "Reward": (
        {"center_rewards_coefficient": 0.1},
        scorer,
        lambda: preferences(margin=lambda number: number / 10),
        {},
    ),
    "KTO": ({}, language_model, completions, {"ref_model": True}),
    "GRPO": (GENERATED, language_model, prompts, {"reward_funcs": rewards}),
    "GRPO, two iterations": (
        GENERATED | {"num_iterations": 2},
        language_model,
        prompts,
        {"reward_funcs": rewards},
    ),
}


def made(name, folder, devices, **changes):
    options, model, rows, extra = CASES[name]
    kind = name.split(",")[0].split()[0]
    cls = getattr(trl, f"{kind}Trainer")
    config = getattr(trl, f"{kind}Config")
    extra = dict(extra)
    if extra.pop("ref_model", False):
        extra["ref_model"] = moved(language_model())
    if devices:
        extra["device_ids"] = devices
        cls = type(cls.__name__, (ScatterOnceMixin, cls), {})
    size = 2 if devices else 4
    sizes = {f"per_device_{part}_batch_size": size for part in ("train", "eval")}
    options = COMMON | sizes | options | changes
    with seeded():
        return cls(
            model=model(),
            args=config(output_dir=str(folder), **options),
            train_dataset=rows(),
            processing_class=tokens(),
            **extra,
        )


def trained(name, folder, devices, **changes):
    trainer = made(name, folder, devices, **changes)
    with seeded():
        quietly(trainer.train)
    return trainer


@pytest.mark.filterwarnings("ignore:generate runs on the first device:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_run_equals_stock_trainer(tmp_path, name, layout, divided_calls):
    """The parameters, and every number that TRL logs."""
    ours = trained(name, tmp_path, LAYOUTS[layout])
    assert divided_calls
    stock = trained(name, tmp_path, None)
    # TRL sums float32 numbers, in which rounding differs.
    assert_same_run(ours, stock, 1e-5, logged=LOGGED)
    start = dict(CASES[name][1]().named_parameters())
    assert any(
        not torch.equal(start[key], parameter)
        for key, parameter in ours.model.named_parameters()
    )


def test_load_balancing_loss_raises(tmp_path):
    """It is a product of two means over all tokens of a batch."""
    case = ("SFT of experts", tmp_path, LAYOUTS["virtual"])
    trainer = made(*case, router_aux_loss_coef=0.1)
    with pytest.raises(ValueError, match=r"loss .* is not the sum of the losses"):
        quietly(trainer.train)


def test_evaluation_equals_stock(tmp_path):
    results = []
    for devices in (LAYOUTS["virtual"], None):
        trainer = made("SFT", tmp_path, devices)
        results.append(quietly(trainer.evaluate, trainer.train_dataset))
    ours, stock = results
    for key in stock:
        if "loss" in key or "accuracy" in key:
            assert ours[key] == pytest.approx(stock[key], rel=LOGGED), key


def test_rows_of_generation_are_those_of_one_device(tmp_path):
    ours = made("GRPO", tmp_path, LAYOUTS["virtual"])
    stock = made("GRPO", tmp_path, None)
    for name in ("generation_batch_size", "steps_per_generation"):
        assert getattr(ours.args, name) == getattr(stock.args, name)


def test_example_runs_as_it_stands(tmp_path, monkeypatch):
    script = example("dpo_lora")
    monkeypatch.setattr(
        "sys.argv", ["dpo_lora.py", "--tiny", "--output", str(tmp_path)]
    )
    quietly(script.main)
    assert any(tmp_path.glob("*.json"))
