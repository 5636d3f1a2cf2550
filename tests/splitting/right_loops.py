"""Right loops, which must pass. To add one, write a function here.

``@right(model, batch, **options)`` may stand before a function more than once.
"""

import contextlib
from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn
from splitting.loop_models import (
    Adversaries,
    Experts,
    Net,
    Recurrent,
    Tagger,
    average,
    backward_sums,
    balance,
    class_loss,
    embedded,
    gathered,
    images,
    info_nce,
    info_nce_of_pairs,
    is_last,
    net_with_norm,
    num_labels,
    num_rows,
    pairs,
    partly_unlabelled,
    policy_loss,
    rollouts,
    scripted_net,
    speech,
    speech_loss,
    standardised,
    token_loss,
    tokens,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, logsigmoid, normalize, softplus
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from scatterpar import Rows, ScatterOnceParallel


@dataclass
class Right:
    step: object
    model: object
    batch: object
    options: dict


RIGHT = {}
_USES = defaultdict(int)


def right(model, batch, **options):
    def add(step):
        _USES[step.__name__] += 1
        number = _USES[step.__name__]
        name = step.__name__ if number == 1 else f"{step.__name__}-{number}"
        RIGHT[name] = Right(step, model, batch, options)
        return step

    return add


def net_with_dropout():
    return nn.Sequential(nn.Linear(10, 8), nn.Dropout(0.5), nn.Linear(8, 4))


def sparse_tagger():
    model = Tagger()
    model.embedding.sparse = True
    return model


def frozen_net():
    model = Net()
    model.first.requires_grad_(False)
    return model


def net_with_lora():
    """peft's adapters: their second factors are zero at the start."""
    peft = pytest.importorskip("peft", reason="the extra `trl`")
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["first", "last"])
    return peft.get_peft_model(Net(), config)


