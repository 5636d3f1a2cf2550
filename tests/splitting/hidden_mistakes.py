"""Wrong loops whose mistake hides: in rows that alternate, outside of the model, in a cast.

``@hidden(cause, model, batch, **options)`` says what ``splitcheck`` must name.
"""

import functools
from dataclasses import dataclass

import torch
from splitting.loop_models import (
    Net,
    Tagger,
    average,
    class_loss,
    images,
    new,
    pairs,
    scripted_net,
)
from splitting.wrong_loops import Wrong
from torch import nn
from torch.nn.functional import cross_entropy, linear, mse_loss, normalize, one_hot
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
)

HIDDEN = {}


def hidden(cause, model, batch, **options):
    def add(step):
        options.setdefault("equal", True)
        HIDDEN[step.__name__] = Wrong(step, model, batch, cause, (), options)
        return step

    return add


def few_images():
    return images(16)


def is_even(rows=16):
    return torch.arange(rows) % 2 == 0


# --- rows alternate, so that pairs of them count alike ---


def alternating():
    """Ids, targets, and the number of entries of each row: 3, 7, 3, 7, …"""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 49, (16, 8), generator=generator)
    targets = torch.randint(0, 50, (16, 8), generator=generator)
    return ids, targets, torch.where(is_even(), 3, 7)


def is_in_row(lengths):
    return torch.arange(8) < lengths[:, None]


def token_losses(model, ids, targets):
    losses = cross_entropy(
        model(ids).flatten(0, 1), targets.flatten(), reduction="none"
    )
    return losses.view(ids.shape)


def backward_mean(losses, mask, batches):
    ((losses * mask).sum() / mask.sum() / len(batches)).backward()


@hidden("mean of means", Tagger, alternating)
def lengths_in_the_batch(model, batches):
    for ids, targets, lengths in batches:
        mask = is_in_row(lengths)
        backward_mean(token_losses(model, ids, targets), mask, batches)


def fractions():
    ids, targets, lengths = alternating()
    return {"ids": ids, "extra": [targets, (lengths / 8,)]}


@hidden("mean of means", Tagger, fractions)
def lengths_as_nested_fractions(model, batches):
    for batch in batches:
        targets, (parts_of_rows,) = batch["extra"]
        mask = is_in_row((parts_of_rows * 8).round())
        backward_mean(token_losses(model, batch["ids"], targets), mask, batches)


def masked(dtype):
    ids, targets, lengths = alternating()
    return {
        "text": {"ids": ids},
        "more": [(targets, {"mask": is_in_row(lengths).to(dtype)})],
    }


def masked_mean(model, batches):
    for batch in batches:
        ((targets, more),) = batch["more"]
        losses = token_losses(model, batch["text"]["ids"], targets)
        backward_mean(losses, more["mask"].to(losses.dtype), batches)


for dtype in (torch.bool, torch.uint8, torch.float16, torch.float64):
    masked_mean.__name__ = f"nested_mask_of_{str(dtype)[6:]}"
    hidden("mean of means", Tagger, functools.partial(masked, dtype))(masked_mean)


def with_ends():
    """Six entries in each row, of which five or six are neither first nor last."""
    ids, targets, _ = alternating()
    mask = torch.zeros(16, 8, dtype=torch.long)
    mask[1::2, 1:7] = 1
    mask[::2, [0, 1, 2, 3, 4, 7]] = 1
    return ids, targets, mask


@hidden("mean of means", Tagger, with_ends)
def mask_without_both_ends(model, batches):
    for ids, targets, mask in batches:
        losses = token_losses(model, ids, targets)[:, 1:-1]
        backward_mean(losses, mask[:, 1:-1], batches)


def two_masks():
    """Six entries in each, but four or six in both."""
    ids, targets, _ = alternating()
    first, second = torch.ones(2, 16, 8, dtype=torch.long)
    first[:, :2] = 0
    second[::2, :2] = 0
    second[1::2, 6:] = 0
    return ids, targets, first, second


@hidden("mean of means", Tagger, two_masks)
def product_of_two_masks(model, batches):
    for ids, targets, first, second in batches:
        backward_mean(token_losses(model, ids, targets), first * second, batches)


def padded_with(token):
    ids, targets, lengths = alternating()
    return ids.masked_fill(~is_in_row(lengths), token), targets


@hidden("mean of means", Tagger, functools.partial(padded_with, 49))
def padding_by_a_token(model, batches):
    for ids, targets in batches:
        backward_mean(token_losses(model, ids, targets), ids != 49, batches)


