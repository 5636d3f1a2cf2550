"""Is every promise tested? Each is broken in the engine, and a test has to fail.

    python -m tests.sabotage              with the test of each sabotage
    python -m tests.sabotage --contract   with all of `pytest -m contract`
    python -m tests.sabotage WORD...      only the sabotages with all these words in their line

It prints a table of the sabotages, the promises that they break, and the tests that see them, and
ends with 1 if one is not seen.

A sabotage replaces a text in a function or method of the engine, in whatever file. If the text is
not there exactly once, the sabotage has to be mended: that is a failure, too.

Tests are collected once. Each sabotage is tried in a fork, where the function gets the code of the
changed text. Processes that tests start import a copy of the package with that text.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
APART = ("checkup", "integrations", "train")  # packages on top of the engine
LIMIT_SECONDS = 300  # per sabotage: a hang, not a busy machine
TOTAL_SECONDS = 3000  # for the whole table, which takes a few minutes on a quiet machine

EXACT, ONCE, WHOLE = "exact", "once", "all or nothing"
STALE, BITS, ERRORS, USER = "never stale", "same bits", "clear errors", "as in plain torch"


class Sabotage(NamedTuple):
    """The promise that it breaks, what it does, where, and the quick test that sees it."""

    promise: str
    what: str
    place: str  # a function, a class, or a method as ``Class.method``
    text: str
    instead: str
    seen_by: str = ""  # the name of a test

    @property
    def line(self) -> str:
        """The columns of the table that are known beforehand."""
        return f"{self.what} ({self.place}) | {self.promise}"


SABOTAGES = [
    Sabotage(
        EXACT,
        "the first micro-batch counts one row more",
        "term_counts",
        "rows_of_each = [float(stop - start) for start, stop in spans]",
        "rows_of_each = [float(stop - start + (start == 0)) for start, stop in spans]",
        "test_training_is_that_of_one_device",
    ),
    Sabotage(
        EXACT,
        "the last micro-batch of a share is dropped",
        "train_share",
        "enumerate(task.weights[: attempt.max_substeps])",
        "enumerate(task.weights[: attempt.max_substeps or max(1, len(task.weights) - 1)])",
        "test_training_is_that_of_one_device",
    ),
    Sabotage(
        EXACT,
        "a sum is taken for a mean",
        "compute_loss_weights",
        "if request.is_mean:",
        "if True:",
        "test_a_step_is_that_of_plain_torch",
    ),
    Sabotage(
        EXACT,
        "count= is ignored by engine.loss",
        "ScatterOnceParallel.loss",
        "reduction, count, scaler",
        "reduction, None, scaler",
        "test_a_loop_gets_what_plain_torch_gives_it",
    ),
    Sabotage(
        EXACT,
        "ignore_index counts unless it is -100",
        "terms_of_rows",
        'option_of(criterion, "ignore_index", -100)',
        "-100",
        "test_a_step_is_that_of_plain_torch",
    ),
    Sabotage(
        EXACT,
        "class weights do not count",
        "terms_of_rows",
        "if class_weight is not None:",
        "if False:",
        "test_a_step_is_that_of_plain_torch",
    ),
    Sabotage(
        EXACT,
        "gradients that share memory are added to twice",
        "unalias",
        "leaves[number].grad = gradient.clone()",
        "pass",
        "test_a_loop_gets_what_plain_torch_gives_it",
    ),
    Sabotage(
        EXACT,
        "of a parameter that model and criterion share, the criterion's gradient alone arrives",
        "reduce_gradients",
        "functools.reduce(plus, both) if both else None",
        "both[-1] if both else None",
        "test_parameters_of_a_criterion_get_theirs",
    ),
    Sabotage(
        EXACT,
        "a parameter that no replica used gets zeros",
        "reduce_gradients",
        "sums.get(i))",
        "sums.get(i, torch.zeros_like(each.tensors[i])))",
        "test_used_once_then_unused_keeps_the_gradient_it_had",
    ),
    Sabotage(
        EXACT,
        "the scale of a scaler is left out",
        "EagerSubsteps.run",
        "weight * self._request.scale",
        "weight",
        "test_a_grad_scaler_scales_the_loss_as_in_plain_torch",
    ),
    Sabotage(
        EXACT,
        "the factor that arrives at engine.loss is left out",
        "_ReturnGradients.backward",
        "torch._foreach_mul_(gradients, by)",
        "pass",
        "test_parameters_of_a_criterion_get_theirs",
    ),
    Sabotage(
        EXACT,
        "outputs are joined in another order",
        "returned_outputs",
        "join_rows(pieces, attempt",
        "join_rows(pieces[::-1], attempt",
        "test_return_outputs",
    ),
    Sabotage(
        EXACT,
        "outputs of plans by cost stay in the plan's order",
        "returned_outputs",
        "if attempt.plan.order:",
        "if False:",
        "test_outputs_are_one_entry_in_the_order_of_the_batch",
    ),
    Sabotage(
        EXACT,
        "batch statistics leave out how the means of micro-batches differ",
        "_pooled",
        "(_sum(between) + _sum(within))",
        "_sum(within)",
        "test_the_first_layer_has_what_plain_torch_has",
    ),
    Sabotage(
        EXACT,
        "sub-steps add up in the parameters' dtype, whatever accumulate_dtype= says",
        "sum_dtype",
        "return dtype if accumulate_dtype is None",
        "return dtype if True",
        "test_512_ones_add_up_to_512_and_are_added_to_what_is_there",
    ),
    Sabotage(
        EXACT,
        "ranks weigh alike, however many rows they have",
        "Ranks._exchange",
        "factor = outcome.terms / terms if terms else 0.0",
        "factor = 1.0 / self.size",
        "test_a_step_of_ranks_is_that_of_one_device",
    ),
    Sabotage(
        EXACT,
        "the second pass draws other random numbers",
        "second_pass",
        "attempt.generators.set_state(share.replica, states[number])",
        "pass",
        "test_same_seed_same_bits_and_the_random_state_moves_as_in_an_ordinary_step",
    ),
    Sabotage(
        EXACT,
        "micro_batch_size= is exceeded",
        "_plan",
        "-(-(stop - start) // limits[replica])",
        "max(1, (stop - start) // limits[replica])",
        "test_every_plan",
    ),
    Sabotage(
        EXACT,
        "steps are not checked",
        "Verifier.check",
        "if kind.is_due(question.ranges, details):",
        "if False:",
        "test_a_wrong_gradient_is_told_before_anything_changes",
    ),
    Sabotage(
        EXACT,
        "0-dim outputs of a ragged share are averaged with equal weights",
        "returned_outputs",
        "weights, rows))",
        "[1.0] * len(rows), rows))",
        "test_return_outputs",
    ),
    Sabotage(
        EXACT,
        "0-dim outputs of inference are averaged with equal weights",
        "compute_loss_weights",
        "factors = [float(stop - start) for start, stop in spans]",
        "pass",
        "test_numbers_without_rows_are_averaged_over_the_rows",
    ),
    Sabotage(
        EXACT,
        "engine.map calls the user's own method for all replicas",
        "_work",
        "[replica.copy_of(function) for replica in replicas]",
        "[function for _ in replicas]",
        "test_each_replica_calls_its_own_method",
    ),
    Sabotage(
        EXACT,
        "pad= of engine.map is ignored",
        "map_rows",
        "outputs, lists, pad)",
        "outputs, lists)",
        "test_tensors_are_joined_padded_or_refused",
    ),
    Sabotage(
        EXACT,
        "inference leaves rows in the order of a plan by cost",
        "join_on_master",
        '"order": plan.order',
        '"order": ()',
        "test_inference_puts_back_whatever_goes_by_row",
    ),
    Sabotage(
        EXACT,
        "accumulate_dtype= is ignored for float16",
        "sum_dtype",
        "dtype if accumulate_dtype is None else",
        "dtype if accumulate_dtype is None or dtype == torch.float16 else",
        "test_the_sum_is_rounded_once",
    ),
    Sabotage(
        EXACT,
        "engine.loss forgets the factor of a scaler",
        "commit",
        "pairs, outcome.request.scale)",
        "pairs, 1.0)",
        "test_a_grad_scaler_scales_the_loss_as_in_plain_torch",
    ),
    Sabotage(
        EXACT,
        "micro-batches weigh alike in batch statistics, however many rows they have",
        "_pooled",
        "[count / total for count in counts]",
        "[1 / len(counts) for _ in counts]",
        "test_the_first_layer_has_what_plain_torch_has",
    ),
    Sabotage(
        EXACT,
        "batch statistics move in inference alone",
        "commit",
        "outcome.statistics.values() if outcome.statistics else []",
        "[]",
        "test_the_first_layer_has_what_plain_torch_has",
    ),
    Sabotage(
        EXACT,
        "engine.check passes whatever it finds",
        "relative_difference",
        "worst = max(errors, default=0.0)",
        "errors = [0.0] * len(errors)\n    worst = 0.0",
        "test_a_difference_is_measured_and_has_a_meaning",
    ),
    Sabotage(
        EXACT,
        "a micro-batch without terms is divided by zero",
        "compute_loss_weights",
        "count / total if count else 0.0",
        "count / total",
        "test_a_batch_without_terms_has_a_backward_pass_that_gives_nothing",
    ),
    Sabotage(
        EXACT,
        "the noise of gradients counts a replica too many",
        "noise_of",
        "/ (replicas - 1)",
        "/ replicas",
        "test_the_formula",
    ),
    Sabotage(
        EXACT,
        "gather averages 0-dim entries with equal weights",
        "gather",
        "join_rows(moved, dim, rows)",
        "join_rows(moved, dim, [1] * len(rows))",
        "test_gather_of_lists_along_any_dimension_and_of_what_has_no_rows",
    ),
    Sabotage(
        EXACT,
        "an owner's new values of a sharded optimizer reach no other device",
        "ShardedOptimizer.step",
        "for p in updated if p in copies}",
        "for p in updated if p in copies and self._owners[p] == self._memories[0]}",
        "test_the_bits_of_the_plain_class_and_no_parameter_is_sent_again",
    ),
    Sabotage(
        EXACT,
        "rounding of shares makes a sub-step more",
        "_in_proportion",
        "number - _ROUNDING",
        "number",
        "test_rounding_of_the_given_numbers_makes_no_sub_step_more",
    ),
    Sabotage(
        EXACT,
        "costs are dealt without looking at shares",
        "plan_by_cost",
        "/ shares[r]",
        "/ 1",
        "test_loads_are_in_proportion_to_shares",
    ),
    Sabotage(
        EXACT,
        "rank 0's parameters are not sent to other ranks",
        "Ranks.__init__",
        "self._collectives.broadcast_from_rank_0(module)",
        "pass",
        "test_the_first_ranks_parameters_are_taken_over",
    ),
    Sabotage(
        EXACT,
        "a gradient that arrives at another network, and that no graph shows, is not refused",
        "compute",
        "if leaf.grad is not None:",
        "if False:",
        "test_the_error_names_what_it_arrives_at",
    ),
    Sabotage(
        EXACT,
        "two replicas are in one criterion at a time",
        "criterion_lock",
        "if is_module else threading.Lock()",
        "",
        "test_a_function_that_replicas_share_computes_one_loss_at_a_time",
    ),
    Sabotage(
        ONCE,
        "a copy is counted twice",
        "Transfers.copy",
        "self.count(tensor, phase)",
        "self.count(tensor, phase), self.count(tensor, phase)",
        "test_every_byte_once",
    ),
    Sabotage(
        ONCE,
        "a copy is not counted",
        "Transfers.copy_into",
        "self.count(source, phase)",
        "pass",
        "test_every_byte_once",
    ),
    Sabotage(
        ONCE,
        "parameters are sent at every step, changed or not",
        "Broadcast.update",
        "- unchanged",
        "- set()",
        "test_frozen_parameters_go_out_once_and_do_not_come_back",
    ),
    Sabotage(
        ONCE,
        "an automatic accum is searched again in each step",
        "AutoAccum.fit",
        "start, self.accum = self.accum, number",
        "start = self.accum",
        "test_the_fewest_sub_steps_that_fit_are_found_and_kept",
    ),
    Sabotage(
        STALE,
        "a frozen parameter is sent once",
        "Broadcast.update",
        "changed = set(range(len(self._tensors))) - unchanged",
        "changed = {\n"
        "            i\n"
        "            for i in set(range(len(self._tensors))) - unchanged\n"
        "            if i not in self._sent or self._tensors[i].requires_grad\n"
        "        }",
        "test_every_write_is_followed_however_often",
    ),
    Sabotage(
        STALE,
        "a parameter written through .data is not sent",
        "Broadcast.update",
        "changed = set(range(len(self._tensors))) - unchanged",
        "changed = {\n"
        "            i\n"
        "            for i in set(range(len(self._tensors))) - unchanged\n"
        "            if self._sent.get(i) != self._versions[i]\n"
        "        }",
        "test_edits_that_leave_no_version_travel",
    ),
    Sabotage(
        STALE,
        "replicas do not follow training, nor other plain values",
        "ReplicaSet._update_in_place",
        "(self._state, *(replica.state for replica in self.replicas))",
        "(self._state,)",
        "test_the_next_step_obeys",
    ),
    Sabotage(
        STALE,
        "replicas do not follow requires_grad",
        "ReplicaSet._update_in_place",
        "!= self._required:",
        "!= self._required and not self._required:",
        "test_the_next_step_obeys",
    ),
    Sabotage(
        STALE,
        "buffers of the last replica are kept",
        "ReplicaSet.buffers_after",
        "first = self.replicas[0]",
        "first = self.replicas[-1]",
        "test_master_keeps_those_of_replica_0_bit_for_bit",
    ),
    Sabotage(
        STALE,
        "replicas keep the gradients of the last step",
        "ScatterOnceParallel._attempt",
        "self._replicas.clear_step_state()",
        "pass",
        "test_used_once_then_unused_keeps_the_gradient_it_had",
    ),
    Sabotage(
        WHOLE,
        "a rollback forgets .grad",
        "Attempt.undo",
        'partial(setattr, leaf, "grad", value)',
        "(lambda: None)",
        "test_hooks_on_the_node_that_accumulates_run_once_and_may_fail",
    ),
    Sabotage(
        WHOLE,
        "a rollback forgets values",
        "Attempt.undo",
        "partial(write, tensor, value)",
        "(lambda: None)",
        "test_statistics_that_a_criterion_moved_are_put_back",
    ),
    Sabotage(
        WHOLE,
        "a rollback forgets torch's generators",
        "Attempt.undo",
        "self.generators.rollback, ",
        "",
        "test_a_failed_step_leaves_the_generator_as_it_was",
    ),
    Sabotage(
        WHOLE,
        "a rollback forgets the user's generators",
        "Attempt.undo",
        "partial(generator.set_state, state)",
        "(lambda: None)",
        "test_a_failed_step_restores_a_generator_that_the_criterion_closes_over",
    ),
    Sabotage(
        WHOLE,
        "a loss that is not finite is committed in spite of check_finite=True",
        "train_share",
        "if request.check_finite and not math.isfinite(value):",
        "if False:",
        "test_names_replica_and_sub_step_and_changes_nothing",
    ),
    Sabotage(
        WHOLE,
        "tries of an automatic accum leave what they wrote",
        "AutoAccum.fit",
        "max_substeps=2, retain_rows=False).attempt.undo()",
        "max_substeps=2, retain_rows=False)",
        "test_a_second_try_starts_anew",
    ),
    Sabotage(
        WHOLE,
        "Ctrl-C is forgotten",
        "Workers._wait",
        "job.errors[_CALLER] = error",
        "pass",
        "test_a_long_step_ends_at_its_next_sub_step",
    ),
    Sabotage(
        WHOLE,
        "threads that were abandoned keep replicas that the next step uses",
        "ScatterOnceParallel._attempt",
        "self._replicas.discard()",
        "pass",
        "test_the_second_time_does_not_wait_for_a_replica_that_is_stuck",
    ),
    Sabotage(
        WHOLE,
        "a rank that fails lets the others wait",
        "Ranks.reduce_outcome",
        "if not is_common and (others := self._collectives.report_failure()):",
        "if others := ():",
        "test_a_rank_that_fails_fails_all",
    ),
    Sabotage(
        WHOLE,
        "two engines may step on one module at once",
        "Workers.exclusive",
        "_claims.setdefault(key, self) is not self:",
        "_claims.setdefault(key, self) is None:",
        "test_two_engines_on_one_module_in_two_threads",
    ),
    Sabotage(
        WHOLE,
        "the caller's tensors may be written by a sub-step",
        "ShareLoader.load",
        "return self._sliced(number, _COPIED)",
        "return self.rows_at_source(number)",
        "test_in_place_layers_do_not_write_the_caller_s_tensors",
    ),
    Sabotage(
        BITS,
        "gradients are added in any order",
        "sum_in_order",
        "in sum_pairs(len(sums)):",
        "in [\n"
        "        (0, i)\n"
        '        for i in __import__("random").SystemRandom().sample(\n'
        "            range(1, len(sums)), len(sums) - 1\n"
        "        )\n"
        "    ]:",
        "test_the_sum_has_the_same_bits_every_time",
    ),
    Sabotage(
        BITS,
        "all replicas of a rank draw the same numbers",
        "Generators._generator",
        "number += self._replica_offset",
        "number = self._replica_offset",
        "test_every_replica_of_every_rank_draws_masks_of_its_own",
    ),
    Sabotage(
        BITS,
        "a second pass and checks move the replicas' generators",
        "Attempt.isolated",
        "with restored(set_state), contextlib",
        "with contextlib",
        "test_same_seed_same_bits_and_the_random_state_moves_as_in_an_ordinary_step",
    ),
    Sabotage(
        BITS,
        "numbers that replicas draw in inference are drawn again",
        "map_rows",
        "attempt.generators.commit()",
        "pass",
        "test_inference_draws_on_and_the_seed_decides_it",
    ),
    Sabotage(
        BITS,
        "numbers that only another replica than the first draws are drawn again",
        "Generators.commit",
        "in self._generators.items()",
        "in {}.items()",
        "test_a_replica_other_than_the_first_drawing_moves_the_generator",
    ),
    Sabotage(
        USER,
        "workers compute under autocast in its default dtype",
        "CallerContext.__init__",
        "partial(torch.autocast, kind, torch.get_autocast_dtype(kind))",
        "partial(torch.autocast, kind)",
        "test_autocast_dtype_without_its_cache",
    ),
    Sabotage(
        USER,
        "workers do not see the caller's context variables",
        "CallerContext.run",
        "self._variables.copy().run(self._run, device, work)",
        "self._run(device, work)",
        "test_contextvars",
    ),
    Sabotage(
        USER,
        "hooks on parameters are left out",
        "_add",
        "are_first = not observed and not old",
        "are_first = not old",
        "test_hooks_on_parameters_act_once_on_the_whole_gradient",
    ),
    Sabotage(
        USER,
        "keys of a state dict begin with module.",
        "Wrapper.state_dict",
        "return self.module.state_dict(*args, **kwargs)",
        "return super().state_dict(*args, **kwargs)",
        "test_keys_are_the_module_s_and_load_with_or_without_a_prefix",
    ),
    Sabotage(
        USER,
        "compile= is forgotten, and replicas run eagerly",
        "Compiler.compiled_call",
        "partial(compile_fn(self._function_for(kind)), replica)",
        "partial(self._function_for(kind), replica)",
        "test_it_trains_as_the_eager_engine_does",
    ),
    Sabotage(
        USER,
        "inference in training mode moves no statistics",
        "map_rows",
        "if any(part.training for part in module.modules()):",
        "if False:",
        "test_inference_moves_statistics_as_a_module_does",
    ),
    Sabotage(
        USER,
        "workers do not see the caller's hooks on saved tensors",
        "CallerContext.__init__",
        "if hooks is not None:",
        "if False:",
        "test_saved_tensors_hooks",
    ),
    Sabotage(
        USER,
        "hooks on parameters run in engine.check",
        "compare",
        "hooks_taken_off(tensors)",
        "hooks_taken_off([])",
        "test_it_leaves_no_trace",
    ),
    Sabotage(
        ERRORS,
        "the user's exception is replaced",
        "Workers._dispatch",
        "raise error",
        "raise RuntimeError(str(error))",
        "test_the_lowest_replica_speaks_and_the_others_are_noted",
    ),
    Sabotage(
        ERRORS,
        "the note on an error names no sub-step",
        "note_replica.__exit__",
        "if self.number is not None:",
        "if False:",
        "test_the_words_of_a_note",
    ),
    Sabotage(
        ERRORS,
        "a closed engine steps on",
        "Workers._refuse_if_closed",
        "if self._closed:",
        "if False:",
        "test_close_twice_and_close_before_use",
    ),
    Sabotage(
        ERRORS,
        "a second backward pass of engine.loss gives nothing",
        "_ReturnGradients.backward",
        "raise RuntimeError(_TWICE)",
        "return (None, None, None, *[None] * (len(ctx.needs_input_grad) - 3))",
        "test_a_second_backward_pass_is_an_error",
    ),
    Sabotage(
        ERRORS,
        "a report says that nothing was tried again",
        "AutoAccum.fit",
        "replace(outcome, retries=search.retries)",
        "outcome",
        "test_the_result_is_that_of_the_same_fixed_accum_bit_for_bit",
    ),
    Sabotage(
        ERRORS,
        "copies that arrive altered are not noticed",
        "ScatterOnceParallel._attempt",
        "check_links(self.device_ids)",
        "pass",
        "test_the_engine_refuses_devices_whose_memory_brings_other_bytes",
    ),
    Sabotage(
        ERRORS,
        "the note on an error numbers rows in the order of a plan by cost",
        "Share.rows_of",
        "if self.row_numbers:",
        "if False:",
        "test_a_note_names_the_rows_of_a_micro_batch_cut_by_cost",
    ),
]


def main() -> None:
    """Try all sabotages, or some, and print which test sees each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only lines that have all of these")
    parser.add_argument("--contract", action="store_true", help="with `pytest -m contract`")
    given = parser.parse_args()
    tried = [each for each in SABOTAGES if all(word in each.line for word in given.words)]
    trials = Trials(tried, own_tests=not given.contract)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-W", "ignore"]
    if given.contract:
        options += ["-m", "contract"]
        files = {str(file) for file, text in _tests() if "mark.contract" in text}
    else:
        files = {name_of_test(each).partition("::")[0] for each in tried} - {""}
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start; tensors are small
    sys.path.insert(0, str(ROOT))
    print("sabotage | promise | seen by")
    pytest.main([*options, *sorted(files)], plugins=[trials])
    print(f"{len(tried) - len(trials.unseen)} of {len(tried)} sabotages are seen")
    print(f"{trials.by_contract} of them by the contract", *trials.unseen, sep="\n")
    sys.exit(bool(trials.unseen or not trials.done))


