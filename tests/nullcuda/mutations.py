"""Is every wait needed? Each is taken out of a copy, and a test has to fail.

    tests/nullcuda/run python -m nullcuda.mutations

``TABLE`` says what is changed and what has to find it. Every line of the engine that
waits has to be in it, so a new wait needs a test that fails without it; so do a
synchronisation too many, memory that is let go of too early, and what graphs leave
behind.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from sabotage import ROOT, in_any_layout, run_on_copy

RACE = "accesses that nothing orders"
ENGINE = (
    ".",
    "devices",
    "options",
    "options/graphs",
    "replicas",
    "step",
    "threads",
    "verify",
    "calls",
    "pair",
    "distributed",
)
# Not `Transfers.synchronize`, which waits by events of its own.
WAITS = re.compile(
    r"\.wait_stream\(|\.wait_event\(|(?:event|copied|_arrived|_pinned\[0\])\.synchronize\("
)
FILES = (
    "tests/nullcuda/test_memory_of_looks.py",
    "tests/nullcuda/test_the_path.py",
    "tests/nullcuda/test_streams.py",
    "tests/options/graphs/test_graphs.py",
    "tests/devices/cards/test_accelerator.py",
    "tests/devices/cards/test_calls.py",
)


class Mutation(NamedTuple):
    """What is changed in the engine, and the test that fails then, with these words."""

    title: str
    changes: list[tuple[str, str]]  # each text, and the one in its place
    test: str
    words: str


def read(entry: str) -> Mutation:
    """An entry of ``TABLE``: a title, a patch, a test, and the words unless ``RACE``.

    A text without another one in its place becomes ``pass``.
    """
    title, *patch, outcome = entry.splitlines()
    changes: list[tuple[str, str]] = []
    for sign, lines in groupby(patch, lambda line: line[0]):
        text = "\n".join(line[1:] for line in lines)
        if sign == "-":
            changes.append((text, "pass"))
        else:
            replaced, _ = changes.pop()
            changes.append((replaced, text))
    name, _, words = outcome.partition(": ")
    return Mutation(title, changes, f"{file_of(name)}::{name}", words or RACE)


def file_of(test: str) -> str:
    """The one of ``FILES`` that has the test."""
    (file,) = [file for file in FILES if f"\ndef {test}(" in (ROOT / file).read_text()]
    return file


TABLE = """
the computation does not wait for its rows
-torch.accelerator.current_stream(self._device).wait_event(copied)
test_pinned_memory_reusable_after_call

copies do not wait for what reads the memory that they write
-self._stream.wait_stream(computing)
test_steps_run_on_users_streams

copies behind a replay do not wait for what was launched before it
-self._stream.wait_event(after)
test_next_rows_copied_behind_the_first_replay: AssertionError

copies do not wait for the rows that another card computes
-sender.wait_stream(torch.accelerator.current_stream(source))
test_batch_being_computed_is_waited_for

copies leave before values are computed
-departing.wait_stream(computing)
test_lanes_wait_for_what_was_computed

copies arrive while a device computes with the memory
-self._arriving[device].wait_stream(computing)
test_lanes_wait_for_what_was_computed

memory is given out that is still sent from
-computing.wait_stream(departing)
test_large_models_are_sent_in_lanes

a step does not wait for its parameters
-computing.wait_stream(self._arriving[device])
test_lanes_wait_for_what_was_computed

a device sends on what has not arrived
-self._departing[device].wait_stream(self._arriving[device])
test_large_models_are_sent_in_lanes

a piece arrives where the one before is being sent
-self._arriving[device].wait_event(event)
test_large_models_are_sent_in_lanes

what is unpacked does not count as written
-increment_version(parts)
test_unpacked_tensors_count_as_written: DID NOT RAISE

a step that fails does not wait for rows that are under way
-copied.synchronize()
test_pinned_batch_reusable_after_failure

any number of micro-batches is staged
-self._pinned[0].synchronize()
test_host_waits_before_staging_more: staged

inference does not wait until pinned memory was read
-_, event = self._pending.popitem()
-            event.synchronize()
+self._pending.popitem()
test_pinned_memory_free_after_inference

the host does not wait for the losses
-self._arrived.synchronize()
test_host_sleeps_until_losses_arrive: awake

a second pass does not wait for its card
-event = record_event(device)
-        event.synchronize()
test_second_pass_waits_for_each_card: AssertionError

the host waits for every micro-batch
-torch.accelerator.current_stream(self._device).wait_event(copied)
+copied.synchronize()
test_waits_do_not_grow_with_sub_steps: AssertionError

streams are taken anew from torch's pool
-return _duplicate(_streams[key])
+return torch.Stream(device)
test_engines_take_their_streams_once: AssertionError

memory that a copy writes is let go of when the copy is asked for
-self._groups[number] = copied, [target for _, target in requested]
+self._groups[number] = copied, []
test_memory_being_written_not_given_out

copies that are dropped are not waited for
-if self._groups:
-                self.synchronize()
test_memory_being_written_not_given_out

rows that are not pinned are not staged
-return torch.empty_like(tensor, pin_memory=True).copy_(tensor)
+return tensor
test_unpinned_rows_are_staged: AssertionError

