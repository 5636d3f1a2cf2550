"""The step time on 1 to 32 machines with 8 GPUs each, by a formula.

For ``g`` bytes of gradients, a step on ``N`` machines takes::

    images / images_per_second                  the GPUs compute
    + 2 * 3 * g / inside                        out and back, over a tree of 3 rounds
    + 4 * g / memory                            pack, scale and unpack; N > 1
    + 2 * (N - 1) / N * g / between             ring all-reduce of the gradients
    + 2 * 2 * (N - 1) * latency                 the messages of both collectives

Nothing overlaps, which is how the engine works.
"""

from dataclasses import dataclass, replace

GPUS = 8
ROUNDS = (GPUS - 1).bit_length()  # of the tree: 3
MACHINES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Setting:
    """The numbers of the formula.

    Attributes:
        bytes: of all gradients.
        images: per GPU and step.
        images_per_second: of one GPU.
        inside: bytes per second that a GPU sends or receives inside a machine.
        between: bytes per second of a machine's link.
        latency: seconds of one message between machines.
        memory: bytes per second at which gradients are packed and unpacked.
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
        other_machines = machines - 1
        ring = 2 * other_machines / machines * self.bytes / self.between
        messages = 2 * 2 * other_machines * self.latency
        return {
            "compute": self.images / self.images_per_second,
            "inside a machine": 2 * ROUNDS * self.bytes / self.inside,
            "pack": 4 * self.bytes / self.memory if other_machines else 0.0,
            "between machines": ring + messages,
        }

    def total(self, machines: int) -> float:
        """Seconds of one step."""
        return sum(self.seconds(machines).values())

    def efficiency(self, machines: int) -> float:
        """Images per second and GPU, against those of one machine."""
        return self.total(1) / self.total(machines)


# ResNet-50, 25,557,032 parameters of 4 bytes. Goyal et al. 2017: 8 P100 per machine
# with NVLink, 50 Gbit/s Ethernet, 32 images per GPU. 90 epochs of 1.28 million images
# in an hour on 256 GPUs are 125 images per second and GPU.
GOYAL = Setting(
    bytes=4 * 25_557_032,
    images=32,
    images_per_second=125.0,
    inside=35e9,
    between=50e9 / 8,
    latency=30e-6,
    memory=250e9,
)
SLOW_LINK = replace(GOYAL, between=10e9 / 8, latency=50e-6)
SETTINGS = {
    "one sub-step of 32 images, 50 Gbit/s": GOYAL,
    "16 sub-steps of 32 images, 50 Gbit/s": replace(GOYAL, images=16 * 32),
    "16 sub-steps of 32 images, 10 Gbit/s": replace(SLOW_LINK, images=16 * 32),
    "one sub-step of 32 images, 10 Gbit/s": SLOW_LINK,
}
