"""A pytest plugin: TRL's and sentence-transformers' own tests, with their trainers or with ours.

They ask the hub for tiny models and data. Here these come from a folder: models of the same kinds
with weights of our own, and the sentences that TRL's script makes. What else they ask for is not
there, and fails for both. From this repository's ``tests``, with a clone in ``build/trl``::

    PEERS_REPLICAS=2 python -m pytest -p peers.trainers -c /dev/null -m "not slow" \\
        --rootdir ../build/trl ../build/trl/tests/test_reward_trainer.py

Without ``PEERS_REPLICAS`` the stock trainers run. The suite does not collect this.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HUB = Path(tempfile.mkdtemp(prefix="peers"))
os.environ.update(HF_HOME=str(HUB), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TRL_TELEMETRY="0")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

REPLICAS = int(os.environ.get("PEERS_REPLICAS", "0"))
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"vocab_size": 400, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
CAUSAL = {"tiny-Qwen2ForCausalLM-2.5": "Qwen2", "tiny-Qwen3ForCausalLM": "Qwen3"}
CAUSAL |= {"tiny-LlamaForCausalLM-3.2": "Llama", "tiny-MistralForCausalLM-0.2": "Mistral"}
SCORING = {"tiny-Qwen2ForSequenceClassification-2.5": "Qwen2"}
SCORING |= {"tiny-Qwen3ForSequenceClassification": "Qwen3"}
EMBEDDING = ("sentence-transformers-testing", "stsb-bert-tiny-safetensors")
RERANKING = ("cross-encoder-testing", "reranker-bert-tiny-gooaq-bce")


DATA: dict[str, Any] = {}
LOAD = datasets.load_dataset


def similar(count: int) -> datasets.Dataset:
    rows = [(f"A man number {i} plays.", f"Number {i % 7} plays.", i % 5 / 5) for i in range(count)]
    one, two, score = map(list, zip(*rows, strict=True))
    return datasets.Dataset.from_dict({"sentence1": one, "sentence2": two, "score": score})


def offline(path: str, name: str | None = None, *args: Any, **options: Any) -> Any:
    """``load_dataset``, as conftests import it before anything is configured."""
    split = options.get("split")
    if path == "sentence-transformers/stsb":
        splits = {"train": 1000, "validation": 200, "test": 200}
        found = datasets.DatasetDict({part: similar(n) for part, n in splits.items()})
        return found[split] if split else found
    if path != "trl-internal-testing/zen":
        return LOAD(path, name, *args, **options)
    found = DATA[name or "standard_language_modeling"]
    found = found[split] if split else found
    return found.to_iterable_dataset() if options.get("streaming") and split else found


datasets.load_dataset = offline


def place_of(owner: str, name: str) -> Path:
    """Where the hub's library keeps a model that it has fetched."""
    home = HUB / "hub" / f"models--{owner}--{name}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    return home / "snapshots" / ("0" * 40)


def tokenizer(texts: list[str], *special: str, chat: str | None = None) -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 400, "special_tokens": list(special), "initial_alphabet": letters}
    words.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(**options))
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=special[0], eos_token=special[1], unk_token=special[0]
    )
    made.chat_template = chat
    return made


def make_models(texts: list[str]) -> None:
    chatting = tokenizer(texts, "<|endoftext|>", "<|im_end|>", "<|im_start|>", chat=CHAT)
    pad = {"pad_token_id": chatting.pad_token_id, "eos_token_id": chatting.eos_token_id}
    for names, head, more in (
        (CAUSAL, "CausalLM", {}),
        (SCORING, "SequenceClassification", {"num_labels": 1}),
    ):
        for name, kind in names.items():
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(**SIZES, **pad, **more)
            place = place_of("trl-internal-testing", name)
            getattr(transformers, f"{kind}For{head}")(config).save_pretrained(place)
            chatting.save_pretrained(place)
    plain = tokenizer(texts, "[PAD]", "[SEP]", "[CLS]")
    plain.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    bert = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"} | {"hidden_size": 128}
    plain.save_pretrained(place_of("google-bert", "bert-base-uncased"))
    for owner, name in (EMBEDDING, RERANKING):
        torch.manual_seed(0)
        place = place_of(owner, name)
        config = transformers.BertConfig(**bert, num_labels=1)
        transformers.BertForSequenceClassification(config).save_pretrained(place)
        plain.save_pretrained(place)


def zen(tests: Path) -> dict[str, Any]:
    """What TRL's own script would send to the hub."""
    made: dict[str, Any] = {}
    script = tests.parent / "scripts" / "generate_zen_dataset.py"
    if not script.is_file():
        return made
    spec = importlib.util.spec_from_file_location("zen", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zen"] = module
    spec.loader.exec_module(module)

    def keep(data: Any, repo: str, config_name: str) -> None:
        made[config_name] = data

    for cls in (datasets.Dataset, datasets.DatasetDict):
        cls.push_to_hub = keep
    module.main(0.1, True, "zen")
    return made


def pytest_configure(config: Any) -> None:
    if importlib.util.find_spec("trl"):  # its tests ask an earlier version what is installed
        vars(importlib.import_module("trl.import_utils"))["is_joblib_available"] = lambda: False
        own = vars(importlib.import_module("trl.trainer.sft_trainer"))
        for gone in ("_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss"):
            own.setdefault(gone, None)
    tests = (
        next((p for p in map(Path, config.args) if p.suffix == ".py"), Path.cwd()).resolve().parent
    )
    DATA.update(zen(tests))
    parts = DATA.get("standard_language_modeling", {"train": {"text": ["A man is eating food."]}})
    make_models([text for part in parts.values() for text in part["text"]])
    if REPLICAS:
        put_ours()


def put_ours() -> None:
    """Ours in the place of the stock trainers, before a test imports them."""
    from scatterpar.integrations.transformers import ScatterOnceMixin

    def ours(cls: type, mixin: type) -> Any:
        def start(self: Any, *args: Any, **options: Any) -> None:
            super(made, self).__init__(*args, device_ids=["cpu"] * REPLICAS, **options)

        body = {"__init__": start, "__module__": cls.__module__}
        made: Any = type(cls.__name__, (mixin,) if issubclass(mixin, cls) else (mixin, cls), body)
        return made

    if importlib.util.find_spec("trl"):
        import trl

        for name in ("SFT", "DPO", "KTO", "Reward", "RLOO", "GRPO"):
            stock = getattr(trl, f"{name}Trainer")
            for home in (trl, trl.trainer, sys.modules[stock.__module__]):
                setattr(home, stock.__name__, ours(stock, ScatterOnceMixin))
    if importlib.util.find_spec("sentence_transformers"):
        import sentence_transformers as st

        from scatterpar.integrations import sentence_transformers as mine

        for name, mixin in (
            ("SentenceTransformerTrainer", mine.ScatterOnceTrainer),
            ("CrossEncoderTrainer", mine.ScatterOnceCrossEncoderTrainer),
        ):
            made = ours(getattr(st, name), mixin)
            setattr(st, name, made)
            home = st.cross_encoder if "Cross" in name else st.sentence_transformer
            setattr(home, name, made)
