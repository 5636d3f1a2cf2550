"""Networks of libraries: captured, and never found to have changed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness.optional import import_torchvision_first
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.look_steps import is_look_step

pytestmark = [pytest.mark.cuda, pytest.mark.draws]
STEPS, SUB_STEPS = 20, 6
CLASSES = 5


def of_vision(make):
    try:
        import_torchvision_first()
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # of another build of torch
        pytest.skip(f"torchvision: {error}")
    images = torch.randn(12, 3, 32, 32)
    return make(models), images, torch.arange(12) % CLASSES, nn.CrossEntropyLoss()


def resnet18(models):
    """A thin one: the widths are an eighth from the first block on."""

    class Thin(models.ResNet):
        def _make_layer(self, block, planes, *args, **options):
            return super()._make_layer(block, planes // 8, *args, **options)

    network = Thin(models.resnet.BasicBlock, [2, 2, 2, 2])
    network.fc = nn.Linear(64, CLASSES)
    return network


def convnext(models):
    block = models.convnext.CNBlockConfig
    blocks = [block(8, 16, 1), block(16, None, 1)]
    return models.ConvNeXt(blocks, 0.2, num_classes=CLASSES)


def of_language(config, model, **options):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, config)(vocab_size=64, **options)
    network = getattr(transformers, model)(config)
    words = torch.randint(2, 64, (12, 8))
    return network, {"input_ids": words, "labels": words}, None, None


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
NETWORKS = {
    "ResNet-18": lambda: of_vision(resnet18),
    "MobileNetV3": lambda: of_vision(
        lambda m: m.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25)
    ),
    "ViT": lambda: of_vision(
        lambda m: m.VisionTransformer(
            32, 8, 2, 2, 16, 32, dropout=0.1, num_classes=CLASSES
        )
    ),
    "ConvNeXt": lambda: of_vision(convnext),
    "DenseNet": lambda: of_vision(
        lambda m: m.DenseNet(4, (1, 2), 8, drop_rate=0.1, num_classes=CLASSES)
    ),
    "GPT-2": lambda: of_language(
        "GPT2Config", "GPT2LMHeadModel", n_layer=2, n_embd=16, n_head=2
    ),
    "BERT": lambda: of_language(
        "BertConfig", "BertForMaskedLM", intermediate_size=16, **SMALL
    ),
    "Llama": lambda: of_language(
        "LlamaConfig",
        "LlamaForCausalLM",
        intermediate_size=16,
        attention_dropout=0.1,
        **SMALL,
    ),
    "T5": lambda: of_language(
        "T5Config",
        "T5ForConditionalGeneration",
        decoder_start_token_id=0,
        pad_token_id=0,
        d_model=16,
        num_layers=2,
        d_ff=16,
        num_heads=2,
        d_kv=8,
    ),
}


def devices():
    """Two, because replicas beside the first have generators of their own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu:0", "cpu:1"]
    count = min(2, torch.accelerator.device_count())
    return [f"{accelerator.type}:{number}" for number in range(count)]


def without_draws(network):
    """The network, with dropout of no kind."""
    for module in network.modules():
        for name, value in vars(module).copy().items():
            is_rate = name == "p" or "drop" in name
            if is_rate and isinstance(value, float):
                setattr(module, name, 0.0)
    return network


def generator_states():
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states += torch.cuda.get_rng_state_all()
    return states


def trained(name, graphs, steps, *, with_draws):
    """Losses; parameters, buffers and generators after some steps; and what was said of
    graphs in each. With draws under autocast.
    """
    torch.manual_seed(1)
    network, inputs, targets, criterion = NETWORKS[name]()
    first = torch.device(devices()[0])
    network.to(first).train()
    if not with_draws:
        without_draws(network)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    losses, reports = [], []
    options = {"verify": False, "graphs": graphs}
    accum = SUB_STEPS // len(devices())
    before = generator_states()
    with ScatterOnceParallel(network, accum, devices(), **options) as engine:
        for step in range(steps):
            optimizer.zero_grad()
            # Other rows in each step.
            rows = copy.deepcopy(inputs)
            if isinstance(rows, dict):
                rows = {key: value.roll(step, 1) for key, value in rows.items()}
            with torch.autocast(first.type, torch.bfloat16, enabled=with_draws):
                losses.append(engine.forward_backward(rows, targets, criterion))
            optimizer.step()
            reports.append(engine.last_step.graphs)
    generators = generator_states()
    has_drawn = not all(map(torch.equal, before, generators))
    assert has_drawn == (with_draws and name != "ResNet-18")
    state = [*network.parameters(), *network.buffers()]
    return losses, state, generators, reports


