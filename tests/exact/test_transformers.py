"""Models of the transformers library, tiny and without weights to download, through the
engine.
"""

import pytest
import torch
from harness.models import Of
from harness.oracle import assert_alike, assert_close, assert_step, build, randint
from harness.tiny_transformers import tiny_config
from torch import nn

from scatterpar import ScatterOnceParallel

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH = 50, 7


def gpt2():
    model = build(lambda: transformers.GPT2LMHeadModel(tiny_config("GPT2"))).train()
    model.loss_function = causal_loss
    return model


def causal_loss(logits, labels, vocab_size, **kwargs):
    """The library's own, but in float64: it goes down to float32 whatever the model's
    dtype.
    """
    return nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])


def token_ids(rows):
    return randint(VOCABULARY, rows, LENGTH)


def test_gpt2_hidden_states_in_every_step(devices):
    """The library installs its hooks lazily: in shared dictionaries replicas stacked
    them.
    """
    model = gpt2()
    ids = token_ids(6)
    batch = {"input_ids": ids, "labels": ids, "output_hidden_states": True}
    hooks = [len(module._forward_hooks) for module in model.modules()]
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        for _ in range(3):
            _, outputs = engine.forward_backward(batch, return_outputs=True)
            assert [len(output.hidden_states) for output in outputs] == [3, 3]
            assert [len(module._forward_hooks) for module in model.modules()] == hooks
        assert_step(engine, batch)
    with torch.no_grad():
        expected = model(**batch).hidden_states
    for share, output in enumerate(outputs):
        for layer, state in enumerate(output.hidden_states):
            assert_close(
                state, expected[layer][share * 3 : share * 3 + 3], f"layer {layer}"
            )


def test_gpt2_outputs_keep_library_type(devices):
    model = gpt2().eval()
    ids = token_ids(5)
    with ScatterOnceParallel(model, 2, devices(2)) as engine, torch.no_grad():
        output = engine(input_ids=ids, output_hidden_states=True)
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True)
    assert_alike(output, expected)
    assert_alike(output[0], expected[0])


def test_key_value_cache_is_joined(devices):
    """The output had a list of caches. As an input, every replica got
    the whole cache.
    """
    model = gpt2().eval()
    ids, more = token_ids(5), randint(VOCABULARY, 5, 2, seed=3)
    with ScatterOnceParallel(model, 2, devices(2)) as engine, torch.no_grad():
        for rows in (5, 1):
            outputs = [
                call(input_ids=ids[:rows], use_cache=True) for call in (engine, model)
            ]
            caches = [output.past_key_values for output in outputs]
            assert type(caches[0]) is type(caches[1])
            for mine, its in zip(*(cache.layers for cache in caches), strict=True):
                assert_close(mine.keys, its.keys, "keys")
                assert_close(mine.values, its.values, "values")
            mine = engine(input_ids=more[:rows], past_key_values=caches[0]).logits
            its = model(input_ids=more[:rows], past_key_values=caches[1]).logits
            assert_close(mine, its, "the tokens that follow")


def test_router_loss_over_whole_batch_exact(devices):
    """The router's logits have the tokens of all rows in one dimension: a module around
    the model gives them one per row, as the error says.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    def criterion(output, labels):
        logits, router_logits = output
        flat = tuple(layer.flatten(0, 1) for layer in router_logits)
        balance = load_balancing_loss_func(flat, 4, 2)
        return causal_loss(logits, labels, None) + 0.1 * balance

    def forward(module, input_ids):
        output = module.model(input_ids)
        rows = len(input_ids)
        layers = [layer.reshape(rows, -1, 4) for layer in output.router_logits]
        return output.logits, tuple(layers)

    ids, config = token_ids(7), tiny_config("Mixtral")
    config.output_router_logits = True
    model = build(
        lambda: Of(forward, model=transformers.MixtralForCausalLM(config))
    ).train()
    with ScatterOnceParallel(model.model, 2, devices(2)) as engine:
        refused = pytest.raises(ValueError, match=r"\.reshape\(rows, 7, …\)")
        with refused:
            engine.forward_backward(
                {"input_ids": ids},
                ids,
                lambda output, _: output.router_logits[0].mean(),
                whole_batch=True,
            )
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        assert_step(engine, {"input_ids": ids}, ids, criterion, whole_batch=True)
