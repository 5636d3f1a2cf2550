"""Is every promise tested? Each is broken in the engine, and a test has to fail.

    python -m tests.sabotage              all sabotages
    python -m tests.sabotage WORD...      those with all these words in their line

It prints a table of the sabotages, the promises that they break, and the tests that see
them, and ends with 1 if one is not seen.

A sabotage replaces a text in a function or method of the engine, in whatever file. If
the text is not there exactly once, the sabotage has to be mended: that is a failure,
too. Its test runs in a process of its own, which imports a copy of the package with the
changed text. These are forks of a server that has imported torch, which takes longer
than most of the tests.
"""

import argparse
import ast
import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
APART = ("checkup", "integrations", "train")  # packages on top of the engine
LIMIT_SECONDS = 300  # per sabotage: a hang, not a busy machine
IMPORTED = ["torch._dynamo", "numpy", "hypothesis", "pytest"]
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "setup.cfg"))


class Sabotage(NamedTuple):
    """The promise that it breaks, what it does, where, and the quick
    test that sees it.
    """

    promise: str
    what: str
    place: str  # a function, a class, or a method as ``Class.method``
    text: str
    instead: str
    seen_by: str  # the name of a test

    @property
    def line(self):
        """The columns of the table that are known beforehand."""
        return f"{self.what} ({self.place}) | {self.promise}"


