"""What the fork server imports once, so that its workers share it."""

from scatterpar.train.pictures import torchvision

torchvision("transforms.v2")