@pytest.mark.slow
@pytest.mark.nullcuda
@pytest.mark.parametrize("with_draws", [False, True], ids=["bits", "draws, autocast"])
@pytest.mark.parametrize("name", NETWORKS)
def test_network_is_captured_and_stays(name, with_draws):
    """The bits are those without graphs; of draws on the simulated accelerator alone,
    because null GPUs draw other numbers in a graph, as many.
    """
    how = {"steps": STEPS, "with_draws": with_draws}
    try:
        *expected, _ = trained(name, False, **how)
    except RuntimeError as error:  # an operator that a simulated device has not
        pytest.skip(f"without graphs: {error}")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="graphs=True")
        *found, reports = trained(name, True, **how)
    # In the first steps of a process libraries may set flags of torch, which choose
    # kernels: a graph is captured again before such a step.
    assert all(report.endswith("sub-steps replayed") for report in reports), reports
    for step, report in enumerate(reports[5:], 6):
        # The last sub-step of one replica in turn, or of all.
        proved = len(devices()) if is_look_step(step) else 1
        replayed = f"{SUB_STEPS - proved} of {SUB_STEPS} sub-steps replayed"
        assert report == replayed, reports
    if with_draws and devices()[0].startswith("cuda"):
        found, expected = found[2:], expected[2:]
    for values, expected_values in zip(found, expected, strict=True):
        assert all(map(torch.equal, values, expected_values))


def of_padded_text(name, change=None):
    """The loss of the last of some steps of padded text, and what is said of graphs.

    ``change(network, inputs)``, before them, follows a remedy.
    """
    torch.manual_seed(1)
    network, inputs, *_ = NETWORKS[name]()
    network.to(devices()[0]).eval()  # without draws
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -2:] = 0
    inputs["attention_mask"] = mask
    if change is not None:
        change(network, inputs)
    options = {"verify": False, "graphs": True}
    accum = SUB_STEPS // len(devices())
    with ScatterOnceParallel(network, accum, devices(), **options) as engine:
        # In steps 1, 2 and 4, and in the first one after the capture, all are proved.
        losses = [engine.forward_backward(inputs) for _ in range(5)]
        return losses[-1], engine.last_step.graphs


def mask_of_four_dimensions(network, inputs):
    mask = inputs["attention_mask"][:, None, None] > 0
    if isinstance(network, of_transformers("LlamaForCausalLM")):
        length = mask.shape[-1]
        mask = mask & torch.ones(length, length, dtype=torch.bool).tril()
    inputs["attention_mask"] = mask


def of_transformers(name):
    return getattr(pytest.importorskip("transformers"), name)


def attention_written_out(network, _):
    network.set_attn_implementation("eager")


def no_mask(_, inputs):
    del inputs["attention_mask"]


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "words", "follow"),
    [
        ("BERT", "of four dimensions", mask_of_four_dimensions),
        slow("Llama", "of four dimensions", mask_of_four_dimensions),
        slow("Llama", '="eager" for decoders', attention_written_out),
        slow("BERT", "no attention_mask if no row is padded", no_mask),
    ],
)
def test_mask_read_on_the_host_has_a_remedy(name, words, follow):
    """transformers asks on the host whether a mask masks anything; no graph can."""
    with pytest.warns(match="graphs=True: .* it waits for the device") as told:
        expected, said = of_padded_text(name)
    assert said.startswith("eager: ")
    assert words in said
    assert words in str(told[0].message)
    loss, said = of_padded_text(name, follow)
    assert said == f"{SUB_STEPS - 1} of {SUB_STEPS} sub-steps replayed"
    assert follow is no_mask or torch.allclose(loss, expected, rtol=1e-5)
