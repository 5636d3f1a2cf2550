"""Steps of the engine on one GPU beside a plain loop and nn.DataParallel, in turns.

::

    for each round:
        plain loop        for each micro-batch: (criterion(net(x), y) / accum).backward()
        nn.DataParallel   the same, with nn.DataParallel(net)
        [0]               engine.forward_backward(inputs, targets, criterion)
        [0, 0]            the same with two replicas
        graphs            the same with graphs=True

Each round has a step of each program, so what slows the machine slows all of them.
Ratios are medians over the rounds. Looks (steps 1, 2, 4, 8, …, for graphs counted from
the first one of a shape) belong to the warm-up: timed steps have none.
"""

import contextlib
import functools
import time
import warnings
from statistics import median

import torch
from torch import nn

from benchmarks.card import predictions
from benchmarks.card.networks import Network, criterion
from benchmarks.card.page import MEASURED, NOT_RUN
from scatterpar import ScatterOnceParallel
from scatterpar.devices.virtual_devices import physical

_ACCUM = 16
_WARM_UPS = 8  # the engine looks at four of them
_ROUNDS = 5
_HOST_ROUNDS = 3
_HOST_ROWS = 2  # per sub-step, so few that the host's launching is the whole time
PLAIN = "plain loop"
DATA_PARALLEL = "nn.DataParallel"
PINNED = "[0], pinned"
PAGEABLE = "[0], pageable"
ON_GPU = "[0], on the GPU"
TWICE = "[0, 0], pinned"
GRAPHS = "graphs, pinned"


class Program:
    """A way to accumulate the gradient of a batch.

    Attributes:
        module: what gets the gradient.
        seconds: of each timed step.
        host_seconds: of each timed step with so few rows that the host is the bound.
        first_peak, peak: the most memory of the first and of a later step, in bytes.
    """

    def __init__(self, module, step, batch, few):
        self.module = module
        self._step = step
        self._batch = batch
        self._few = few
        self.seconds = []
        self.host_seconds = []
        self.first_peak = 0
        self.peak = 0

    def run(self, device, few=False):
        """Take one step. Returns its seconds, and the most memory."""
        self.module.zero_grad()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        inputs, targets = self._few if few else self._batch
        start = time.perf_counter()
        self._step(inputs, targets)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        return seconds, torch.cuda.max_memory_allocated(device)

    def warm_up(self, device):
        """The first step, and more with few rows."""
        _, self.first_peak = self.run(device)
        for _ in range(_WARM_UPS - 1):
            self.run(device, few=True)

    def take_turn(self, device):
        """One timed step with all rows."""
        seconds, peak = self.run(device)
        self.seconds.append(seconds)
        self.peak = max(self.peak, peak)

    def take_host_turn(self, device):
        """One timed step with few rows."""
        seconds, _ = self.run(device, few=True)
        self.host_seconds.append(seconds)


def steps(setting, say, name):
    """The programs in turns, a line of the page for each."""
    net = Network(name, setting)
    device = physical(setting.devices[0])
    with contextlib.ExitStack() as engines, warnings.catch_warnings():
        warnings.filterwarnings("error", message="graphs=True")  # one was not captured
        programs, looking_engines = _programs(net, setting, engines)
        for program in programs.values():
            program.warm_up(device)
        for engine in looking_engines:
            engine.verify = False
        for _ in range(setting.rounds(_ROUNDS, least=2)):
            for program in programs.values():
                program.take_turn(device)
        for _ in range(_HOST_ROUNDS):
            for program in programs.values():
                program.take_host_turn(device)
        for program_name, program in programs.items():
            result = _result(program, programs[PLAIN])
            verdict = _verdict(name, program_name, programs)
            say(result, program_name, verdict if setting.is_real else MEASURED)
        if setting.is_real:
            _say_host(say, programs)
        _say_hidden(say, programs[PINNED], device)