class Pairs(nn.Module):
    """Embeddings, and the scale and bias of a loss of pairs."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.5, 0.5]))
        self.bias = nn.Parameter(torch.tensor([-1.0, -0.5, -0.5]))

    def forward(self, rows):
        return normalize(self.net(rows), dim=-1), self.scale.sum(), self.bias.sum()


def clamped_net():
    model = Net()
    model.first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


# --- one process ---


@right(Net, images)
@right(net_with_dropout, images)
@right(lambda: net_with_norm().eval(), images)
@right(lambda: nn.Sequential(weight_norm(nn.Linear(10, 4))), images)
@right(frozen_net, images)
@right(clamped_net, images)
@right(net_with_lora, images)
@right(lambda: Net().half(), lambda: (images()[0].half(), images()[1]))
def weighted_by_rows(model, batches):
    for batch in batches:
        loss = class_loss(model, batch) * len(batch[1]) / num_rows(batches)
        loss.backward()


@right(Tagger, tokens)
@right(lambda: Tagger(tied=True, dropout=0.2), tokens)
@right(sparse_tagger, tokens)
@right(lambda: Tagger().bfloat16(), tokens)
@right(Recurrent, tokens)
@right(Tagger, partly_unlabelled)
def sums_over_all_labels(model, batches):
    count = num_labels(batches)
    for batch in batches:
        (token_loss(model, batch, "sum") / count).backward()


@right(Net, images, equal=True)
def equal_parts(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()


@right(Net, images, equal=True, parts=4, loss=class_loss)
def constant_divisor_beside_the_loss(model, batches):
    for batch in batches:
        (class_loss(model, batch) / 4).backward()


@right(Net, images)
@right(Net, images, loss=class_loss)
def autocast_clipping_adamw_scheduler(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for pixels, classes in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(pixels), classes, reduction="sum")
        (loss / num_rows(batches)).backward()
    clip_grad_value_(model.parameters(), 1e-3)
    clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


@right(Net, images)
def optimizer_steps_after_four_parts(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(batches):
        (class_loss(model, batch, "sum") / num_rows(batches)).backward()
        if (number + 1) % 4 == 0:
            clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()


@right(Net, images)
def updated_by_hand(model, batches):
    backward_sums(model, batches)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()


with torch.random.fork_rng():
    trained_net = Net()
    sgd = torch.optim.SGD(trained_net.parameters(), 0.1, momentum=0.9)
    class_loss(trained_net, images()).backward()
    sgd.step()
    sgd.zero_grad()
scheduler = torch.optim.lr_scheduler.LambdaLR(sgd, lambda epoch: 0.5**epoch)
scaler = torch.amp.GradScaler("cpu")


@right(lambda: trained_net, images)
def optimizer_and_scaler_from_outside(model, batches):
    sgd.param_groups[0]["lr"] *= 0.5
    sgd.zero_grad()
    for batch in batches:
        loss = class_loss(model, batch, "sum") / num_rows(batches)
        scaler.scale(loss).backward()
    scaler.unscale_(sgd)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(sgd)
    scaler.update()
    scheduler.step()


@right(Net, images)
def clipped_and_then_scaled_and_decayed(model, batches):
    backward_sums(model, batches)
    clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5).add_(0.01 * parameter.detach())


@right(Net, images)
def clipped_and_then_centred(model, batches):
    """Into new tensors. The mean of a bias of classes is zero, but for rounding."""
    backward_sums(model, batches)
    clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        parameter.grad = parameter.grad - parameter.grad.mean()


@right(Net, images)
def clipped_before_other_gradients(model, batches):
    """What was clipped is gone when the next gradients are accumulated."""
    backward_sums(model, batches[:1])
    clip_grad_norm_(model.parameters(), 1.0)
    model.zero_grad()
    backward_sums(model, batches)


@right(Net, images)
def clipped_and_updated_by_hand(model, batches):
    backward_sums(model, batches)
    clip_grad_norm_(model.parameters(), 1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad.zero_()


@right(Net, images)
def closure_of_lbfgs(model, batches):
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        backward_sums(model, batches)
        return 0.0

    optimizer.step(closure)


@right(Net, images)
def matrices_and_vectors_apart(model, batches):
    for_matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim == 2], 0.1)
    for_vectors = torch.optim.AdamW([p for p in model.parameters() if p.ndim == 1])
    backward_sums(model, batches)
    for_matrices.step()
    for_matrices.zero_grad()
    for_vectors.step()
    for_vectors.zero_grad()


@right(Adversaries, images)
def two_optimizers_in_turn(model, batches):
    for_discriminator = torch.optim.Adam(model.discriminator.parameters())
    for_generator = torch.optim.Adam(model.generator.parameters())
    for pixels, _ in batches:
        generated = model.generator(pixels).detach()
        loss = softplus(-model.discriminator(pixels)).sum()
        loss = loss + softplus(model.discriminator(generated)).sum()
        (loss / num_rows(batches)).backward()
    for_discriminator.step()
    model.zero_grad()
    for pixels, _ in batches:
        loss = softplus(-model.discriminator(model.generator(pixels))).sum()
        (loss / num_rows(batches)).backward()
    for_generator.step()


@right(Net, pairs)
@right(Net, pairs, loss=info_nce_of_pairs)
def cached_contrastive_loss(model, batches):
    with torch.no_grad():
        firsts = torch.cat([model(first) for first, _ in batches])
        seconds = torch.cat([model(second) for _, second in batches])
    firsts.requires_grad_()
    seconds.requires_grad_()
    info_nce(firsts, seconds).backward()
    start = 0
    for first, second in batches:
        stop = start + len(first)
        (model(first) * firsts.grad[start:stop]).sum().backward()
        (model(second) * seconds.grad[start:stop]).sum().backward()
        start = stop


def sigmoid_loss(first, second, scale, bias, start=0):
    """SigLIP's sum over all pairs; the first row belongs to column ``start``."""
    labels = -torch.ones(len(first), len(second))
    rows = torch.arange(len(first))
    labels[rows, rows + start] = 1
    return -logsigmoid(labels * (scale * first @ second.T + bias)).sum()


@right(Pairs, pairs)
def sigmoid_loss_of_chunks(model, batches):
    """SigLIP without a gather: each part beside the embeddings of all rows."""
    count = num_rows(batches)
    seconds = torch.cat([model(second)[0] for _, second in batches])
    of_seconds = seconds.detach().requires_grad_()
    start = 0
    for rows, _ in batches:
        first, scale, bias = model(rows)
        loss = sigmoid_loss(first, of_seconds, scale, bias, start) / count
        loss.backward()
        start += len(first)
    seconds.backward(of_seconds.grad)


