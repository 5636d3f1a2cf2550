"""Wrong loops, most of them after public bugs. To add one, write a function here.

``@wrong(cause, model, batch, *words, **options)`` says what ``splitcheck`` must name, and
words of its report.
"""

import contextlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.nn
from splitting.loop_models import (
    Adversaries,
    Centred,
    Experts,
    Net,
    Scaled,
    Tagger,
    TwoHeads,
    WithTeacher,
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
    more_images,
    more_tokens,
    net_with_norm,
    new,
    num_labels,
    num_rows,
    pairs,
    partly_unlabelled,
    policy_loss,
    rollouts,
    speech,
    speech_loss,
    standardised,
    token_loss,
    tokens,
)
from torch.nn.functional import cross_entropy, kl_div, mse_loss, normalize, softplus
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


@dataclass
class Wrong:
    step: object
    model: object
    batch: object
    cause: str
    words: tuple
    options: dict = field(default_factory=dict)


WRONG = {}


def wrong(cause, model, batch, *words, **options):
    def add(step):
        WRONG[step.__name__] = Wrong(step, model, batch, cause, words, options)
        return step

    return add


# --- weights of parts ---


@wrong("mean of means", Tagger, tokens, "by their labels that are not -100")
def token_means_of_means(model, batches):  # karpathy/nanochat#400
    for batch in batches:
        (token_loss(model, batch) / len(batches)).backward()


@wrong("other weights", Tagger, tokens, "by their rows", "labels that are not -100")
def token_means_by_rows_of_a_known_batch(model, batches):
    """The gradient of a part by itself has its weight, too."""
    for batch in batches:
        (token_loss(model, batch) * len(batch[1]) / 64).backward()


@wrong(
    "other weights",
    Tagger,
    tokens,
    "by their labels that are not -100",
    "by their rows",
)
def row_means_by_labels_of_a_known_batch(model, batches):
    for ids, labels in batches:
        logits = model(ids).square().mean()
        (logits * (labels != -100).sum() / 100).backward()