rows of the first sub-step arrive after the parameters
-if replays:
+if False:
test_first_rows_arrive_beside_parameters: AssertionError

rows of the first sub-step arrive before a look
-replays = schedule.replays()
+replays = True
test_look_adds_at_most_a_tenth: AssertionError

the caller's thread stages rows for all replicas
-if not rows.markers and all(map(self.ahead.is_direct, rows.tensors())):
+if True:
test_first_rows_arrive_beside_parameters: AssertionError

rows of all replicas on a card arrive at once
-if share.device not in started:
+if True:
test_rows_of_one_card_arrive_in_turn: AssertionError

an error of the first rows does not say where
-with ReplicaNote(share, 0), use_device(share.device, ()):
+with use_device(share.device, ()):
test_first_rows_fail_whole_or_not_at_all: AttributeError

copies of the first rows enter a card that the engine does not use
-with ReplicaNote(share, 0), use_device(share.device, ()):
+with ReplicaNote(share, 0):
test_no_context_on_other_gpus: AssertionError

workers are on their default streams, not on the caller's
-stack.enter_context(_duplicate(stream))
test_steps_run_on_users_streams

gradients of a graph are not copied out
-return dict(zip(self.parts, copies, strict=True))
+return dict(self.parts)
test_gradients_readable_during_next_replay

the host reads what has not arrived
-iter_copies(elsewhere, HOST, Transfers(), "compute")
+[{k: t.to(HOST, non_blocking=True) for k, t in elsewhere.items()}]
test_values_read_by_host_have_arrived: AssertionError

a capture that failed is not ended
-give_up_capture(kernels, self._device, self._pool, has_ended=has_ended)
test_failed_capture_restores_allocator: Error

what is computed after a capture uses the graph's workspaces
-finally:
-            free_cublas_workspaces()
+finally:
+            pass
test_closed_engine_leaves_others_workspaces: AssertionError

a call does not wait for the streams of the call before
-stream.wait_stream(before)
test_calls_on_other_streams_each_time

gradients of earlier calls are not waited for
-present.wait_stream(stream)
test_calls_on_other_streams_in_one_loss

the streams of earlier calls do not wait for sums
-stream.wait_stream(present)
test_calls_on_other_streams_each_time

outputs of a call in a checkpoint are read too early
-of_thread.wait_stream(stream)
test_outputs_of_a_checkpointed_pair_are_waited_for

a capture that is lost is not tried again
-except CaptureLost:
-                    tape = self.record(task, graph, number)
+except CaptureLost:
+                    raise
test_waiting_thread_breaks_the_capture: AssertionError
"""
MUTATIONS = [read(entry) for entry in TABLE.strip().split("\n\n")]


def main() -> None:
    """Try all mutations, or those whose title has all arguments, two at a time."""
    faults = faults_of_the_table()
    words = sys.argv[1:]
    chosen = []
    for mutation in MUTATIONS:
        if all(word in mutation.title for word in words):
            chosen.append(mutation)
    with ThreadPoolExecutor(2) as pool:
        for mutation, fault in zip(chosen, pool.map(trial, chosen), strict=True):
            print(f"{mutation.title}: {fault or 'found'}", flush=True)
            if fault:
                faults.append(fault)
    sys.exit("\n".join(faults) if faults else 0)


def sources() -> dict[Path, str]:
    """The files of the engine, relative to the repository."""
    files: list[Path] = []
    for package in ENGINE:
        files += (ROOT / "scatterpar" / package).glob("*.py")
    return {file.relative_to(ROOT): file.read_text() for file in sorted(files)}


def faults_of_the_table() -> list[str]:
    """Texts that are not once in the engine, and waits that no mutation takes out."""
    patterns = {}
    for mutation in MUTATIONS:
        for text, _ in mutation.changes:
            patterns[text] = in_any_layout(text)
    faults = []
    texts_by_file = sources()
    for text, pattern in patterns.items():
        count = sum(len(pattern.findall(source)) for source in texts_by_file.values())
        if count != 1:
            faults.append(f"{text!r} is {count} times in the engine: mend the table")
    for file, source in texts_by_file.items():
        taken_out: set[int] = set()  # places of the source
        for pattern in patterns.values():
            for match in pattern.finditer(source):
                taken_out.update(range(*match.span()))
        for wait in WAITS.finditer(source):
            if wait.start() not in taken_out:
                line = source.count("\n", 0, wait.start()) + 1
                words = "waits, and nothing takes that out: mend the table"
                faults.append(f"{file}:{line} {words}")
    return faults


def trial(mutation: Mutation) -> str:
    """Why a mutation was not found as it has to be; empty if it was."""
    changed = sources()
    for path, source in changed.items():
        for text, replacement in mutation.changes:
            # A function: backslashes of the replacement mean themselves.
            source = in_any_layout(text).sub(lambda _, new=replacement: new, source)
        changed[path] = source
    how = "-W", "ignore", "-p", "nullcuda.plugin"
    run = run_on_copy(changed, str(ROOT / mutation.test), *how, timeout=1800)
    if run.returncode != 1:
        return f"{mutation.test} does not fail (pytest ends with {run.returncode})"
    if mutation.words not in run.stdout:
        return f"{mutation.test} fails without the words {mutation.words!r}"
    return ""


if __name__ == "__main__":
    main()
