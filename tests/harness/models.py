"""Small models with exact gradients: smooth, float64, no random numbers."""

from torch import nn

from harness.oracle import build

FEATURES = 5
CLASSES = 4


def mlp(seed=0):
    """Rows of ``FEATURES`` to ``CLASSES`` logits."""

    def make():
        return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))

    return build(make, seed)


class Classifier(nn.Module):
    """One linear layer, ``linear``, and whatever a test makes of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs):
        return self.linear(inputs)


class Of(nn.Module):
    """Some layers and parameters, and a function of them and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def linear(seed=0):
    return build(lambda: nn.Linear(FEATURES, CLASSES), seed)


class Returns(Classifier):
    """What ``wrap`` makes of the logits and the inputs."""

    def __init__(self, wrap):
        super().__init__()
        self.wrap = wrap

    def forward(self, inputs):
        return self.wrap(self.linear(inputs), inputs)


class Columns(Classifier):
    """Rows are columns: they lie along dimension 1."""

    def forward(self, inputs):
        return self.linear(inputs.T).T


class TokenClassifier(nn.Module):
    """Token ids of shape (rows, length) to logits of shape (rows, CLASSES, length)."""

    def __init__(self, vocabulary=11):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, ids):
        hidden = self.embedding(ids)
        mixed = self.mix(hidden).tanh()
        hidden = hidden + mixed.mean(1, keepdim=True)
        return self.head(hidden).transpose(1, 2)


def token_classifier(seed=0):
    return build(TokenClassifier, seed)


class Meter:
    """What a loop keeps of values: their sum, and each of them."""

    def __init__(self):
        self.total = 0.0
        self.values = []

    def update(self, value):
        self.total += value
        self.values.append(value)