@wrong("mean of means", Net, images, "by their rows", "equal=True")
def uneven_last_batch(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()


@wrong("mean of means", Tagger, partly_unlabelled, "labels that are not -100")
def a_part_without_labels_counts_as_one(model, batches):
    for batch in batches:
        (token_loss(model, batch) / len(batches)).backward()


@wrong("mean of means", Net, images)
def class_weights_in_each_part(model, batches):
    weights = torch.tensor([1.0, 5.0, 0.2, 2.0])
    for pixels, classes in batches:
        loss = cross_entropy(model(pixels), classes, weight=weights)
        (loss / len(batches)).backward()


@wrong("mean of means", Net, images, "by their rows")
def distillation_with_batchmean(model, batches):
    teacher = torch.full((4,), 0.25)
    for pixels, _ in batches:
        student = model(pixels).log_softmax(-1)
        loss = kl_div(student, teacher.expand_as(student), reduction="batchmean")
        (loss / len(batches)).backward()


@wrong("mean of means", Net, images, "entries that are not 0")
def normalised_by_positives_of_a_part(model, batches):
    for pixels, classes in batches:
        losses = cross_entropy(model(pixels), classes, reduction="none")
        is_positive = classes > 0
        loss = losses[is_positive].sum() / is_positive.sum().clamp_min(1)
        (loss / len(batches)).backward()


@wrong("mean of means", Net, speech, "sum of batch[2]", equal=True)
def ctc_losses_over_the_frames_of_a_part(model, batches):
    for batch in batches:
        loss = speech_loss(model, batch, "sum") / batch[2].sum()
        (loss / len(batches)).backward()


def targets_and_mask():
    """Targets whose last channel is a mask: no tensor counts it alone."""
    ids, labels = tokens()
    return ids, torch.stack([labels.abs() % 7 + 1.0, labels != -100], -1)


@wrong("mean of means", Tagger, targets_and_mask, "no tensor of the batch shows")
def mask_in_a_channel_of_the_targets(model, batches):
    for ids, targets in batches:
        values, mask = targets.unbind(-1)
        losses = (model(ids).mean(-1) - values).square() * mask
        (losses.sum() / mask.sum() / len(batches)).backward()


@wrong("other weights", Net, images, "a running divisor")
def divided_by_a_running_count(model, batches):
    """As detectors divide by a moving average of the objects in a batch."""
    count = 10.0
    for pixels, classes in batches:
        count = 0.9 * count + 0.1 * (classes > 1).sum()
        (class_loss(model, (pixels, classes), "sum") / count).backward()


@wrong("sum of means", Net, images, "loss=", "len(batches)")
def not_divided(model, batches):
    for batch in batches:
        class_loss(model, batch).backward()


@wrong("other weights", Tagger, tokens, "weighs the parts by their rows")
def rows_in_place_of_labels(model, batches):
    count = num_rows(batches)
    for batch in batches:
        (token_loss(model, batch) * len(batch[1]) / count).backward()


@wrong("other weights", Net, images, "root")
def root_mean_square_of_each_part(model, batches):
    for pixels, classes in batches:
        loss = mse_loss(model(pixels)[:, 0], classes.to(pixels.dtype)).sqrt()
        (loss * len(classes) / num_rows(batches)).backward()


@wrong("other weights", Net, images, "by 0.5", "once, after the last backward()")
def clipped_after_each_part(model, batches):
    for batch in batches:
        (class_loss(model, batch, "sum") / num_rows(batches)).backward()
        clip_grad_norm_(model.parameters(), 1e-2)


@wrong("other weights", Net, images, "by 0.25", "once, after the last backward()")
def divided_again_after_each_part(model, batches):
    for batch in batches:
        class_loss(model, batch).backward()
        for parameter in model.parameters():
            parameter.grad /= len(batches)


@wrong("only some parts", Net, images)
def zero_grad_in_the_inner_loop(model, batches):
    for batch in batches:
        model.zero_grad()
        (class_loss(model, batch, "sum") / num_rows(batches)).backward()


@wrong("only some parts", Net, images)
def optimizer_steps_after_two_parts(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    for number, batch in enumerate(batches):
        (class_loss(model, batch, "sum") / num_rows(batches)).backward()
        if number % 2 == 1 or len(batches) == 1:
            optimizer.step()
            optimizer.zero_grad()


@wrong("only some parts", Net, images, "equally (1, 0, 0, 0)")
def optimizer_steps_after_each_part(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        class_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@wrong("only some parts", Net, images, parts=5)
def last_part_is_dropped(model, batches):
    used = batches[: max(1, len(batches) // 2 * 2)]
    for batch in used:
        (class_loss(model, batch, "sum") / num_rows(used)).backward()


@wrong("running sum", Net, images)
def backward_on_a_running_sum(model, batches):
    total = 0
    for batch in batches:
        total = total + class_loss(model, batch, "sum") / num_rows(batches)
        total.backward(retain_graph=True)


# --- a constant factor ---


@wrong("constant factor", Net, images, "0.25 times", "number of parts once too often")
def sums_divided_by_the_parts(model, batches):
    backward_sums(model, batches, num_rows(batches) * len(batches))


@wrong("constant factor", Net, images, "0.25 times")
def hidden_by_clipping_and_adamw(model, batches):
    optimizer = torch.optim.AdamW(model.parameters())
    backward_sums(model, batches, num_rows(batches) * len(batches))
    clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad()


@wrong("constant factor", net_with_norm, images, "0.25 times", "running statistics")
def divided_twice_under_batch_norm(model, batches):
    model.train()
    for batch in batches:
        loss = class_loss(model, batch) * len(batch[1]) / num_rows(batches)
        (loss / len(batches)).backward()


@wrong("constant factor", Net, images, "In first.bias, last.bias", "4 times")
def biases_not_divided(model, batches):
    backward_sums(model, batches)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.grad *= len(batches)


@wrong("constant factor", Net, images, "4 times", "loss=", "len(batches)", equal=True)
def constant_divisor(model, batches):  # right if there are always four parts
    for batch in batches:
        (class_loss(model, batch) / 4).backward()


@wrong("constant factor", Tagger, tokens, "38 times")
def gradients_divided_by_the_last_parts_labels(model, batches):
    for batch in batches:
        token_loss(model, batch, "sum").backward()
    for parameter in model.parameters():
        parameter.grad /= num_labels(batches[-1:])


@wrong("wrong with one part", Net, images, "0.5 times", loss=class_loss)
def constant_divisor_beside_the_loss(model, batches):
    backward_sums(model, batches, 2 * num_rows(batches))


@wrong("wrong with one part", Net, pairs, loss=info_nce_of_pairs)
def cached_without_documents(model, batches):  # sentence-transformers#3862
    with torch.no_grad():
        queries = torch.cat([model(first) for first, _ in batches])
        documents = torch.cat([model(second) for _, second in batches])
    queries.requires_grad_()
    info_nce(queries, documents).backward()
    start = 0
    for first, _ in batches:
        gradient = queries.grad[start : start + len(first)]
        (model(first) * gradient).sum().backward()
        start += len(first)


@wrong("no gradient", Net, images, "first.weight")
def detached_in_parts(model, batches):
    for pixels, classes in batches:
        hidden = model.first(pixels)
        if len(batches) > 1:
            hidden = hidden.detach()
        outputs = model.last(torch.relu(hidden))
        loss = cross_entropy(outputs, classes, reduction="sum")
        (loss / num_rows(batches)).backward()


# --- other terms ---


@wrong("once per part", Net, images)
def penalty_of_each_part(model, batches):
    backward_sums(model, batches)
    for _ in batches:
        penalty = sum(p.square().sum() for p in model.parameters())
        (1e-4 * penalty).backward()


@wrong("once per part", Experts, more_images, "router.weight")
def balance_loss_of_each_part(model, batches):
    for pixels, classes in batches:
        outputs, logits = model(pixels)
        loss = cross_entropy(outputs, classes, reduction="sum") / num_rows(batches)
        (loss + 0.1 * balance(logits)).backward()


@wrong("once per part", Tagger, tokens)
def z_loss_of_each_part(model, batches):
    count = num_labels(batches)
    for ids, labels in batches:
        logits = model(ids).flatten(0, 1)
        loss = cross_entropy(logits, labels.flatten(), reduction="sum") / count
        (loss + 0.01 * logits.logsumexp(-1).square().mean()).backward()


@wrong("mean of means", TwoHeads, images, "In number.weight")
def one_of_two_losses(model, batches):
    for pixels, classes in batches:
        outputs, number = model(pixels)
        loss = cross_entropy(outputs, classes, reduction="sum") / num_rows(batches)
        (loss + number.square().mean() / len(batches)).backward()


@wrong("mean of means", Adversaries, images, "In generator.first.weight")
def second_of_two_optimizers(model, batches):
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
        loss = softplus(-model.discriminator(model.generator(pixels))).mean()
        (loss / len(batches)).backward()
    for_generator.step()


@wrong("rows are compared", Experts, images, "router.weight")
def balance_loss_averaged_over_parts(model, batches):  # pytorch/torchtitan#4772
    count = num_rows(batches)
    for pixels, classes in batches:
        outputs, logits = model(pixels)
        loss = cross_entropy(outputs, classes, reduction="sum") / count
        (loss + 0.1 * balance(logits) * len(classes) / count).backward()


@wrong("rows are compared", Net, pairs)
def contrastive_loss_of_each_part(model, batches):
    for batch in batches:
        (info_nce_of_pairs(model, batch) / len(batches)).backward()


@wrong("rows are compared", Net, images)
def advantages_normalised_in_each_part(model, batches):
    for pixels, actions in batches:
        rewards = pixels.mean(1)
        advantages = (rewards - rewards.mean()) / rewards.std()
        chosen = model(pixels).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        (-(chosen * advantages).sum() / num_rows(batches)).backward()


@wrong("rows are compared", Tagger, rollouts, equal=True)
def advantages_of_each_part(model, batches):
    count = sum(mask.sum() for _, mask, _, _ in batches)
    for batch in batches:
        (policy_loss(model, batch, standardised(batch[2])) / count).backward()


@wrong("rows are compared", Net, images, equal=True)
def largest_losses_of_each_part_are_clamped(model, batches):
    """Only one output is used, so that the last bias has a single number."""
    for pixels, classes in batches:
        losses = (model(pixels)[:, 0] - classes).square()
        most = losses.detach().quantile(0.8)
        (losses.clamp_max(most).mean() / len(batches)).backward()


@wrong("batch normalisation", net_with_norm, images, "model.eval()")
def batch_norm_in_training(model, batches):
    model.train()
    for batch in batches:
        loss = class_loss(model, batch) * len(batch[1]) / num_rows(batches)
        loss.backward()


@wrong("state between parts", Centred, images)
def centre_moves_with_each_part(model, batches):
    for pixels, _ in batches:
        (model(pixels).square().sum() / num_rows(batches)).backward()


@wrong("state between parts", Net, images)
def updated_by_hand_after_each_part(model, batches):
    for batch in batches:
        class_loss(model, batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@wrong("state between parts", WithTeacher, images, "moves teacher.", "average")
def teacher_moves_with_each_part(
    model, batches
):  # facebookresearch/unbiased-teacher#31
    for pixels, _ in batches:
        with torch.no_grad():
            for mean, own in zip(
                model.teacher.parameters(), model.net.parameters(), strict=True
            ):
                mean.mul_(0.5).add_(0.75 * own)
            targets = model.teacher(pixels)
        (
            mse_loss(model.net(pixels), targets) * len(pixels) / num_rows(batches)
        ).backward()


@wrong("state between parts", WithTeacher, images, "moves teacher.")
def average_with_gradients_moves_after_each_part(model, batches):
    model.teacher.requires_grad_(True)  # as ``AveragedModel`` leaves its copy
    for pixels, _ in batches:
        targets = model.teacher(pixels).detach()
        (
            mse_loss(model.net(pixels), targets) * len(pixels) / num_rows(batches)
        ).backward()
        with torch.no_grad():
            for mean, own in zip(
                model.teacher.parameters(), model.net.parameters(), strict=True
            ):
                mean.lerp_(own, 0.2)


def step_with_teacher():
    teacher = new(Net).requires_grad_(False)

    def teacher_of_a_closure_moves(model, batches):
        for pixels, _ in batches:
            targets = teacher(2 * pixels)
            (
                mse_loss(model(pixels), targets) * len(pixels) / num_rows(batches)
            ).backward()
            teacher.first.bias.data += 0.1

    return teacher_of_a_closure_moves


wrong("state between parts", Net, images, "moves step.teacher.first.bias,")(
    step_with_teacher()
)


@wrong("not finite", Tagger, partly_unlabelled, "a part without labels")
def mean_of_a_part_without_labels(model, batches):
    for ids, labels in batches:
        has_label = (labels != -100).float()
        logits = model(ids).transpose(1, 2)
        losses = cross_entropy(logits, labels.clamp_min(0), reduction="none")
        mean = (losses * has_label).sum() / has_label.sum()
        (mean * has_label.sum() / num_labels(batches)).backward()


# --- ranks ---


@wrong("constant factor", Tagger, tokens, "0.5 times", ranks=2, parts=3)
def averaged_after_a_global_count(model, batches):  # pytorch/torchtitan#2323
    count = num_labels(batches)
    dist.all_reduce(count)
    parallel = DistributedDataParallel(model)
    for number, batch in enumerate(batches):
        waits = is_last(number, batches)
        with contextlib.nullcontext() if waits else parallel.no_sync():
            (token_loss(parallel, batch, "sum") / count).backward()


@wrong("constant factor", Net, pairs, "0.5 times", "ranks once too often", ranks=2)
def contrastive_loss_of_gathered_outputs(model, batches):  # modelscope/ms-swift#10081
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    info_nce(gathered(first), gathered(second)).backward()


@wrong("constant factor", lambda: Net(outputs=6), pairs, "0.5 times", ranks=2)
def barlow_twins_without_gradient_of_the_sum(model, batches):  # lightly#1977
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    correlation = first.T @ second / len(first) / dist.get_world_size()
    dist.all_reduce(correlation)
    identity = torch.eye(len(correlation))
    losses = (correlation - identity) ** 2 * (identity + 0.01 * (1 - identity))
    losses.sum().backward()


@wrong("constant factor", Net, pairs, "2 times", "added over the ranks", ranks=2)
def compensated_twice(model, batches):  # modelscope/ms-swift#10150
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    firsts = torch.cat(torch.distributed.nn.all_gather(first))
    seconds = torch.cat(torch.distributed.nn.all_gather(second))
    (info_nce(firsts, seconds) * dist.get_world_size()).backward()


@wrong("constant factor", Net, images, "2 times", "added over", ranks=2, parts=3)
def summed_and_not_averaged(model, batches):
    backward_sums(model, batches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


@wrong("constant factor", Net, images, "0.5 times", ranks=2)
def averaged_twice(model, batches):
    parallel = DistributedDataParallel(model)
    backward_sums(parallel, batches)
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


@wrong(
    "constant factor",
    lambda: Tagger(tied=True),
    tokens,
    "In embedding.weight",
    ranks=2,
    parts=3,
)
def tied_weight_summed_twice(model, batches):
    count = num_labels(batches)
    dist.all_reduce(count)
    for batch in batches:
        (token_loss(model, batch, "sum") / count).backward()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        dist.all_reduce(parameter.grad)


@wrong("constant factor", Tagger, tokens, ranks=2)
def count_of_the_first_rank(model, batches):
    count = num_labels(batches)
    dist.broadcast(count, 0)
    parallel = DistributedDataParallel(model)
    for batch in batches:
        (token_loss(parallel, batch, "sum") / count).backward()


@wrong("once per part", Experts, images, "router.weight", "rank", ranks=2)
def balance_loss_times_ranks(model, batches):  # huggingface/transformers#48706
    ((pixels, classes),) = batches
    ranks = dist.get_world_size()
    count = torch.tensor(float(len(classes)))
    dist.all_reduce(count)
    parallel = DistributedDataParallel(model)
    outputs, logits = parallel(pixels)
    loss = cross_entropy(outputs, classes, reduction="sum") / count
    ((loss + 0.1 * balance(logits)) * ranks).backward()


@wrong("ranks differ", Net, images, "any parameter", ranks=2, parts=3)
def no_sync_inverted(model, batches):  # modelscope/FunASR#3472
    parallel = DistributedDataParallel(model)
    for number, batch in enumerate(batches):
        waits = number == 0
        with contextlib.nullcontext() if waits else parallel.no_sync():
            (class_loss(parallel, batch, "sum") / num_rows(batches)).backward()


@wrong("ranks differ", Net, images, "any parameter", "model.module", ranks=2)
def forward_past_ddp(model, batches):
    parallel = DistributedDataParallel(model)
    backward_sums(parallel.module, batches)


@wrong("ranks differ", Scaled, images, "scale", ranks=2)
def parameter_outside_of_ddp(model, batches):
    parallel = DistributedDataParallel(model.net)
    for pixels, classes in batches:
        cross_entropy(parallel(pixels) * model.scale, classes).backward()


@wrong("ranks differ", Net, images, "first.bias, last.bias", ranks=2)
def biases_not_averaged(model, batches):
    backward_sums(model, batches)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@wrong("mean of means", Tagger, tokens, "labels that are not -100", ranks=2)
def means_of_each_ranks_tokens(model, batches):  # vllm-project/speculators#942
    parallel = DistributedDataParallel(model)
    for batch in batches:
        token_loss(parallel, batch).backward()


@wrong("mean of means", Tagger, more_tokens, ranks=2, parts=3)
def means_of_each_ranks_and_parts_tokens(model, batches):  # pytorch/torchtitan#1842
    parallel = DistributedDataParallel(model)
    for number, batch in enumerate(batches):
        waits = is_last(number, batches)
        with contextlib.nullcontext() if waits else parallel.no_sync():
            (token_loss(parallel, batch) / len(batches)).backward()


@wrong("mean of means", Net, images, "by their rows", ranks=2, equal=False)
def means_of_uneven_ranks(model, batches):
    parallel = DistributedDataParallel(model)
    for batch in batches:
        class_loss(parallel, batch).backward()


@wrong("only some parts", Net, images, "all ranks", ranks=2)
def first_rank_alone_counts(model, batches):
    parallel = DistributedDataParallel(model)
    weight = dist.get_world_size() if dist.get_rank() == 0 else 0
    for batch in batches:
        (class_loss(parallel, batch) * weight).backward()


@wrong("only some parts", Net, images, "equally (1, 0)", ranks=2)
def broadcast_in_place_of_a_sum(model, batches):
    backward_sums(model, batches)
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0)


@wrong("other weights", Net, images, "by 2", "all-reduce", ranks=2, parts=3)
def reduced_again_after_each_part(model, batches):
    count = torch.tensor(float(num_rows(batches)))
    dist.all_reduce(count)
    for batch in batches:
        (class_loss(model, batch, "sum") / count).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)


@wrong("rows are compared", Net, pairs, "gathered", ranks=2)
def contrastive_loss_of_each_rank(model, batches):
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    info_nce(first, second).backward()


@wrong("rows are compared", Net, pairs, ranks=2)
def keys_of_other_ranks_without_gradient(model, batches):
    parallel = DistributedDataParallel(model)
    first, second = embedded(parallel, batches)
    first = normalize(first, dim=-1)
    second = normalize(second, dim=-1)
    labels = torch.arange(len(first)) + len(first) * dist.get_rank()
    cross_entropy(first @ gathered(second).T / 0.1, labels).backward()


@wrong("unknown", Net, images, ranks=2)
def largest_in_place_of_the_mean(model, batches):
    backward_sums(model, batches)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.MAX)


@wrong("once per part", Net, images, "rank", ranks=2)
def penalty_added_over_ranks(model, batches):
    backward_sums(model, batches)
    average(model)
    penalty = sum(p.square().sum() for p in model.parameters())
    (1e-3 * penalty * dist.get_world_size()).backward()
