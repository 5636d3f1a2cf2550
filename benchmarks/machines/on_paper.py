"""The step time on 1 to 32 machines with 8 GPUs each, by a formula with
stated numbers.
"""

from dataclasses import dataclass

GPUS = 8
ROUNDS = (GPUS - 1).bit_length()  # of the tree that parameters and gradients go over
MACHINES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Setting:
    """What the formula is fed.

    Attributes:
        bytes: of all gradients.
        images: per GPU and step.
        images_per_second: of one GPU.
        inside: bytes a second that a GPU sends or receives inside a machine.
        between: bytes a second of a machine's link.
        latency: seconds of one message between machines.
        memory: bytes a second at which gradients are packed and unpacked.
    """

    bytes: float
    images: int
    images_per_second: float
    inside: float
    between: float
    latency: float
    memory: float

    def seconds(self, machines: int) -> dict[str, float]:
        """The parts of one step.

        >>> GOYAL.seconds(1)["between machines"]
        0.0
        """
        n = machines
        ring = 2 * (n - 1) / n * self.bytes / self.between + 2 * (n - 1) * self.latency
        small = 2 * (n - 1) * self.latency
        return {
            "compute": self.images / self.images_per_second,
            "inside a machine": 2 * ROUNDS * self.bytes / self.inside,
            "pack": 4 * self.bytes / self.memory if n > 1 else 0.0,
            "between machines": ring + small if n > 1 else 0.0,
        }

    def efficiency(self, machines: int) -> float:
        """Images a second and GPU, against those of one machine."""
        return sum(self.seconds(1).values()) / sum(self.seconds(machines).values())


# ResNet-50, 25,557,032 parameters of 4 bytes. Goyal et al. 2017: 8 P100 a machine with
# NVLink, 50 Gbit/s Ethernet, 32 images a GPU. 90 epochs of 1.28 million images in an
# hour on 256 GPUs are 125 images a second and GPU.
GOYAL = Setting(4 * 25_557_032, 32, 125.0, 35e9, 50e9 / 8, 30e-6, 250e9)
SETTINGS = {
    "one sub-step of 32 images, 50 Gbit/s": GOYAL,
    "16 sub-steps of 32 images, 50 Gbit/s": Setting(
        GOYAL.bytes, 16 * 32, 125.0, 35e9, 50e9 / 8, 30e-6, 250e9
    ),
    "16 sub-steps of 32 images, 10 Gbit/s": Setting(
        GOYAL.bytes, 16 * 32, 125.0, 35e9, 10e9 / 8, 50e-6, 250e9
    ),
    "one sub-step of 32 images, 10 Gbit/s": Setting(
        GOYAL.bytes, 32, 125.0, 35e9, 10e9 / 8, 50e-6, 250e9
    ),
}