class Trials:
    """A plugin that runs the collected tests under each sabotage, up to the first failure."""

    def __init__(self, sabotages: Sequence[Sabotage], *, own_tests: bool) -> None:
        self._sabotages, self._own_tests = sabotages, own_tests
        self.unseen: list[str] = []
        self.by_contract = 0
        self.done = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In the place of pytest's own loop."""
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        begin = time.monotonic()
        for sabotage in self._sabotages:
            start = time.monotonic()
            items = self._items(session, sabotage)
            limit = min(LIMIT_SECONDS, max(0, begin + TOTAL_SECONDS - start))
            try:
                work = functools.partial(first_failure, sabotage, items)
                seen, is_contract = in_fork(work, limit)
            except LookupError as error:
                seen, is_contract = f"NOBODY: {error}", False
            if seen.startswith("NOBODY"):
                self.unseen.append(f"{sabotage.line} | {seen}")
            self.by_contract += is_contract
            seconds = time.monotonic() - start
            where = " (contract)" if is_contract else ""
            terminal.write_line(f"{sabotage.line} | {seen}{where} | {seconds:.0f} s", flush=True)
        self.done = True
        return True

    def _items(self, session: pytest.Session, sabotage: Sabotage) -> list[pytest.Item]:
        """The tests to run, those first that probably see the sabotage."""

        def is_other(item: pytest.Item) -> tuple[bool, bool]:
            is_own: bool = item.originalname == sabotage.seen_by  # type: ignore[attr-defined]
            return not is_own, not in_contract(item)

        items = sorted(session.items, key=is_other)
        return [item for item in items if not is_other(item)[0]] if self._own_tests else items