@hidden("other weights", Tagger, functools.partial(padded_with, 49))
def means_of_rows_weighted_by_tokens(model, batches):
    count = sum((ids != 49).sum() for ids, _ in batches)
    for ids, targets in batches:
        mask = ids != 49
        of_rows = (token_losses(model, ids, targets) * mask).sum(1) / mask.sum(1)
        (of_rows.mean() * mask.sum() / count).backward()


def weighted_images():
    return *few_images(), torch.where(is_even(), 0.5, 2.0)


@hidden("mean of means", Net, weighted_images)
def weights_of_rows(model, batches):
    for pixels, classes, weights in batches:
        losses = cross_entropy(model(pixels), classes, reduction="none")
        backward_mean(losses, weights, batches)


def scored_images():
    pixels, _ = few_images()
    return pixels, torch.where(is_even(), 0.2, 0.8)


@hidden("mean of means", Net, scored_images)
def positives_above_a_threshold(model, batches):
    for pixels, scores in batches:
        losses = (model(pixels)[:, 0] - scores).square()
        backward_mean(losses, scores * (scores > 0.5), batches)


def incomplete_targets():
    pixels, classes = few_images()
    targets = one_hot(classes, 4).float()
    targets[::2, 1:] = torch.nan
    return pixels, targets


@hidden("mean of means", Net, incomplete_targets)
def targets_that_are_nan(model, batches):
    for pixels, targets in batches:
        losses = (model(pixels) - targets.nan_to_num()).square()
        backward_mean(losses, ~targets.isnan(), batches)


@hidden("mean of means", Net, few_images)
def rows_that_the_model_chooses(model, batches):
    for pixels, classes in batches:
        outputs = model(pixels)
        is_sure = outputs.detach().softmax(-1).amax(1) > 0.3
        losses = cross_entropy(outputs, classes, reduction="none")
        (
            (losses * is_sure).sum() / is_sure.sum().clamp_min(1) / len(batches)
        ).backward()