@right(Net, pairs)
def nt_xent_of_cached_views(model, batches):
    """GradCache: a loss of two views of all rows, and one backward pass per part."""
    views = [torch.cat(batch) for batch in batches]
    with torch.no_grad():
        chunks = [model(view).chunk(2) for view in views]
    firsts = torch.cat([first for first, _ in chunks]).requires_grad_()
    seconds = torch.cat([second for _, second in chunks]).requires_grad_()
    nt_xent(firsts, seconds).backward()
    start = 0
    for view in views:
        stop = start + len(view) // 2
        gradient = torch.cat([firsts.grad[start:stop], seconds.grad[start:stop]])
        model(view).backward(gradient)
        start = stop


def nt_xent(firsts, seconds):
    """SimCLR's loss: each view beside all other views of all rows."""
    outputs = normalize(torch.cat([firsts, seconds]), dim=-1)
    count = len(firsts)
    itself = torch.eye(2 * count, dtype=torch.bool)
    logits = (outputs @ outputs.T / 0.5).masked_fill(itself, -torch.inf)
    return cross_entropy(logits, torch.arange(2 * count).roll(count))


@right(Experts, images)
def balance_loss_of_all_rows(model, batches):
    for pixels, classes in batches:
        loss = cross_entropy(model(pixels)[0], classes, reduction="sum")
        (loss / num_rows(batches)).backward()
    with torch.no_grad():
        logits = torch.cat([model(pixels)[1] for pixels, _ in batches])
    logits.requires_grad_()
    (0.1 * balance(logits)).backward()
    gradients = logits.grad.split([len(pixels) for pixels, _ in batches])
    for (pixels, _), gradient in zip(batches, gradients, strict=True):
        model(pixels)[1].backward(gradient)


@right(Net, images)
def penalty_added_once(model, batches):
    backward_sums(model, batches)
    penalty = sum(p.square().sum() for p in model.parameters())
    (0.01 * penalty).backward()


@right(Net, images)
def checkpointed(model, batches):
    for pixels, classes in batches:
        outputs = checkpoint(model, pixels, use_reentrant=False)
        loss = cross_entropy(outputs, classes, reduction="sum") / num_rows(batches)
        loss.backward()


@right(Net, images)
def gradients_by_hand(model, batches):
    parameters = list(model.parameters())
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for batch in batches:
        loss = class_loss(model, batch, "sum") / num_rows(batches)
        gradients = torch.autograd.grad(loss, parameters)
        for total, gradient in zip(totals, gradients, strict=True):
            total += gradient
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = total