# Per sabotage: what it does; the place and the test that sees it; the text, and the
# text instead.
TABLE = r"""
# exact
the first micro-batch counts one row more
  term_counts -> test_training_is_that_of_one_device
  float(stop - start) for => float(stop - start + (start == 0)) for
the last micro-batch of a share is dropped
  Substeps.train -> test_training_is_that_of_one_device
  [:max_substeps] => [: max_substeps or max(1, len(self._task.weights) - 1)]
a sum is taken for a mean
  compute_loss_weights -> test_a_step_is_that_of_plain_torch
  if request.is_mean: => if True:
count= is ignored by engine.loss
  ScatterOnceParallel.loss -> test_a_loop_gets_what_plain_torch_gives_it
  reduction, count, scaler => reduction, None, scaler
ignore_index counts unless it is -100
  terms_of_rows -> test_a_step_is_that_of_plain_torch
  option_of(criterion, "ignore_index", None) => None
class weights do not count
  terms_of_rows -> test_a_step_is_that_of_plain_torch
  if class_weight is not None: => if False:
gradients that share memory are added to twice
  unalias -> test_a_loop_gets_what_plain_torch_gives_it
  leaves[number].grad = gradient.clone() => pass
of a parameter that model and criterion share, the criterion's gradient alone arrives
  reduce_gradients -> test_a_loop_gets_what_plain_torch_gives_it
  functools.reduce(_plus, parts) if parts else None => parts[-1] if parts else None
a parameter that no replica used gets zeros
  _summed -> test_used_once_then_unused_keeps_the_gradient_it_had
  sums.get(number)) => sums.get(number, torch.zeros_like(leaf)))
the scale of a scaler is left out
  Substeps.run -> test_a_grad_scaler_scales_the_loss_as_in_plain_torch
  weight * request.scale => weight
the factor that arrives at engine.loss is left out
  _ReturnGradients.backward -> test_a_loop_gets_what_plain_torch_gives_it
  gradient.mul_(factor_of_gradients) => pass
outputs are joined in another order
  returned_outputs -> test_return_outputs
  outputs_of_share, attempt.request.dim => outputs_of_share[::-1], attempt.request.dim
outputs of plans by cost stay in the plan's order
  returned_outputs -> test_outputs_are_one_entry_in_the_order_of_the_batch
  if attempt.plan.order: => if False:
batch statistics leave out how the means of micro-batches differ
  pooled -> test_the_first_layer_has_what_plain_torch_has
  (_sum(between) + _sum(within)) => _sum(within)
synchronised statistics leave out how the means of replicas differ
  pooled -> test_moments_of_two_replicas_are_pooled_by_hand
  between + within => within
the gradient of a synchronised layer leaves out the statistics
  Normalise.backward -> test_steps_are_those_of_batch_norm_over_the_rows_of_all_replicas
  of_rows -= correction => pass
sub-steps add up in the parameters' dtype, whatever accumulate_dtype= says
  sum_dtype -> test_512_ones_add_up_to_512_and_are_added_to_what_is_there
  if accumulate_dtype is None: => if True:
ranks weigh alike, however many rows they have
  Ranks._exchange -> test_a_step_of_ranks_is_that_of_one_device
  weight / total if total else 0.0 => 1.0 / self.size
the second pass draws other random numbers
  Passes._recompute -> test_same_seed_same_bits_and_the_random_state_moves_as_in_an_ordinary_step
  self._attempt.generators.set_state(replica, self._states[sub_step]) => pass
micro_batch_size= is exceeded
  _plan -> test_every_plan
  math.ceil(Fraction(stop - start, limits[replica])) => max(1, (stop - start) // limits[replica])
steps are not checked
  Verifier._check -> test_a_wrong_gradient_is_told_before_anything_changes
  if kind.is_due(question.ranges, details): => if False:
0-dim outputs of a ragged share are averaged with equal weights
  returned_outputs -> test_return_outputs
  dim, weights, rows) => dim, [1.0] * len(rows), rows)
0-dim outputs of inference are averaged with equal weights
  compute_loss_weights -> test_numbers_without_rows_are_averaged_over_the_rows
  factors = [float(stop - start) for start, stop in spans] => factors = [1.0] * len(spans)
engine.map calls the user's own method for all replicas
  _Work.__init__ -> test_each_replica_calls_its_own_method
  [replica.copy_of(function) for replica in replicas] => [function for _ in replicas]
pad= of engine.map is ignored
  map_rows -> test_tensors_are_joined_padded_or_refused
  lists, row_function.pad) => lists)
inference leaves rows in the order of a plan by cost
  join_on_master -> test_inference_puts_back_whatever_goes_by_row
  order=plan.order => order=()
accumulate_dtype= is ignored for float16
  sum_dtype -> test_the_sum_is_rounded_once
  if accumulate_dtype is None: => if accumulate_dtype is None or dtype == torch.float16:
engine.loss forgets the factor of a scaler
  commit -> test_a_grad_scaler_scales_the_loss_as_in_plain_torch
  pairs, outcome.request.scale) => pairs, 1.0)
micro-batches weigh alike in batch statistics, however many rows they have
  pooled -> test_the_first_layer_has_what_plain_torch_has
  [count / total for count in counts] => [1 / len(counts) for _ in counts]
batch statistics move in inference alone
  commit -> test_the_first_layer_has_what_plain_torch_has
  outcome.statistics.values() if outcome.statistics else [] => []
engine.check passes whatever it finds
  relative_difference -> test_a_difference_is_measured_and_has_a_meaning
  if relative > worst: => if False:
a micro-batch without terms is divided by zero
  compute_loss_weights -> test_a_batch_without_terms_has_a_backward_pass_that_gives_nothing
  count / total if count else 0.0 => count / total
the noise of gradients counts a replica too many
  noise_of -> test_the_formula
  / (norms.replicas - 1) => / norms.replicas
gather averages 0-dim entries with equal weights
  gather -> test_gather_of_lists_along_any_dimension_and_of_what_has_no_rows
  join_rows(moved, dim, rows) => join_rows(moved, dim, [1] * len(rows))
an owner's new values of a sharded optimizer reach no other device
  ShardedOptimizer._step_on_owners -> test_the_bits_of_the_plain_class_and_no_parameter_is_sent_again
  if parameter in copies.numbers => if self._owners[parameter] == self._memories[0]
rounding of shares makes a sub-step more
  _plan -> test_rounding_of_the_given_numbers_makes_no_sub_step_more
  number - _ROUNDING) => number)
costs are dealt without looking at shares
  _deal -> test_loads_are_in_proportion_to_shares
  / shares[replica] => / 1
rank 0's parameters are not sent to other ranks
  Ranks.__init__ -> test_the_first_ranks_parameters_are_taken_over
  self._collectives.broadcast_from_rank_0(module) => pass
a gradient that arrives at another network, and that no graph shows, is not refused
  user_state_guarded -> test_the_error_names_what_it_arrives_at
  if leaf.grad is not None: => if False:
two replicas are in one criterion at a time
  criterion_lock -> test_a_function_that_replicas_share_computes_one_loss_at_a_time
  if is_module else threading.Lock() =>
# once
a copy is counted twice
  Transfers.copy -> test_every_byte_once
  self.count(tensor, phase) => self.count(tensor, phase), self.count(tensor, phase)
a copy is not counted
  Transfers.copy_into -> test_every_byte_once
  self.count(source, phase) => pass
parameters are sent at every step, changed or not
  Broadcast.update -> test_frozen_parameters_go_out_once_and_do_not_come_back
  - unchanged => - set()
an automatic accum is searched again in each step
  Search._keep -> test_the_fewest_sub_steps_that_fit_are_found_and_kept
  self._fit.accum = candidate.accum => pass
an evaluation changes the number of sub-steps in training
  Search.__init__ -> test_training_and_evaluation_have_numbers_of_their_own
  if request.backward: => if True:
generators that a function moved in an undone try stay moved
  map_rows -> test_what_undone_tries_of_inference_drew_and_wrote_is_undone
  save_referents(attempt, referents_of(attempt, function)) => pass
# never stale
values count as sent before all devices have them
  Broadcast.update -> test_a_failed_refresh_is_made_good
  self.invalidate() => self._sent = dict(enumerate(present))
a frozen parameter is sent once
  Broadcast.update -> test_every_write_is_followed_however_often
  - unchanged => - unchanged - {i for i in self._sent if not self._tensors[i].requires_grad}
a parameter written through .data is not sent
  Broadcast.update -> test_edits_that_leave_no_version_travel
  - unchanged => - unchanged - {i for i, old in self._sent.items() if old == present[i]}
replicas do not follow training, nor other plain values
  ReplicaSet._update_in_place -> test_the_next_step_obeys
  for replica in self.replicas: => for replica in ():
replicas do not follow requires_grad
  ReplicaSet._update_in_place -> test_the_next_step_obeys
  != self._required: => != self._required and not self._required:
buffers of the last replica are kept
  ReplicaSet.buffers_after -> test_master_keeps_those_of_replica_0_bit_for_bit
  first = self.replicas[0] => first = self.replicas[-1]
replicas keep the gradients of the last step
  ScatterOnceParallel._attempt -> test_used_once_then_unused_keeps_the_gradient_it_had
  self._replicas.clear_step_state() => pass
# all or nothing
settings of the process stay as replicas leave them
  Workers.parallel_apply -> test_settings_are_after_a_step_what_they_were_before_it
  restore_settings(settings) => pass
buffers are not restored if a hook on a gradient raises
  _add_with_hooks -> test_buffers_are_unchanged_if_a_hook_on_a_gradient_raises
  restore_after(error, buffers.restore) => pass
buffers are written after hooks on gradients have run
  _add_with_hooks -> test_what_a_hook_on_a_gradient_writes_into_buffers_and_parameters_stays
  _add(pairs, attempt, observed=True) => _add(pairs, attempt, observed=True), buffers.write()
a rollback forgets .grad
  Undo.restore -> test_hooks_on_the_node_that_accumulates_run_once_and_may_fail
  partial(setattr, leaf, "grad", gradient) => (lambda: None)
a rollback forgets values
  Undo.restore -> test_statistics_and_generators_that_a_criterion_moved_are_put_back
  partial(write, tensor, value) => (lambda: None)
a rollback forgets torch's generators
  Undo.restore -> test_a_failed_step_leaves_the_generator_as_it_was
  [self._generators.rollback] => []
a rollback forgets the user's generators
  Undo.restore -> test_statistics_and_generators_that_a_criterion_moved_are_put_back
  partial(generator.set_state, state) => (lambda: None)
a loss that is not finite is committed in spite of check_finite=True
  Substeps._weighted_sum -> test_names_replica_and_sub_step_and_changes_nothing
  if self._request.check_finite and not math.isfinite(loss): => if False:
tries of an automatic accum leave what they wrote
  Search.run -> test_a_second_try_starts_anew
  result.attempt.undo.restore() => pass
the gradients of a trial stay while the next try runs
  Search.run -> test_the_gradients_of_a_trial_are_freed_before_the_next_try
  del result => pass
trials of an automatic accum call the user's function of outputs
  Search._trial -> test_a_function_of_outputs_is_not_called_by_trials
  replace(self._request, return_outputs=False) => self._request
inputs are kept while the criterion runs
  forward -> test_inputs_that_no_graph_needs_are_freed_before_the_criterion
  del rows, inputs => pass
Ctrl-C is forgotten
  Workers._wait -> test_a_long_step_ends_at_its_next_sub_step
  job.errors[_CALLER] = error => pass
threads that were abandoned keep replicas that the next step uses
  ScatterOnceParallel._attempt -> test_the_second_time_does_not_wait_for_a_replica_that_is_stuck
  self._replicas.discard() => pass
a rank that fails lets the others wait
  Ranks.failing_together -> test_a_rank_that_fails_fails_all
  if not self._error_is_common: => if False:
two engines may step on one module at once
  Workers.exclusive -> test_two_engines_on_one_module_in_two_threads
  _claims.setdefault(key, self) is not self: => _claims.setdefault(key, self) is None:
the caller's tensors may be written by a sub-step
  ShareLoader.load -> test_in_place_layers_do_not_write_the_caller_s_tensors
  self.at_source(sub_step).unwrapped(copy=True) => self.at_source(sub_step).unwrapped()
# same bits
gradients are added in any order
  sum_in_order -> test_the_sum_has_the_same_bits_every_time
  tree_pairs(len(sums))
  => sorted(((0, i) for i in range(1, len(sums))), key=lambda _: __import__("os").urandom(4))
all replicas of a rank draw the same numbers
  Generators._generator -> test_every_replica_of_every_rank_draws_masks_of_its_own
  replica + self._replica_offset => self._replica_offset
a second pass and checks move the replicas' generators
  ReplicaTask.isolated -> test_same_seed_same_bits_and_the_random_state_moves_as_in_an_ordinary_step
  restored(partial(generators.set_state, replica, state)) => contextlib.nullcontext()
numbers that replicas draw in inference are drawn again
  Mapped.commit -> test_inference_draws_on_and_the_seed_decides_it
  self.attempt.generators.commit() => pass
numbers that only another replica than the first draws are drawn again
  Generators.commit -> test_a_replica_other_than_the_first_drawing_moves_the_generator
  for _, device in drawn} => for number, device in drawn if not number}
# as in plain torch
workers compute under autocast in its default dtype
  CallerContext.__init__ -> test_autocast_dtype_without_its_cache
  partial(torch.autocast, kind, dtype) => partial(torch.autocast, kind)
workers do not see the caller's context variables
  CallerContext.run -> test_contextvars
  self._variables.copy().run(self._run, device, work) => self._run(device, work)
hooks on parameters are left out
  _add -> test_hooks_on_parameters_act_once_on_the_whole_gradient
  if not observed and not have_gradient => if not have_gradient
keys of a state dict begin with module.
  Wrapper.state_dict -> test_keys_are_the_module_s_and_load_with_or_without_a_prefix
  return self._inner.state_dict(*args, **kwargs) => return super().state_dict(*args, **kwargs)
compile= is forgotten, and replicas run eagerly
  Compiler.compiled_call -> test_it_trains_as_the_eager_engine_does
  compile_fn(run) => run
inference in training mode moves no statistics
  map_rows -> test_inference_moves_statistics_as_a_module_does
  if not any(part.training for part in module.modules()): => if True:
workers do not see the caller's hooks on saved tensors
  CallerContext.__init__ -> test_saved_tensors_hooks
  if hooks: => if False:
hooks on parameters run in engine.check
  compare -> test_it_leaves_no_trace
  hooks_taken_off(leaves) => hooks_taken_off([])
# clear errors
the user's exception is replaced
  Workers.parallel_apply -> test_the_lowest_replica_speaks_and_the_others_are_noted_once
  raise error => raise RuntimeError(str(error))
the note on an error names no sub-step
  ReplicaNote.__exit__ -> test_the_words_of_a_note
  if self.sub_step is not None: => if False:
a closed engine steps on
  Workers._refuse_if_closed -> test_close_twice_and_close_before_use
  if self._closed: => if False:
a second backward pass of engine.loss gives nothing
  _ReturnGradients.backward -> test_a_second_backward_pass_is_an_error
  raise RuntimeError(_TWICE) => return (None, None, None, *[None] * (len(ctx.needs_input_grad) - 3))
a report says that nothing was tried again
  Outcome.report -> test_the_result_is_that_of_the_same_fixed_accum_bit_for_bit
  retries=self.retries => retries=0
copies that arrive altered are not noticed
  ScatterOnceParallel._attempt -> test_the_engine_refuses_devices_whose_memory_brings_other_bytes
  check_links(self.device_ids) => pass
the note on an error numbers rows in the order of a plan by cost
  Share.rows_of -> test_a_note_names_the_rows_of_a_micro_batch_cut_by_cost
  if self.row_numbers: => if False:
"""