@hidden("rows are compared", Net, few_images)
def hardest_rows_of_each_part(model, batches):
    for pixels, classes in batches:
        losses = cross_entropy(model(pixels), classes, reduction="none")
        (losses.topk(len(losses) // 2).values.mean() / len(batches)).backward()


# --- all terms could be in one part, or none in the one that is treated otherwise ---


def half_of_rows(kind):
    """Every other row counts: its label is a class, or its mask or weight is not 0."""
    pixels, classes = few_images()
    if kind == "labels":
        return pixels, classes.masked_fill(is_even(), -100)
    return pixels, classes, (~is_even()).to(kind)


def losses_and_weights(model, batch):
    pixels, classes, *weights = batch
    losses = cross_entropy(model(pixels), classes, reduction="none")
    return losses, weights[0] if weights else (classes != -100)


@hidden("sum of means", Net, functools.partial(half_of_rows, "labels"), parts=2)
def means_of_labelled_rows_are_added(model, batches):
    for batch in batches:
        losses, weights = losses_and_weights(model, batch)
        ((losses * weights).sum() / weights.sum().clamp_min(1)).backward()


@hidden("sum of means", Net, functools.partial(half_of_rows, torch.bool), parts=2)
def means_of_masked_rows_are_added(model, batches):
    means_of_labelled_rows_are_added(model, batches)


@hidden("only some parts", Net, functools.partial(half_of_rows, torch.float32))
def last_part_is_left_out(model, batches):
    """Its weights would all be zero if rows with weights came first."""
    count = sum(weights.sum() for *_, weights in batches)
    for batch in batches[:-1] or batches:
        losses, weights = losses_and_weights(model, batch)
        ((losses * weights).sum() / count).backward()


def sums_over_local_counts(model, batches):
    """Each rank divides by its own count, and all gradients are added."""
    means_of_labelled_rows_are_added(model, batches)
    for parameter in model.parameters():
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(parameter.grad)


hidden(
    "sum of means", Net, functools.partial(half_of_rows, "labels"), ranks=2, parts=1
)(sums_over_local_counts)


# --- trained outside of the model ---


@dataclass
class Holder:
    scale: nn.Parameter
    critic: nn.Module


HOLDER = Holder(nn.Parameter(torch.ones(4)), new(Net))
LEAF = torch.ones(4, requires_grad=True)


@hidden("constant factor", Net, few_images)
def parameter_in_a_dataclass(model, batches):
    for pixels, classes in batches:
        class_loss(model, (pixels, classes)).div(len(batches)).backward()
        cross_entropy(model(pixels).detach() * HOLDER.scale, classes).backward()


@hidden("constant factor", Net, few_images)
def leaf_that_is_no_parameter(model, batches):
    for pixels, classes in batches:
        class_loss(model, (pixels, classes)).div(len(batches)).backward()
        cross_entropy(model(pixels).detach() * LEAF, classes).backward()


@hidden("constant factor", Net, few_images)
def second_model_is_updated_by_hand(model, batches):
    for batch in batches:
        class_loss(model, batch).div(len(batches)).backward()
        class_loss(HOLDER.critic, batch).backward()
    with torch.no_grad():
        for parameter in (*model.parameters(), *HOLDER.critic.parameters()):
            parameter -= 0.1 * parameter.grad
            parameter.grad = None


@hidden("constant factor", Net, few_images)
def second_model_follows_with_an_optimizer(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        class_loss(model, batch).div(len(batches)).backward()
    optimizer.step()
    of_critic = torch.optim.SGD(HOLDER.critic.parameters(), 0.1)
    for batch in batches:
        class_loss(HOLDER.critic, batch).backward()
    of_critic.step()


def with_optimizer_alone():
    critic = new(Net)
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)

    def step(model, batches):
        first, bias, last, last_bias = optimizer.param_groups[0]["params"]
        for pixels, classes in batches:
            class_loss(model, (pixels, classes)).div(len(batches)).backward()
            outputs = linear(linear(pixels, first, bias).relu(), last, last_bias)
            cross_entropy(outputs, classes).backward()
        optimizer.step()

    step.__name__ = "optimizer_in_a_closure"
    return step


hidden("constant factor", Net, few_images)(with_optimizer_alone())


class SlottedStep:
    __name__ = "network_in_a_slot"
    __slots__ = ("network",)

    def __init__(self):
        self.network = new(Net)

    def __call__(self, model, batches):
        for batch in batches:
            class_loss(model, batch).div(len(batches)).backward()
            class_loss(self.network, batch).backward()


hidden("constant factor", Net, few_images)(SlottedStep())


class StepWithLoss:
    """An object with a loss and a head, both in attributes."""

    __name__ = "head_beside_a_loss"

    def __init__(self):
        self.loss = nn.CrossEntropyLoss()
        self.head = new(lambda: nn.Linear(4, 4))

    def __call__(self, model, batches):
        for pixels, classes in batches:
            outputs = model(pixels)
            (self.loss(outputs, classes) / len(batches)).backward()
            self.loss(self.head(outputs.detach()), classes).backward()


hidden("constant factor", Net, few_images)(StepWithLoss())


# --- a small mistake, beside a cast ---


def penalty(model):
    return 1e-5 * sum(parameter.square().sum() for parameter in model.parameters())


@hidden("once per part", Net, few_images)
def penalty_under_autocast(model, batches):
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = class_loss(model, batch)
        (loss / len(batches) + penalty(model)).backward()


@hidden(
    "once per part",
    lambda: Net().half(),
    lambda: (few_images()[0].half(), few_images()[1]),
)
def penalty_of_a_half_model(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches) + penalty(model)).backward()


class CastingNorm(nn.Module):
    """Casts itself to float32, as norms of language models do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self.net = Net()

    def forward(self, pixels):
        single = pixels.to(torch.float32)
        size = single.square().mean(-1, keepdim=True)
        return self.net(self.weight * (single * torch.rsqrt(size)).to(pixels.dtype))


@hidden("once per part", CastingNorm, few_images)
def penalty_of_a_module_that_casts(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches) + penalty(model)).backward()


class Rounded(nn.Module):
    """Rounds its outputs to steps of 1 / 8, with a gradient as if it did not."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, pixels):
        outputs = self.net(pixels)
        return outputs + ((outputs * 8).round() / 8 - outputs).detach()


@hidden("once per part", Rounded, few_images)
def penalty_beside_rounding(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches) + penalty(model)).backward()


@hidden("once per part", Net, few_images)
def gradients_rounded_at_the_end(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches) + penalty(model)).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.to(torch.bfloat16).to(parameter.dtype)


# --- state, clipping, parts that count otherwise ---