def in_contract(item: pytest.Item) -> bool:
    """Whether `pytest -m contract` runs a test."""
    return item.get_closest_marker("contract") is not None


def first_failure(sabotage: Sabotage, items: Sequence[pytest.Item]) -> tuple[str, bool]:
    """The first test that fails under a sabotage, and whether it is in the contract.

    Changes this process. Raises ``LookupError`` if no test fails.
    """
    path, source = sabotaged(sabotage)
    copy = Path(tempfile.mkdtemp(prefix="sabotage"))
    try:
        shutil.copytree(ROOT / "scatterpar", copy / "scatterpar")
        (copy / path).write_text(source, encoding="utf-8")
        os.environ["PYTHONPATH"] = f"{copy}:{ROOT / 'tests'}"
        sys.path.insert(0, str(copy))
        os.chdir(copy)  # of new processes the first place with modules, before PYTHONPATH
        function, code = code_of(sabotage, path, source)
        function.__code__ = code
        for number, item in enumerate(items):
            following = items[number + 1] if number + 1 < len(items) else None
            reports = run(item, following)
            if any(report.failed for report in reports):
                return item.nodeid.partition("::")[2], in_contract(item)
        raise LookupError(f"{len(items)} tests pass")
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def run(item: pytest.Item, following: pytest.Item | None) -> list[pytest.TestReport]:
    """The reports of one test, which are not printed."""
    from _pytest.runner import runtestprotocol

    return runtestprotocol(item, log=False, nextitem=following)


