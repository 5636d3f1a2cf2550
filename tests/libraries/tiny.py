"""Random models of transformers, of one small layer."""

import transformers

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


def llama(**changes):
    sizes = {**SIZES, "num_key_value_heads": 2, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def bert():
    config = transformers.BertConfig(**SIZES, num_labels=3)
    return transformers.BertForSequenceClassification(config)