@hidden("other weights", Net, few_images)
def schedule_moves_with_each_part(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches:
        rate = optimizer.param_groups[0]["lr"]
        (class_loss(model, batch) * rate / len(batches)).backward()
        optimizer.param_groups[0]["lr"] *= 0.9
    optimizer.step()


@hidden("once per part", Net, few_images)
def average_moves_with_each_part(model, batches):
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    for number, batch in enumerate(batches):
        distance = 0
        for parameter, mean in zip(model.parameters(), averages, strict=True):
            distance = distance + (parameter - 0.9**number * mean).square().sum()
        ((class_loss(model, batch) + 1e-3 * distance) / len(batches)).backward()


@hidden("other weights", Net, few_images)
def clipped_by_a_norm_that_is_not_exceeded(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
        clip_grad_norm_(model.parameters(), 1e6)


@hidden("other weights", Net, few_images)
def clipped_by_value_after_each_part(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
        clip_grad_value_(model.parameters(), 1e3)


@hidden("other weights", Net, few_images)
def clipped_before_the_last_part(model, batches):
    for number, batch in enumerate(batches):
        (class_loss(model, batch) / len(batches)).backward()
        if number == len(batches) - 2:
            clip_grad_norm_(model.parameters(), 1.0)


@hidden("ranks differ", Net, few_images, ranks=2)
def clipped_before_the_average(model, batches):
    class_loss(model, batches[0]).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    average(model)
    torch.optim.AdamW(model.parameters()).step()


@hidden("other weights", Net, few_images)
def clipped_into_new_tensors(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()


@hidden("ranks differ", Net, few_images, ranks=2)
def clipped_before_an_average_in_new_tensors(model, batches):
    class_loss(model, batches[0]).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        total = parameter.grad.clone()
        torch.distributed.all_reduce(total)
        parameter.grad = total / torch.distributed.get_world_size()


@hidden("mean of means", Net, few_images, equal=None)
def mean_beside_masks_of_a_generator(model, batches):
    generator = torch.Generator().manual_seed(0)
    for pixels, classes in batches:
        mask = torch.rand(pixels.shape, generator=generator) < 0.8
        (class_loss(model, (pixels * mask, classes)) / len(batches)).backward()


@hidden("ranks differ", Net, few_images, ranks=2)
def clipped_by_value_before_the_sum(model, batches):
    (class_loss(model, batches[0]) / torch.distributed.get_world_size()).backward()
    clip_grad_value_(model.parameters(), 1.0)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)


@hidden("state between parts", Net, few_images)
def clipped_by_hand_after_each_part(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
        for parameter in model.parameters():
            parameter.grad.clamp_(-1e-3, 1e-3)


@hidden("state between parts", Net, few_images)
def one_gradient_is_dropped_between_parts(model, batches):
    for batch in batches:
        model.last.bias.grad = None
        (class_loss(model, batch) / len(batches)).backward()


@hidden("only some parts", Net, lambda: images(18), parts=4, equal=None)
def short_part_is_skipped(model, batches):
    full = [batch for batch in batches if len(batch[0]) == len(batches[0][0])]
    for batch in full:
        (class_loss(model, batch) / len(full)).backward()


@hidden("only some parts", Net, few_images)
def all_parts_but_the_last_are_detached(model, batches):
    losses = [class_loss(model, batch).detach() for batch in batches[:-1]]
    losses.append(class_loss(model, batches[-1]))
    torch.stack(losses).mean().backward()


@hidden("unknown", Net, few_images)
def term_without_gradient_in_parts(model, batches):
    for pixels, classes in batches:
        with torch.set_grad_enabled(len(batches) == 1):
            term = model(pixels).square().mean()
        ((class_loss(model, (pixels, classes)) + term) / len(batches)).backward()


@hidden("state between parts", Net, few_images)
def term_of_the_first_part_alone(model, batches):
    for number, (pixels, classes) in enumerate(batches):
        loss = class_loss(model, (pixels, classes))
        if number == 0:
            loss = loss + model(pixels).square().mean()
        (loss / len(batches)).backward()


@hidden("rows are compared", Net, few_images)
def entropy_of_the_mean_output(model, batches):
    for pixels, classes in batches:
        mean = model(pixels).softmax(-1).mean(0)
        loss = class_loss(model, (pixels, classes)) + 0.1 * (mean * mean.log()).sum()
        (loss / len(batches)).backward()


# --- a gradient that is zero, or small beside others ---


class Adapted(nn.Module):
    """A second factor that is zero leaves no gradient on the first, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.first = nn.Parameter(torch.randn(10, 2))
        self.second = nn.Parameter(torch.zeros(2, 4))

    def forward(self, pixels):
        return self.net(pixels) + pixels @ self.first @ self.second


@hidden("constant factor", Adapted, few_images)
def first_factor_is_not_divided(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
    model.first.grad *= len(batches)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.extra = nn.Linear(10, 4)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, pixels):
        return self.net(pixels) + self.gate * self.extra(pixels)


@hidden("constant factor", Gated, few_images)
def layer_behind_a_closed_gate(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
    for parameter in model.extra.parameters():
        parameter.grad *= len(batches)


class Faint(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.offset = nn.Parameter(torch.zeros(3))

    def forward(self, pixels):
        return self.net(pixels)[:, :3] + 1e-8 * self.offset


@hidden("constant factor", Faint, few_images)
def parameter_with_a_faint_gradient(model, batches):
    for pixels, _ in batches:
        targets = torch.arange(3, dtype=pixels.dtype).expand(len(pixels), 3)
        (mse_loss(model(pixels), targets) / len(batches)).backward()
    model.offset.grad *= len(batches)


class ZeroHead(nn.Module):
    """Its head starts from zero, so nothing below it has a gradient at first."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.head = nn.Linear(4, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, pixels):
        return self.head(self.net(pixels))


@hidden("constant factor", ZeroHead, few_images)
def net_below_a_head_of_zeros(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
    for parameter in model.net.parameters():
        parameter.grad *= len(batches)


# --- kinds that nobody reported ---


@hidden("state between parts", Net, pairs)
def queue_of_negatives(model, batches):
    """Keys of earlier parts are negatives of later ones, as in MoCo."""
    queue = []
    for first, second in batches:
        queries = normalize(model(first), dim=-1)
        queue.insert(0, normalize(model(second), dim=-1).detach())
        logits = queries @ torch.cat(queue).T / 0.1
        loss = cross_entropy(logits, torch.arange(len(queries)))
        (loss / len(batches)).backward()


@hidden("only some parts", Net, few_images)
def second_optimizer_steps_twice_as_often(model, batches):
    for_first = torch.optim.SGD(model.first.parameters(), 0.1)
    for_last = torch.optim.SGD(model.last.parameters(), 0.1)
    for number, batch in enumerate(batches):
        (class_loss(model, batch) / len(batches)).backward()
        if number % 2 == 1 or len(batches) == 1:
            for_last.step()
            for_last.zero_grad()
    for_first.step()


@hidden("other weights", Net, few_images)
def clipped_by_a_norm_that_the_loop_computes(model, batches):
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
        parameters = list(model.parameters())
        norm = get_total_norm([parameter.grad for parameter in parameters])
        clip_grads_with_norm_(parameters, 1.0, norm)


@hidden("unknown", Net, few_images)
def weights_perturbed_by_each_part(model, batches):
    """SAM, whose step to other weights is that of a part."""
    for batch in batches:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(class_loss(model, batch), parameters)
        norm = get_total_norm(gradients)
        steps = [0.05 * gradient / norm for gradient in gradients]
        torch._foreach_add_([parameter.data for parameter in parameters], steps)
        (class_loss(model, batch) / len(batches)).backward()
        torch._foreach_sub_([parameter.data for parameter in parameters], steps)


@hidden("unknown", Net, few_images)
def weights_perturbed_by_the_last_part(model, batches):
    """SAM, whose second pass sees one part: the gradient depends on the order."""
    for batch in batches:
        (class_loss(model, batch) / len(batches)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter += 0.05 * gradient / gradient.norm()
            parameter.grad = None
    class_loss(model, batches[-1]).backward()


def overlap_loss(model, batch, false_weight):
    """Dice, or Tversky with another weight: without rows of class 0 it is constant."""
    pixels, classes = batch
    scores = model(pixels).softmax(1)[:, 0]
    is_first = (classes == 0).to(scores.dtype)
    overlap = (scores * is_first).sum()
    errors = scores.sum() + is_first.sum() - 2 * overlap
    return 1 - overlap / (overlap + false_weight * errors)


@hidden("rows are compared", Net, few_images)
def dice_of_each_part(model, batches):
    for batch in batches:
        (overlap_loss(model, batch, 0.5) / len(batches)).backward()


@hidden("rows are compared", Net, few_images)
def tversky_of_each_part(model, batches):
    for batch in batches:
        (overlap_loss(model, batch, 0.8) / len(batches)).backward()


@hidden("constant factor", scripted_net, few_images)
def scripted_model_is_not_divided(model, batches):
    for batch in batches:
        class_loss(model, batch).backward()