def _read(table):
    promise = ""
    for entry in re.split(r"\n(?! )", table.strip()):
        what, *rest = map(str.strip, entry.splitlines())
        if not rest:
            promise = what[2:]
            continue
        place, seen_by = rest[0].split(" -> ")
        text, instead = " ".join(rest[1:]).split(" =>")
        yield Sabotage(promise, what, place, text, instead.strip(), seen_by)


SABOTAGES = [*_read(TABLE)]


def main():
    """Try all sabotages, or some, and print which test sees each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only lines that have all of these")
    words = parser.parse_args().words
    tried = [each for each in SABOTAGES if all(word in each.line for word in words)]
    print("sabotage | promise | seen by")
    seen = 0
    with ThreadPoolExecutor(2) as pool:
        for sabotage, test in zip(tried, pool.map(failed_test, tried), strict=True):
            print(f"{sabotage.line} | {test or 'NOBODY'}", flush=True)
            seen += bool(test)
    print(f"{seen} of {len(tried)} sabotages are seen")
    sys.exit(seen < len(tried))


def failed_test(sabotage):
    """The test that fails under a sabotage; empty if it passes, or hangs."""
    with copy_of_package(dict([sabotaged(sabotage)])) as copy:
        output = Path(copy, "output")
        test = [name_of_test(sabotage), str(output)]
        process = _forks().Process(target=_run_test, args=(copy, *test))
        process.start()
        process.join(LIMIT_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
            return ""
        said = output.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", said, re.MULTILINE)
    return found[1] if found else ""


@functools.cache
def _forks():
    """Of `multiprocessing`, processes that begin with what ``IMPORTED`` names, or, where
    there are no forks, from nothing.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _run_test(copy, test, output):
    """Be pytest with one test, on a copy of the package; it writes into ``output``."""
    with open(output, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ |= environment_of(copy)
    sys.path[:0] = paths_of(copy)
    os.chdir(copy)
    import pytest

    status = pytest.main([*PYTEST, f"--rootdir={ROOT}", test])
    sys.stdout.flush()
    os._exit(status)  # whatever threads a sabotage has left


@contextlib.contextmanager
def copy_of_package(changed):
    """A folder with a copy of the package, in which the files ``changed`` have other
    texts.
    """
    with tempfile.TemporaryDirectory(prefix="sabotage") as copy:
        shutil.copytree(ROOT / "scatterpar", Path(copy, "scatterpar"))
        for path, source in changed.items():
            Path(copy, path).write_text(source, encoding="utf-8")
        yield copy


def paths_of(copy):
    """Where Python finds the copy, and the tests."""
    return [copy, str(ROOT / "tests"), str(ROOT)]


def environment_of(copy):
    """Variables of a process that runs a test on a copy of the package."""
    return {"PYTHONPATH": os.pathsep.join(paths_of(copy)), "OMP_NUM_THREADS": "1"}


def run_on_copy(changed, test, *options, timeout):
    """Run a test on a copy of the package, in which the files ``changed`` have other
    texts, in an interpreter of its own.
    """
    with copy_of_package(changed) as copy:
        environment = os.environ | environment_of(copy)
        pytest = [sys.executable, "-m", "pytest", *PYTEST]
        command = [*pytest, *options, f"--rootdir={ROOT}", test]
        how = {"cwd": copy, "env": environment, "capture_output": True, "text": True}
        return subprocess.run(command, **how, check=False, timeout=timeout)


def sabotaged(sabotage):
    """The file of the engine that a sabotage changes, and its text afterwards."""
    found = []
    for path, source, tree in _engine():
        nodes = [tree]
        for part in sabotage.place.split("."):
            inside = [child for node in nodes for child in getattr(node, "body", [])]
            nodes = [child for child in inside if getattr(child, "name", "") == part]
        for node in nodes:
            body = ast.get_source_segment(source, node)
            for match in in_any_layout(sabotage.text).finditer(body):
                changed = body[: match.start()] + sabotage.instead + body[match.end() :]
                found.append((path, source.replace(body, changed)))
    if len(found) != 1:
        times = f"{len(found)} times in {sabotage.place}"
        raise LookupError(
            f"{sabotage.text!r} is {times} of the engine: mend tests/sabotage.py"
        )
    return found[0]


def in_any_layout(text):
    """A pattern that finds ``text`` however a formatter has cut it into lines."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    patterns = [r",?\s*" * (token in ")]}") + re.escape(token) for token in tokens]
    return re.compile(r"\s*".join(patterns))


@functools.cache
def _engine():
    """The files of the engine, relative to the repository: their texts, and what these
    define.
    """
    files = [
        file.relative_to(ROOT) for file in sorted((ROOT / "scatterpar").rglob("*.py"))
    ]
    paths = [path for path in files if path.parts[1] not in APART]
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
    return [
        (path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)
    ]


def name_of_test(sabotage):
    """The test that sees a sabotage, as pytest names it; empty if there is none of that
    name.
    """
    begins = f"\ndef {sabotage.seen_by}("
    found = [f"{file}::{sabotage.seen_by}" for file, text in _tests() if begins in text]
    return found[0] if len(found) == 1 else ""


@functools.cache
def _tests():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [(file, file.read_text(encoding="utf-8")) for file in files]


if __name__ == "__main__":
    main()