@right(Net, images)
def gradient_penalty_of_each_row(model, batches):
    for pixels, _ in batches:
        pixels.requires_grad_()
        (slope,) = torch.autograd.grad(model(pixels).sum(), pixels, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().sum()
        (penalty / num_rows(batches)).backward()


@right(Net, images)
def float32_written_in_the_code(model, batches):
    for pixels, classes in batches:
        loss = cross_entropy(model(pixels.float()), classes, reduction="sum")
        (loss / num_rows(batches)).backward()


@right(Net, images)
def cast_to_bfloat16(model, batches):
    for pixels, classes in batches:
        hidden = torch.relu(model.first(pixels)).bfloat16()
        outputs = nn.functional.linear(hidden, model.last.weight.bfloat16())
        loss = cross_entropy(outputs.float(), classes, reduction="sum")
        (loss / num_rows(batches)).backward()


@right(Net, images)
def noise_depth_and_time_steps(model, batches):
    for pixels, classes in batches:
        time = torch.randint(0, 100, (len(pixels), 1)) / 100
        is_kept = torch.rand(len(pixels), 1) < 0.9
        outputs = model(pixels + time * torch.randn_like(pixels)) * is_kept
        loss = cross_entropy(outputs, classes, reduction="sum") / num_rows(batches)
        loss.backward()


masks_of_noise = torch.Generator().manual_seed(5)


@right(Net, images)
@right(Net, images, ranks=2)
def masks_of_a_generator_outside(model, batches):
    for pixels, classes in batches:
        mask = torch.rand(pixels.shape, generator=masks_of_noise) < 0.8
        loss = cross_entropy(model(pixels * mask), classes, reduction="sum")
        (loss / num_rows(batches)).backward()
    if dist.is_initialized():
        average(model)


@right(Tagger, tokens)
def tokens_masked_in_the_step(model, batches):
    masks = [torch.rand(ids.shape) < 0.3 for ids, _ in batches]
    count = sum(mask.sum() for mask in masks)
    for (ids, _), mask in zip(batches, masks, strict=True):
        labels = ids.masked_fill(~mask, -100)
        masked = ids.masked_fill(mask, 0)
        (token_loss(model, (masked, labels), "sum") / count).backward()


@right(Net, images)
def mixed_rows(model, batches):
    for pixels, classes in batches:
        order = torch.randperm(len(pixels))
        mixed = 0.7 * pixels + 0.3 * pixels[order]
        loss = cross_entropy(model(mixed), classes, reduction="sum")
        (loss / num_rows(batches)).backward()


@right(Net, images)
def shuffled_loader(model, batches):
    for batch in batches:
        for few in DataLoader(TensorDataset(*batch), batch_size=2, shuffle=True):
            (class_loss(model, few, "sum") / num_rows(batches)).backward()


@right(Net, images)
def hooks_registered_in_the_step(model, batches):
    model.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    backward_sums(model, batches)


@right(Net, speech, equal=True)
def means_of_ctc_losses(model, batches):
    for batch in batches:
        (speech_loss(model, batch) / len(batches)).backward()


@right(Tagger, rollouts)
def advantages_of_all_rows(model, batches):
    count = sum(mask.sum() for _, mask, _, _ in batches)
    advantages = standardised(torch.cat([rewards for _, _, rewards, _ in batches]))
    of_parts = advantages.split([len(ids) for ids, _, _, _ in batches])
    for batch, advantages_of_part in zip(batches, of_parts, strict=True):
        (policy_loss(model, batch, advantages_of_part) / count).backward()


@right(Net, images)
def compiled_model(model, batches):
    compiled = torch.compile(model, backend="eager")
    backward_sums(compiled, batches)


@right(Net, lambda: {"pixels": images()[0], "classes": images()[1], "name": "train"})
def batches_are_mappings(model, batches):
    count = sum(len(batch["classes"]) for batch in batches)
    for batch in batches:
        loss = cross_entropy(model(batch["pixels"]), batch["classes"], reduction="sum")
        (loss / count).backward()


def lists_of_images():
    pixels, _ = images()
    sizes = [1 + row % 5 for row in range(16)]
    return Rows([pixels[:size] for size in sizes])


@right(Net, lists_of_images)
def rows_of_several_sizes(model, batches):
    count = sum(len(rows) for rows in batches)
    for rows in batches:
        loss = sum(model(pixels).square().mean() for pixels in rows)
        (loss / count).backward()


@right(lambda: nn.Linear(10, 4, dtype=torch.complex64), images)
def complex_numbers(model, batches):
    for pixels, _ in batches:
        outputs = model(pixels.to(torch.complex128))
        (outputs.abs().square().sum() / num_rows(batches)).backward()


# --- the engine ---


@right(Net, images)
@right(Net, images, loss=class_loss)
def engine_in_the_step(model, batches):
    pixels = torch.cat([pixels for pixels, _ in batches])
    classes = torch.cat([classes for _, classes in batches])
    with ScatterOnceParallel(model, len(batches), ["cpu"] * 2) as engine:
        engine.forward_backward(pixels, classes, cross_entropy)


@right(Net, images, ranks=2)
def engine_on_ranks(model, batches):
    ((pixels, classes),) = batches
    group = dist.group.WORLD
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, process_group=group) as engine:
        engine.forward_backward(pixels, classes, cross_entropy)


# --- ranks ---