def code_of(sabotage: Sabotage, path: Path, source: str) -> tuple[FunctionType, CodeType]:
    """The function that a sabotage changes, and the code that it has in ``source``."""
    owner: Any = importlib.import_module(".".join(path.with_suffix("").parts))
    code: CodeType = compile(source, str(ROOT / path), "exec", dont_inherit=True)
    for part in sabotage.place.split("."):
        owner = inspect.getattr_static(owner, part)
        found = [c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part]
        (code,) = found
    return inspect.unwrap(getattr(owner, "__func__", owner)), code


def in_fork(work: Callable[[], Any], limit: float) -> Any:
    """The result of ``work`` in a fork of this process, or its ``LookupError``."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        os.setsid()
        try:
            theirs.send(work())
        except BaseException as error:
            theirs.send(error if isinstance(error, LookupError) else LookupError(repr(error)))
        finally:
            os._exit(0)
    theirs.close()
    try:
        if not ours.poll(limit):
            raise LookupError(f"not done in {limit:.0f} s")
        result = ours.recv()
    except EOFError:
        raise LookupError("the process of the test ended") from None
    finally:
        ours.close()
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if isinstance(result, LookupError):
        raise result
    return result


def sabotaged(sabotage: Sabotage) -> tuple[Path, str]:
    """The file of the engine that a sabotage changes, and its text afterwards."""
    found = []
    for path, source, tree in _engine():
        for start, stop in _places(source, tree, sabotage.place):
            at = start - 1
            while (at := source.find(sabotage.text, at + 1, stop)) >= 0:
                changed = source[:at] + sabotage.instead + source[at + len(sabotage.text) :]
                found.append((path, changed))
    if len(found) != 1:
        times = f"{len(found)} times in {sabotage.place}"
        raise LookupError(f"{sabotage.text!r} is {times} of the engine: mend tests/sabotage.py")
    return found[0]


@functools.cache
def _engine() -> list[tuple[Path, str, ast.Module]]:
    """The files of the engine, relative to the repository: their texts, and what these define."""
    files = [file.relative_to(ROOT) for file in sorted((ROOT / "scatterpar").rglob("*.py"))]
    paths = [path for path in files if path.parts[1] not in APART]
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in paths]
    return [(path, text, ast.parse(text)) for path, text in zip(paths, texts, strict=True)]


def _places(source: str, tree: ast.Module, place: str) -> list[tuple[int, int]]:
    """Where the definitions that ``place`` names begin and end in ``source``."""
    *owner, name = place.split(".")
    nodes: list[Any] = list(tree.body)
    for part in owner:
        nodes = [n for o in nodes if getattr(o, "name", "") == part for n in getattr(o, "body", [])]
    ends = [0]
    for line in source.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    return [
        (ends[node.lineno - 1], ends[node.end_lineno])
        for node in nodes
        if getattr(node, "name", "") == name
    ]


def name_of_test(sabotage: Sabotage) -> str:
    """The test that sees a sabotage, as pytest names it; empty if there is none of that name."""
    begins = f"\ndef {sabotage.seen_by}("
    found = [f"{file}::{sabotage.seen_by}" for file, text in _tests() if begins in text]
    return found[0] if len(found) == 1 else ""


@functools.cache
def _tests() -> list[tuple[Path, str]]:
    """The files of tests, and their texts."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [(file, file.read_text(encoding="utf-8")) for file in files]


if __name__ == "__main__":
    main()