def _programs(net, setting, engines):
    """Every program by its name, all with the same rows; and their engines."""
    device = setting.devices[0]
    batch = _pinned(net.batch(net.rows * _ACCUM))
    few = _pinned(net.batch(_HOST_ROWS * _ACCUM))
    plain = net.module(device)
    plain_loop = functools.partial(_plain_loop, plain, device)
    parallel = nn.DataParallel(net.module(device), [device.index])
    parallel_loop = functools.partial(_parallel_loop, parallel, device)

    looking_engines = []

    def by_engine(device_ids, accum, graphs=False):
        module = net.module(device)
        engine = ScatterOnceParallel(module, accum, device_ids, graphs=graphs)
        engines.enter_context(engine)
        looking_engines.append(engine)
        return module, functools.partial(_by_engine, engine)

    module, step = by_engine([device], _ACCUM)
    # One engine takes rows from three kinds of memory.
    pageable = _LikeThat(module, step, _copied(batch), _copied(few))
    on_gpu = _LikeThat(module, step, _moved(batch, device), _moved(few, device))
    programs = {
        PLAIN: Program(plain, plain_loop, batch, few),
        DATA_PARALLEL: Program(parallel, parallel_loop, batch, few),
        PINNED: Program(module, step, batch, few),
        TWICE: Program(*by_engine([device] * 2, _ACCUM // 2), batch, few),
        GRAPHS: Program(*by_engine([device], _ACCUM, graphs=True), batch, few),
        PAGEABLE: pageable,
        ON_GPU: on_gpu,
    }
    return programs, looking_engines


class _LikeThat(Program):
    """A program whose engine another one has warmed up."""

    def warm_up(self, device):
        """Nothing more: the engine has its threads and streams."""


def _by_engine(engine, inputs, targets):
    engine.forward_backward(inputs, targets, criterion)


def _plain_loop(module, device, inputs, targets):
    """The same micro-batches as the engine's."""
    for rows, labels in zip(inputs.chunk(_ACCUM), targets.chunk(_ACCUM), strict=True):
        rows = rows.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        (criterion(module(rows), labels) / _ACCUM).backward()


def _parallel_loop(parallel, device, inputs, targets):
    """The same, with ``nn.DataParallel``, which moves its inputs itself."""
    for rows, labels in zip(inputs.chunk(_ACCUM), targets.chunk(_ACCUM), strict=True):
        labels = labels.to(device, non_blocking=True)
        (criterion(parallel(rows), labels) / _ACCUM).backward()


def _pinned(batch):
    return [tensor.pin_memory() for tensor in batch]


def _copied(batch):
    """In ordinary memory of the host."""
    copies = []
    for tensor in batch:
        copy = torch.empty_like(tensor, pin_memory=False)
        copies.append(copy.copy_(tensor))
    return copies


def _moved(batch, device):
    return [tensor.to(device) for tensor in batch]


def _ratio(program, other):
    """The median of the ratios of their times, round by round."""
    pairs = zip(program.seconds, other.seconds, strict=True)
    return median(seconds / of_other for seconds, of_other in pairs)


def _host_ms(program):
    """Milliseconds of the host per sub-step."""
    return 1e3 * median(program.host_seconds) / _ACCUM


def _result(program, plain):
    milliseconds = 1e3 * median(program.seconds)
    words = f"{milliseconds:.1f} ms, {_ratio(program, plain):.3f} of the plain loop"
    words += f"; host {_host_ms(program):.2f} ms per sub-step"
    if program.first_peak:
        words += f"; peak {program.first_peak / 1e9:.2f} GB in the first step"
    return f"{words}; {program.peak / 1e9:.2f} GB later"


def _verdict(network, name, programs):
    """The verdict, which names the figure that the row was compared with."""
    program = programs[name]
    of_plain = _ratio(program, programs[PLAIN])
    if name == PINNED:
        by_call = _ratio(program, programs[DATA_PARALLEL])
        words = predictions.of_data_parallel(by_call)
        return f"{words}; {predictions.ENGINE[network].verdict(of_plain)}"
    if name == TWICE:
        return predictions.TWICE.verdict(_ratio(program, programs[PINNED]))
    if name == GRAPHS:
        return predictions.GRAPHS.verdict(of_plain)
    return MEASURED


def _say_host(say, programs):
    over = _host_ms(programs[PINNED]) - _host_ms(programs[PLAIN])
    verdict = predictions.HOST.verdict(over)
    say(f"{over:.2f} ms per sub-step more than the plain loop", "host", verdict)


def _say_hidden(say, program, device):
    """The part of the time of copies to the GPU in which kernels run, by the profiler.

    Of copies at whose start the next kernel had been launched: nothing can hide the
    others, however early they begin.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        program.run(device)
    copies = []
    kernels = []
    of_kernels = []  # their numbers
    launches = {}
    for event in profile.events():
        span = event.time_range.start, event.time_range.end
        if event.device_type != torch.autograd.DeviceType.CUDA:
            if event.name.startswith("cu"):  # a call of CUDA has its kernel's number
                launches[event.id] = span[0]
        elif event.name.startswith("Memcpy HtoD"):
            copies.append(span)
        elif not event.name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
            of_kernels.append(event.id)
    if not copies:
        say("the profiler saw no copies", "copies hidden", NOT_RUN)
        return
    # One whose launch is not known counts as launched.
    launched = [launches.get(number, 0) for number in of_kernels]
    hideable = with_next_kernel(copies, kernels, launched)
    if not hideable:
        words = f"the GPU waited for the host at each of {len(copies)} copies"
        say(words, "copies hidden", MEASURED)
        return
    total = sum(end - start for start, end in hideable)
    hidden = overlap(hideable, kernels) / max(total, 1e-9)
    words = f"{hidden:.2f} of {total / 1e3:.1f} ms of {len(hideable)} copies"
    words += f" of {len(copies)}, whose next kernel had been launched"
    say(words, "copies hidden", predictions.HIDDEN.verdict(hidden))


def with_next_kernel(copies, kernels, launched):
    """The copies at whose start the kernel that runs then, or else the next one, had
    been launched.

    >>> with_next_kernel([(0, 2), (4, 6), (8, 9)], [(3, 5), (7, 8)], [1, 2])
    [(4, 6)]
    """
    in_order = sorted(zip(kernels, launched, strict=True))
    found = []
    for start, end in copies:
        later = (launch for (_, stop), launch in in_order if stop > start)
        if next(later, start) < start:
            found.append((start, end))
    return found


def overlap(spans, other_spans):
    """How long ``spans`` last while one of ``other_spans`` does.

    >>> overlap([(0, 4), (6, 8)], [(1, 2), (1, 3), (7, 9)])
    3
    """
    # Merged, so that no time counts twice.
    merged = []
    for start, end in sorted(other_spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    together = 0
    for start, end in spans:
        for other_start, other_end in merged:
            together += max(0, min(end, other_end) - max(start, other_start))
    return together