@right(Net, images, ranks=2, parts=3)
@right(net_with_dropout, images, ranks=2, parts=3)
def no_sync_until_the_last_part(model, batches):
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for number, batch in enumerate(batches):
        waits = is_last(number, batches)
        with contextlib.nullcontext() if waits else parallel.no_sync():
            (class_loss(parallel, batch, "sum") / num_rows(batches)).backward()
    clip_grad_norm_(parallel.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


@right(Tagger, tokens, ranks=2, parts=3)
@right(Tagger, tokens, ranks=2, parts=3, equal=False)
def global_count_times_ranks(model, batches):
    count = num_labels(batches)
    dist.all_reduce(count)
    parallel = DistributedDataParallel(model)
    for batch in batches:
        loss = token_loss(parallel, batch, "sum") * dist.get_world_size() / count
        loss.backward()


@right(Net, images, ranks=3)
@right(lambda: net_with_norm().eval(), images, ranks=2)
def plain_ddp(model, batches):
    parallel = DistributedDataParallel(model, static_graph=True)
    for batch in batches:
        class_loss(parallel, batch).backward()


@right(Net, pairs, ranks=2)
def contrastive_loss_times_ranks(model, batches):
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    loss = info_nce(gathered(first), gathered(second))
    (loss * dist.get_world_size()).backward()


def of_all_ranks(rows):
    """The rows of all ranks, each with its gradient."""
    return torch.cat(torch.distributed.nn.all_gather(rows))


@right(Net, pairs, ranks=2)
def contrastive_loss_gathered_with_gradient(model, batches):
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    info_nce(of_all_ranks(first), of_all_ranks(second)).backward()


@right(Pairs, pairs, ranks=2)
def sigmoid_loss_gathered_with_gradient(model, batches):
    parallel = DistributedDataParallel(model)
    outputs, scale, bias = parallel(torch.cat(batches[0]))
    first, second = outputs.chunk(2)
    seconds = of_all_ranks(second)
    start = len(first) * dist.get_rank()
    (sigmoid_loss(first, seconds, scale, bias, start) / len(first)).backward()


@right(Pairs, pairs, ranks=2)
def clip_loss_gathered_with_gradient(model, batches):
    """CLIP with a local loss: rows of this rank beside columns of all."""
    parallel = DistributedDataParallel(model)
    outputs, scale, bias = parallel(torch.cat(batches[0]))
    first, second = outputs.chunk(2)
    labels = torch.arange(len(first)) + len(first) * dist.get_rank()
    loss = 0
    for rows, columns in ((first, second), (second, first)):
        others = of_all_ranks(columns)
        loss = loss + cross_entropy(scale * rows @ others.T + bias, labels) / 2
    loss.backward()


@right(Net, pairs, ranks=2)
def nt_xent_gathered_with_gradient(model, batches):
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    nt_xent(of_all_ranks(first), of_all_ranks(second)).backward()


def net_for_metric_loss():
    pytest.importorskip("pytorch_metric_learning")
    return Net()


@right(net_for_metric_loss, images, ranks=2)
def metric_loss_in_its_wrapper(model, batches):
    """pytorch-metric-learning gathers embeddings, and multiplies by the ranks."""
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils import distributed as wrappers

    criterion = wrappers.DistributedLossWrapper(losses.ContrastiveLoss())
    parallel = DistributedDataParallel(model)
    ((pixels, classes),) = batches
    criterion(parallel(pixels), classes).backward()


@right(Net, images, ranks=2)
def margin_loss_times_ranks(model, batches):
    """The same in plain torch: all distances, of which this rank's have a gradient."""
    parallel = DistributedDataParallel(model)
    ((pixels, classes),) = batches
    outputs = gathered(parallel(pixels))
    is_alike = gathered_labels(classes)[:, None] == gathered_labels(classes)
    distances = (outputs[:, None] - outputs).square().sum(-1)
    losses = torch.where(is_alike, distances, (2 - distances).clamp_min(0))
    (losses.mean() * dist.get_world_size()).backward()


def gathered_labels(classes):
    of_ranks = [torch.empty_like(classes) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, classes.contiguous())
    return torch.cat(of_ranks)


@right(Tagger, tokens, ranks=2, parts=3)
def summed_by_hand(model, batches):
    count = num_labels(batches)
    dist.all_reduce(count)
    for batch in batches:
        token_loss(model, batch, "sum").backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= count


@right(scripted_net, images)
def scripted_model(model, batches):
    backward_sums(model, batches)


@right(Net, images)
def weights_perturbed_by_all_parts(model, batches):
    """SAM as it should be: both passes are over all parts."""
    backward_sums(model, batches)
    steps = [0.05 * parameter.grad for parameter in model.parameters()]
    parameters = [parameter.data for parameter in model.parameters()]
    torch._foreach_add_(parameters, steps)
    model.zero_grad()
    backward_sums(model, batches)
    torch._foreach_sub_(parameters, steps)


@right(Net, images, ranks=2)
def group_destroyed_by_the_step(model, batches):
    backward_sums(model, batches)
    average(model)
    dist.destroy_process_group()


@right(Net, images, ranks=2)
def sharded_optimizer(model, batches):
    parallel = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam)
    backward_sums(parallel, batches)
    optimizer.step()


@right(Net, images, ranks=2)
def sharded_parameters(model, batches):
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    backward_sums(model, batches)
    clip_grad_norm_(model.parameters(), 1.0)
