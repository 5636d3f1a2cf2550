"""Small models, batches and losses of the loops in ``wrong_loops`` and ``right_loops``."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, ctc_loss, normalize, one_hot


class Tagger(nn.Module):
    """A label for each token."""

    def __init__(self, *, tied=False, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = torch.tanh(self.hidden(self.embedding(ids)))
        return self.head(self.dropout(hidden))


class Net(nn.Module):
    """A class for each row, or an embedding."""

    def __init__(self, *, norm=False, outputs=4):
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.last = nn.Linear(16, outputs)

    def forward(self, images):
        return self.last(torch.relu(self.norm(self.first(images))))


class Experts(nn.Module):
    """A mixture of experts. Returns outputs and the router's logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(10, 16)
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def forward(self, images):
        hidden = torch.tanh(self.embedding(images))
        logits = self.router(hidden)
        weights = logits.softmax(-1)
        mixed = 0
        for number, expert in enumerate(self.experts):
            mixed = mixed + weights[:, number : number + 1] * expert(hidden)
        return self.head(mixed), logits


class Adversaries(nn.Module):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.generator = Net(outputs=10)
        self.discriminator = Net(outputs=1)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(10, 16)
        self.classes = nn.Linear(16, 4)
        self.number = nn.Linear(16, 1)

    def forward(self, images):
        hidden = torch.relu(self.body(images))
        return self.classes(hidden), self.number(hidden)


class Centred(nn.Module):
    """Its centre moves with each forward pass, as DINO's does."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, images):
        outputs = self.net(images)
        self.centre.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return outputs - self.centre


class Scaled(nn.Module):
    """A scale outside of the module that a loop gives to DDP."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.scale = nn.Parameter(torch.ones(4))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 50)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0])


class WithTeacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.teacher = Net().requires_grad_(False)


def net_with_norm():
    return Net(norm=True)


def new(make):
    """A model with the same values in each test."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


# --- batches ---


def tokens(rows=16):
    """Token ids, and labels of which rows have different numbers."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 50, (rows, 8), generator=generator)
    labels = torch.randint(0, 50, (rows, 8), generator=generator)
    lengths = torch.randint(1, 9, (rows, 1), generator=generator)
    return ids, labels.masked_fill(torch.arange(8) >= lengths, -100)


def more_tokens():
    return tokens(24)


def partly_unlabelled():
    """Tokens; the first five rows have no labels."""
    ids, labels = tokens()
    return ids, labels.masked_fill(torch.arange(16)[:, None] < 5, -100)


def images(rows=24):
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(rows, 10, generator=generator)
    return pixels, torch.randint(0, 4, (rows,), generator=generator)


def more_images():
    return images(48)


def speech():
    """Frames, targets, and the lengths of both."""
    generator = torch.Generator().manual_seed(4)
    frames = torch.randn(16, 14, 10, generator=generator)
    lengths = torch.randint(11, 15, (16,), generator=generator)
    sizes = torch.randint(1, 6, (16,), generator=generator)
    targets = torch.randint(1, 4, (16, 5), generator=generator)
    return (
        frames,
        targets.masked_fill(torch.arange(5) >= sizes[:, None], 0),
        lengths,
        sizes,
    )


def rollouts():
    """Tokens and their mask, rewards of rows, and log-probabilities of an old model."""
    ids, labels = tokens()
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randn(16, generator=generator)
    old = 0.1 * torch.randn(16, 8, generator=generator) - 3.9
    return ids, (labels != -100).float(), rewards, old


def pairs(rows=16):
    """Two views of each row."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(rows, 10, generator=generator)
    return first, first + 0.3 * torch.randn(rows, 10, generator=generator)


# --- losses ---


def token_loss(model, batch, reduction="mean"):
    ids, labels = batch
    return cross_entropy(
        model(ids).flatten(0, 1), labels.flatten(), reduction=reduction
    )


def class_loss(model, batch, reduction="mean"):
    pixels, classes = batch
    return cross_entropy(model(pixels), classes, reduction=reduction)


def speech_loss(model, batch, reduction="mean"):
    """CTC: each row's loss over the size of its targets, or the sum."""
    frames, targets, lengths, sizes = batch
    outputs = model(frames).log_softmax(-1).transpose(0, 1)
    return ctc_loss(outputs, targets, lengths, sizes, reduction=reduction)


def standardised(rewards):
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def policy_loss(model, batch, advantages):
    """The sum of a clipped policy loss over the tokens of a mask."""
    ids, mask, _, old = batch
    chosen = model(ids).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    ratio = (chosen - old).exp()
    gains = torch.min(
        ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]
    )
    return -(gains * mask).sum()


def num_labels(batches):
    return torch.tensor(float(sum((labels != -100).sum() for _, labels in batches)))


def num_rows(batches):
    return sum(len(batch[0]) for batch in batches)


def backward_sums(model, batches, count=None):
    """The right loop for one process: sums of losses over the number of rows."""
    for batch in batches:
        loss = class_loss(model, batch, "sum") / (count or num_rows(batches))
        loss.backward()


def balance(logits):
    """A balance loss of a router: a product of two means over rows."""
    shares = logits.softmax(-1)
    chosen = one_hot(logits.argmax(-1), 4).to(shares.dtype)
    return 4 * (chosen.mean(0) * shares.mean(0)).sum()


def info_nce(first, second):
    first = normalize(first, dim=-1)
    second = normalize(second, dim=-1)
    return cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def info_nce_of_pairs(model, batch):
    first, second = batch
    return info_nce(model(first), model(second))


def embedded(model, batches):
    """The two embeddings of the only batch, of one call of the model."""
    ((first, second),) = batches
    return model(torch.cat([first, second])).chunk(2)


def gathered(outputs):
    """Outputs of all ranks; only this rank's have a gradient."""
    of_ranks = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, outputs.detach().contiguous())
    of_ranks[dist.get_rank()] = outputs
    return torch.cat(of_ranks)


def average(model):
    """Average the gradients over the ranks, by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def is_last(number, batches):
    return number == len(batches) - 1


def scripted_net():
    """Its parameters are not in Python's attributes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(Net())
