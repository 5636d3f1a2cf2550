"""Is every promise tested? Each is broken in the engine, and a test has to fail.

    python -m tests.sabotage              all sabotages
    python -m tests.sabotage WORD...      those with all these words in their line

It prints a table of the sabotages, the promises that they break, and the tests that see
them, and ends with 1 if one is not seen.

A sabotage replaces a text in a function or method of the engine. If the text is not
there exactly once, the sabotage has to be mended: that is a failure, too. Its test runs
in a process of its own, which imports a copy of the package with the changed text.
These are forks of a server that has imported torch, which takes longer than most of the
tests.
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
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 240  # per sabotage: a hang, not a busy machine
IMPORTED = ["torch._dynamo", "numpy", "hypothesis", "pytest"]
STACKS = f"faulthandler_timeout={LIMIT_SECONDS - 30}"  # printed by a test that hangs
SETTINGS = ("-c", str(ROOT / "setup.cfg"), "-o", STACKS)
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", *SETTINGS)


@dataclass(frozen=True)
class Sabotage:
    """One change of the engine, which a test has to see.

    Attributes:
        name: what the change does.
        promise: what it breaks, in a word or two.
        file: where it is, below ``scatterpar/``.
        place: the function, the class, or the method as ``Class.method``.
        text: what is there exactly once, however a formatter cuts it into lines.
        replacement: what is there instead.
        seen_by: the name of a quick test that has to fail.
        needs: the library without which the test is skipped, and the sabotage too.
    """

    name: str
    promise: str
    file: str
    place: str
    text: str
    replacement: str
    seen_by: str
    needs: str = ""

    @property
    def line(self):
        """The columns of the table that are known beforehand."""
        return f"{self.name} ({self.file}, {self.place}) | {self.promise}"


SABOTAGES = [
    # --- exact ---
    Sabotage(
        name="numbers to log are added up without weights",
        promise="exact",
        file="step/logged_numbers.py",
        place="NumbersOfShare.weighted",
        text="sums[name] += weight * number",
        replacement="sums[name] += number",
        seen_by="test_numbers_are_of_the_whole_batch",
    ),
    Sabotage(
        name="a criterion that logs has its numbers dropped by a CUDA graph",
        promise="exact",
        file="options/graphs/replay.py",
        place="GraphedSubsteps._taped",
        text="if numbers:",
        replacement="if False:",
        seen_by="test_captured_steps_log",
    ),
    Sabotage(
        name="a tape that compares nothing",
        promise="exact",
        file="options/graphs/tape.py",
        place="difference",
        text="if before.entries == now.entries:",
        replacement="if True:",
        seen_by="test_changed_value_is_found",
    ),
    Sabotage(
        name="a tape does not tell views of one memory apart",
        promise="exact",
        file="options/graphs/tape.py",
        place="_view_key",
        text="tensor.stride(),",
        replacement="",
        seen_by="test_another_view_is_found",
    ),
    Sabotage(
        name="each step proves the first replica",
        promise="exact",
        file="options/graphs/proofs.py",
        place="_to_prove",
        text="in_turn = [*numbers[first:], *numbers[:first]]",
        replacement="in_turn = numbers[:1]",
        seen_by="test_change_on_one_device_is_found_in_turn",
    ),
    Sabotage(
        name="a replay draws on from generators of the module's own",
        promise="exact",
        file="options/graphs/tape.py",
        place="Tape._name_of",
        text="if _is_of_replica(generator):",
        replacement="if True:",
        seen_by="test_own_generators_are_never_captured",
    ),
    Sabotage(
        name="context variables that a sub-step sets are not seen",
        promise="exact",
        file="options/graphs/replay.py",
        place="GraphedSubsteps._moved_on_host",
        text="if now.context.get(variable, _WITHOUT_VALUE) is not value:",
        replacement="if False:",
        seen_by="test_what_calls_move_is_never_captured",
    ),
    Sabotage(
        name="losses are read before gradients are launched",
        promise="fast",
        file="step/reduce.py",
        place="reduce",
        text="buffers, changes, statistics = reduce_buffers(attempt)",
        replacement="total_of(computed.losses); buffers, changes, statistics = "
        "reduce_buffers(attempt)",
        seen_by="test_losses_are_read_when_gradients_are_launched",
    ),
    Sabotage(
        name="compiled functions run uncompiled in captured sub-steps",
        promise="fast",
        file="options/graphs/replay.py",
        place="GraphedSubsteps._taped",
        text="if compiled_calls.were_made():",
        replacement="if False:",
        seen_by="test_compiled_functions_stay_compiled",
    ),
    Sabotage(
        name="hooks that come after a capture are not seen",
        promise="exact",
        file="options/graphs/schedule.py",
        place="Captured.run",
        text="[settings_of_torch(), num_hooks]",
        replacement="[settings_of_torch()]",
        seen_by="test_hook_that_comes_later_is_seen",
    ),
    Sabotage(
        name="a replica that was replayed is called as its last call left it",
        promise="exact",
        file="options/graphs/replay.py",
        place="GraphedSubsteps._taped",
        text="task.restore_replicas()",
        replacement="",
        seen_by="test_replica_rebound_between_steps_is_restored",
    ),
    Sabotage(
        name="gradients of replicas in other places are added as flat tensors",
        promise="exact",
        file="step/reduce.py",
        place="_summed",
        text="if flat and flat[0] is not None and have_equal_places(flat):",
        replacement="if flat and flat[0] is not None:",
        seen_by="test_unused_layers_have_no_gradient",
    ),
    Sabotage(
        name="a replay returns the numbers of its capture",
        promise="exact",
        file="options/graphs/tape.py",
        place="Tape.add_returned",
        text="self._add_values((value,))",
        replacement="pass",
        seen_by="test_returned_number_is_not_frozen",
    ),
    Sabotage(
        name="a replay returns the object of its capture",
        promise="exact",
        file="options/graphs/tape.py",
        place="Tape.add_returned",
        text="elif not isinstance(value, Tensor):",
        replacement="elif False:",
        seen_by="test_objects_returned_by_each_call",
    ),
    Sabotage(
        name="no captured sub-step of a step runs eagerly",
        promise="exact",
        file="options/graphs/replay.py",
        place="GraphedSubsteps.run",
        text="is_checked = number in self._plan.checked",
        replacement="is_checked = False",
        seen_by="test_changed_value_is_found",
    ),
    Sabotage(
        name="a buffer that has begun to share memory is written as others are",
        promise="exact",
        file="replicas/shared_buffers.py",
        place="memory_changes",
        text="if owner is not place:",
        replacement="if False:",
        seen_by="test_engine_keeps_what_shares_memory",
    ),
    Sabotage(
        name="a buffer that has ceased to share memory is written where it was",
        promise="exact",
        file="replicas/shared_buffers.py",
        place="memory_changes",
        text="elif earlier:",
        replacement="elif False:",
        seen_by="test_engine_keeps_what_shares_memory",
    ),
    Sabotage(
        name="objects in C are torch's if their module begins like it",
        promise="a look leaves no trace",
        file="objects/savers.py",
        place="_OwnState.fits",
        text='package_of(kind) == "torch"',
        replacement='kind.__module__.startswith("torch")',
        seen_by="test_packages_told_by_whole_names",
    ),
    Sabotage(
        name="code that takes from an iterator is looked at",
        promise="a look leaves no trace",
        file="objects/savers.py",
        place="_Iterator.read",
        text="if not (is_iterator and _is_of_user(self.value)):",
        replacement="if False:",
        seen_by="test_code_with_an_iterator_is_not_looked_at",
    ),
    Sabotage(
        name="what a sub-step takes from an iterator is not seen",
        promise="exact",
        file="options/graphs/replay.py",
        place="GraphedSubsteps._run_on_tape",
        text="elif journal is not None and (moved := journal.moved()):",
        replacement="elif False and (moved := ''):",
        seen_by="test_moving_value_never_captured",
    ),
    Sabotage(
        name="the first micro-batch counts one row more",
        promise="exact",
        file="step/loss_weights.py",
        place="term_counts",
        text="float(stop - start) for",
        replacement="float(stop - start + (start == 0)) for",
        seen_by="test_training_equals_one_device",
    ),
    Sabotage(
        name="the last micro-batch of a share is dropped",
        promise="exact",
        file="step/substeps.py",
        place="Substeps.train",
        text="[:max_substeps]",
        replacement="[: max_substeps or max(1, len(self._task.weights) - 1)]",
        seen_by="test_training_equals_one_device",
    ),
    Sabotage(
        name="a sum is taken for a mean",
        promise="exact",
        file="step/loss_weights.py",
        place="compute_loss_weights",
        text="if request.is_mean:",
        replacement="if True:",
        seen_by="test_step_equals_plain_torch",
    ),
    Sabotage(
        name="count= is ignored by engine.loss",
        promise="exact",
        file="engine.py",
        place="ScatterOnceParallel.loss",
        text="criterion, **options)",
        replacement="criterion, **(options | {'count': None}))",
        seen_by="test_loop_gets_what_plain_torch_gives",
    ),
    Sabotage(
        name="ignore_index counts unless it is -100",
        promise="exact",
        file="step/loss_weights.py",
        place="terms_of_rows",
        text='option_of(criterion, "ignore_index", None)',
        replacement="None",
        seen_by="test_step_equals_plain_torch",
    ),
    Sabotage(
        name="class weights do not count",
        promise="exact",
        file="step/loss_weights.py",
        place="terms_of_rows",
        text="if class_weight is not None:",
        replacement="if False:",
        seen_by="test_step_equals_plain_torch",
    ),
    Sabotage(
        name="gradients that share memory are added to twice",
        promise="exact",
        file="step/substeps.py",
        place="unalias",
        text="leaves[number].grad = gradient.clone()",
        replacement="pass",
        seen_by="test_loop_gets_what_plain_torch_gives",
    ),
    Sabotage(
        name="a gradient of the criterion's is written by the second pass",
        promise="exact",
        file="step/substeps.py",
        place="unalias",
        text="leaf.grad = gradient.clone()",
        replacement="pass",
        seen_by="test_criterion_adds_a_table",
    ),
    Sabotage(
        name=(
            "of a parameter that model and criterion share, the criterion's gradient "
            "alone arrives"
        ),
        promise="exact",
        file="step/reduce.py",
        place="reduce_gradients",
        text="leaf, _plus(earlier, gradient)",
        replacement="leaf, gradient",
        seen_by="test_loop_gets_what_plain_torch_gives",
    ),
    Sabotage(
        name="a parameter that no replica used gets zeros",
        promise="exact",
        file="step/reduce.py",
        place="_summed",
        text="sums.get(slot.number)",
        replacement="sums.get(slot.number, torch.zeros_like(slot.tensor))",
        seen_by="test_unused_parameter_keeps_its_gradient",
    ),
    Sabotage(
        name="the scale of a scaler is left out",
        promise="exact",
        file="step/substeps.py",
        place="Substeps.run",
        text="weight * request.scale",
        replacement="weight",
        seen_by="test_grad_scaler_as_in_plain_torch",
    ),
    Sabotage(
        name="the factor that arrives at engine.loss is left out",
        promise="exact",
        file="step/commit.py",
        place="_ReturnGradients.backward",
        text="gradient.mul_(factor_of_gradients)",
        replacement="pass",
        seen_by="test_loop_gets_what_plain_torch_gives",
    ),
    Sabotage(
        name="outputs are joined in another order",
        promise="exact",
        file="step/reduce.py",
        place="returned_outputs",
        text="join_rows(outputs_of_share,",
        replacement="join_rows(outputs_of_share[::-1],",
        seen_by="test_return_outputs_one_per_replica",
    ),
    Sabotage(
        name="batch statistics leave out how the means of micro-batches differ",
        promise="exact",
        file="replicas/batch_statistics.py",
        place="pooled",
        text="_sum(between) + _sum(within)",
        replacement="_sum(within)",
        seen_by="test_first_layer_equals_plain_torch",
    ),
    Sabotage(
        name="synchronised statistics leave out how the means of replicas differ",
        promise="exact",
        file="replicas/batch_statistics.py",
        place="pooled",
        text="_sum(between) + _sum(within)",
        replacement="_sum(within)",
        seen_by="test_moments_of_two_replicas_by_hand",
    ),
    Sabotage(
        name="the gradient of a synchronised layer leaves out the statistics",
        promise="exact",
        file="replicas/sync_batch_norm.py",
        place="Normalise.backward",
        text="of_rows -= correction",
        replacement="pass",
        seen_by="test_steps_normalise_over_all_replicas",
    ),
    Sabotage(
        name=(
            "sub-steps add up in the parameters' dtype, whatever accumulate_dtype= says"
        ),
        promise="exact",
        file="replicas/slots.py",
        place="sum_dtype",
        text="if accumulate_dtype is None:",
        replacement="if True:",
        seen_by="test_512_ones_add_up_to_512",
    ),
    Sabotage(
        name="ranks weigh alike, however many rows they have",
        promise="exact",
        file="distributed/ranks.py",
        place="Ranks._exchange",
        text="weight / total if total else 0.0",
        replacement="1.0 / self.size",
        seen_by="test_step_of_ranks_equals_one_device",
    ),
    Sabotage(
        name="the second pass draws other random numbers",
        promise="exact",
        file="options/whole_batch.py",
        place="Passes._recompute",
        text="self._attempt.generators.set_state(replica, self._states[sub_step])",
        replacement="pass",
        seen_by=("test_same_seed_same_bits_and_random_state"),
    ),
    Sabotage(
        name="micro_batch_size= is exceeded",
        promise="exact",
        file="plan.py",
        place="_plan",
        text="math.ceil(Fraction(stop - start, limits[replica]))",
        replacement="max(1, (stop - start) // limits[replica])",
        seen_by="test_every_plan_is_even_and_complete",
    ),
    Sabotage(
        name="steps are not checked",
        promise="exact",
        file="verify/verifier.py",
        place="Verifier.look_if_due",
        text="if kind.count_step(ranges_of_step(request), details):",
        replacement="if False:",
        seen_by="test_wrong_gradient_refused_in_time",
    ),
    Sabotage(
        name="a call takes the first rule of a loss that fits within rounding",
        promise="exact",
        file="verify/choice.py",
        place="best_fits",
        text="by_misfit = sorted(fits, key=lambda fit: fit.misfit)",
        replacement="by_misfit = fits",
        seen_by="test_rule_that_holds_is_found_later",
    ),
    Sabotage(
        name="what is written into an unread output is joined over",
        promise="as in plain torch",
        file="calls/unread_outputs.py",
        place="_UnreadItems.__ior__",
        text="_join_unread(self)",
        replacement="pass",
        seen_by="test_mapping_answers_as_a_plain_one",
    ),
    Sabotage(
        name="tensors in markers are counted before labels",
        promise="exact",
        file="calls/call_looks.py",
        place="_count_of",
        text="nested.part_at(inputs, path)",
        replacement="nested.tensors(inputs)[rule.labels]",
        seen_by="test_markers_move_no_labels",
    ),
    Sabotage(
        name="a rule of a loss that fits within rounding is dropped",
        promise="exact",
        file="verify/verifier.py",
        place="Verifier._choose",
        text="remaining = best_fits(fits)",
        replacement="remaining = [fits[0].candidate]",
        seen_by="test_rule_that_holds_is_found_later",
    ),
    Sabotage(
        name="a call in a checkpoint is not looked at",
        promise="exact",
        file="calls/call.py",
        place="Calls._rules",
        text="is_again = current_graph_task() != -1",
        replacement="is_again = saved_tensors_hooks() is not None",
        seen_by="test_saved_tensor_hooks_around_keep_rules_apart",
    ),
    Sabotage(
        name="a checkpoint around a call finds the tensors of its look",
        promise="exact",
        file="calls/call_looks.py",
        place="_own_saved_tensors",
        text="if saved_tensors_hooks() is None:",
        replacement="if True:",
        seen_by="test_saved_tensor_hooks_around_keep_rules_apart",
    ),
    Sabotage(
        name="a look at a reentrant checkpoint compares no gradients",
        promise="exact",
        file="verify/runs.py",
        place="Runs._gradients",
        text="raise _ReentrantCheckpoint from error",
        replacement="return ()",
        seen_by="test_reentrant_checkpoint_inside_keeps_rules_apart",
    ),
    Sabotage(
        name="rules of losses are those of another kind of call",
        promise="exact",
        file="verify/schedule.py",
        place="Kinds.kind_of",
        text="key = options, names, tuple(kinds_of_atoms)",
        replacement="key = options, names",
        seen_by="test_rules_are_those_of_a_kind_of_call",
    ),
    Sabotage(
        name="0-dim outputs of a ragged share are averaged with equal weights",
        promise="exact",
        file="step/reduce.py",
        place="returned_outputs",
        text="outputs_of_share, dim, weights, rows",
        replacement="outputs_of_share, dim, [1.0] * len(rows), rows",
        seen_by="test_return_outputs_one_per_replica",
    ),
    Sabotage(
        name="outputs with several entries per row are joined",
        promise="exact",
        file="batch/joining.py",
        place="_have_rows",
        text="if _have_one_per_row(atoms, rows, dim):",
        replacement="if entries_per_row(atoms[0], rows[0], dim):",
        seen_by="test_two_entries_per_row_refused",
    ),
    Sabotage(
        name="numbers of rows in a list are compared by their place",
        promise="exact",
        file="batch/joining.py",
        place="tensors_by_place",
        text="if _are_entries(values, rows, dim, lists):",
        replacement="if False:",
        seen_by="test_lists_of_rows_joined_in_a_step",
    ),
    Sabotage(
        name="outputs of shares with one micro-batch are returned whatever they are",
        promise="exact",
        file="step/reduce.py",
        place="returned_outputs",
        text="require_same_or_rows(joined, rows_by_share, dim, lists)",
        replacement="pass",
        seen_by="test_two_entries_per_row_refused",
    ),
    Sabotage(
        name="a table of as many entries as a micro-batch has rows is joined",
        promise="exact",
        file="verify/look.py",
        place="ReplicaLook.report_for",
        text="if runs.taken_for_rows is not None:",
        replacement="if False:",
        seen_by="test_table_is_returned_once",
    ),
    Sabotage(
        name="scores of the pairs within a micro-batch are joined",
        promise="exact",
        file="verify/look.py",
        place="_judged",
        text="if results.runs.pairs_of_rows is not None:",
        replacement="if False:",
        seen_by="test_scores_of_pairs_refused_features_exact",
    ),
    Sabotage(
        name="0-dim outputs of inference are averaged with equal weights",
        promise="exact",
        file="step/loss_weights.py",
        place="compute_loss_weights",
        text="factors = [float(stop - start) for start, stop in spans]",
        replacement="factors = [1.0] * len(spans)",
        seen_by="test_rowless_numbers_averaged_by_rows",
    ),
    Sabotage(
        name="engine.map calls the user's own method for all replicas",
        promise="exact",
        file="options/map_rows.py",
        place="_Work.__init__",
        text="[replica.copy_of(function) for replica in replicas]",
        replacement="[function for _ in replicas]",
        seen_by="test_replicas_call_their_own_method",
    ),
    Sabotage(
        name="pad= of engine.map is ignored",
        promise="exact",
        file="options/map_rows.py",
        place="map_rows",
        text="row_function.pad, names_map=True",
        replacement="names_map=True",
        seen_by="test_tensors_joined_padded_or_refused",
    ),
    Sabotage(
        name="accumulate_dtype= is ignored for float16",
        promise="exact",
        file="replicas/slots.py",
        place="sum_dtype",
        text="if accumulate_dtype is None:",
        replacement="if accumulate_dtype is None or dtype == torch.float16:",
        seen_by="test_sum_is_rounded_once",
    ),
    Sabotage(
        name="engine.loss forgets the factor of a scaler",
        promise="exact",
        file="step/commit.py",
        place="commit",
        text="pairs, outcome.request.scale)",
        replacement="pairs, 1.0)",
        seen_by="test_grad_scaler_as_in_plain_torch",
    ),
    Sabotage(
        name=(
            "micro-batches weigh alike in batch statistics, however many rows they have"
        ),
        promise="exact",
        file="replicas/batch_statistics.py",
        place="pooled",
        text="[count / max(1, total) for count in counts]",
        replacement="[1 / len(counts) for _ in counts]",
        seen_by="test_first_layer_equals_plain_torch",
    ),
    Sabotage(
        name="batch statistics move in inference alone",
        promise="exact",
        file="step/commit.py",
        place="commit",
        text="outcome.statistics.values() if outcome.statistics else []",
        replacement="[]",
        seen_by="test_first_layer_equals_plain_torch",
    ),
    Sabotage(
        name="engine.check passes whatever it finds",
        promise="exact",
        file="numerics/comparison.py",
        place="relative_differences",
        text="quotients.append(difference / max(scale, floor))",
        replacement="quotients.append(0.0)",
        seen_by="test_difference_measured_and_explained",
    ),
    Sabotage(
        name="a micro-batch without terms is divided by zero",
        promise="exact",
        file="step/loss_weights.py",
        place="compute_loss_weights",
        text="count / total if count else 0.0",
        replacement="count / total",
        seen_by="test_no_terms_backward_gives_nothing",
    ),
    Sabotage(
        name="gather averages 0-dim entries with equal weights",
        promise="exact",
        file="pair/pair.py",
        place="gather",
        text="join_rows(moved, dim, rows,",
        replacement="join_rows(moved, dim, [1] * len(rows),",
        seen_by="test_gather_of_lists_and_rowless_values",
    ),
    Sabotage(
        name="gather joins constants as rows",
        promise="exact",
        file="pair/pair.py",
        place="gather",
        text="constants=constants",
        replacement="constants=[]",
        seen_by="test_gathered_codebook_is_one",
    ),
    Sabotage(
        name="gather counts the rows of a constant",
        promise="exact",
        file="pair/pair.py",
        place="_rows_of",
        text="if not _are_equal(column):",
        replacement="if True:",
        seen_by="test_gathered_codebook_is_one",
    ),
    Sabotage(
        name="torch.compile traces what it is to leave alone",
        promise="as in plain torch",
        file="torch_private/compiler.py",
        place="never_compiled",
        text="if _DYNAMO not in sys.modules:",
        replacement="if True:",
        seen_by="test_compiled_wrappers_and_sharded_step",
    ),
    Sabotage(
        name="code met below a mode of the package is marked as never to be compiled",
        promise="as in plain torch",
        file="torch_private/thread_modes.py",
        place="OperatorMode.__enter__",
        text="self._uncompiled.enter_context(uncompiled())",
        replacement="pass",
        seen_by="test_splitcheck_leaves_compiled_functions_compiled",
    ),
    Sabotage(
        name="a module that is compiled in part runs without its compiler in a first step",
        promise="as in plain torch",
        file="replicas/replicas.py",
        place="Replicas.has_compiled",
        text="each.compiler is not None for each in self.replica_sets",
        replacement="False for each in self.replica_sets",
        seen_by="test_compiled_modules_stay_compiled",
    ),
    Sabotage(
        name="a transform of torch.func goes on to torch's own error",
        promise="clear errors",
        file="threads/workers.py",
        place="Workers.exclusive",
        text="if is_transformed():",
        replacement="if False:",
        seen_by="test_transforms_are_refused_in_words",
    ),
    Sabotage(
        name="forward finds the gradients of earlier sub-steps",
        promise="exact",
        file="step/inner_backward.py",
        place="gradients_put_aside",
        text="            leaf.grad = None",
        replacement="            pass",
        seen_by="test_forward_finds_no_gradients_of_sub_steps",
    ),
    Sabotage(
        name="a call takes a backward pass inside of forward",
        promise="exact",
        file="calls/inner_gradients.py",
        place="refused_inner_backward",
        text="if leaf.grad is not None:",
        replacement="if False:",
        seen_by="test_backward_in_forward_changes_nothing",
    ),
    Sabotage(
        name="a gradient that two parameters have is overwritten in a tree of four",
        promise="exact",
        file="calls/gradients.py",
        place="_overwritable",
        text="targets = {target for target, _ in pairs}",
        replacement="targets = {0}",
        seen_by="test_shared_gradient_is_added_once",
    ),
    Sabotage(
        name="what was dropped returns if a pass reaches replica 0 alone",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.begin_pass",
        text="self.forget_dropped()",
        replacement="pass",
        seen_by="test_dropped_stays_dropped_without_rows",
    ),
    Sabotage(
        name="a failed pass takes what has waited",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.arrive",
        text="taken[key] = earlier",
        replacement="pass",
        seen_by="test_failed_pass_loses_nothing",
    ),
    Sabotage(
        name="gradients of computed tensors wait",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.arrive",
        text="if not bucket.tensors[0].is_leaf:",
        replacement="if False:",
        seen_by="test_computed_attribute_waits_for_nothing",
    ),
    Sabotage(
        name="buffers of a model that the criterion holds are those before the step",
        promise="exact",
        file="step/reduce.py",
        place="reduce_buffers",
        text="if buffers and values:",
        replacement="if False:",
        seen_by="test_buffers_of_model_in_criterion",
    ),
    Sabotage(
        name="a commit that fails leaves what it has added",
        promise="whole or not at all",
        file="step/commit.py",
        place="_save_for_undo",
        text="adds_in_place = adds_in_place and all(map(_can_be_written, earlier))",
        replacement="pass",
        seen_by="test_unwritable_grad_changes_nothing",
    ),
    Sabotage(
        name="the next backward pass of a call lacks what waits",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.arrive",
        text="_plus_in(of_replica, key, earlier)",
        replacement="pass",
        seen_by="test_selected_gradients_leave_what_waits",
    ),
    Sabotage(
        name="what zero_grad drops comes back in the next step of a call",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.forget_dropped",
        text="waiting.pop(key, None)",
        replacement="waiting.get(key)",
        seen_by="test_dropped_gradients_stay_dropped",
    ),
    Sabotage(
        name="clipping while gradients wait is silent",
        promise="clear errors",
        file="calls/gradients.py",
        place="CallGradients.forget_dropped",
        text="raise RuntimeError(_changed_while_waiting(self._tensors[key]))",
        replacement="is_kept = True",
        seen_by="test_clipping_while_gradients_wait_is_refused",
    ),
    Sabotage(
        name="an optimizer steps on the gradients of the first replica",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.add_before",
        text="self.add_waiting(keys)",
        replacement="pass",
        seen_by="test_optimizer_adds_what_waits_and_warns_once",
    ),
    Sabotage(
        name="a parameter with hooks shares its node: they get no gradient",
        promise="hooks",
        file="calls/gradients.py",
        place="CallGradients.connect",
        text="slot.number for slot in trained if not slot.is_leaf or _HOOKS(slot.tensor)",
        replacement="slot.number for slot in trained if not slot.is_leaf",
        seen_by="test_unused_parameter_has_no_gradient",
    ),
    Sabotage(
        name="hooks get nothing in the place of gradients that wait",
        promise="hooks",
        file="calls/gradients.py",
        place="CallGradients._nothing_yet",
        text="if not others and _HOOKS(tensor):",
        replacement="if False:",
        seen_by="test_hook_of_parameter_that_replica_0_skips",
    ),
    Sabotage(
        name="the note on a call without memory names options of steps",
        promise="clear errors",
        file="step/replica_threads.py",
        place="ReplicaNote.__exit__",
        text="_LESS_MEMORY_OF_CALL if self._is_of_call else _LESS_MEMORY",
        replacement="_LESS_MEMORY",
        seen_by="test_note_without_memory_names_what_helps",
    ),
    Sabotage(
        name="a parameter that a failed call has frozen stays frozen",
        promise="all or nothing",
        file="calls/replicas_of_call.py",
        place="ReplicasOfCall.restore_buffers",
        text="tensor.requires_grad_(slot.is_trained)",
        replacement="pass",
        seen_by="test_refused_program_changes_nothing",
    ),
    Sabotage(
        name="autograd.grad of parameters inside of no_sync is silent",
        promise="clear errors",
        file="calls/gradients.py",
        place="CallGradients.arrive",
        text="raise RuntimeError(_PARTLY_SELECTED)",
        replacement="pass",
        seen_by="test_selected_gradients_refused_in_no_sync",
    ),
    Sabotage(
        name="a failed backward pass of a call is a part of the next one",
        promise="exact",
        file="calls/gradients.py",
        place="CallGradients.arrive",
        text="self._keep(of_pass.arrived, arrived, bucket.tensors)",
        replacement="self._keep(self._waiting, arrived, bucket.tensors)",
        seen_by="test_failed_pass_leaves_nothing_for_the_next",
    ),
    Sabotage(
        name="a write through .data does not reach the next call",
        promise="exact",
        file="calls/replicas_of_call.py",
        place="ReplicasOfCall.refresh",
        text="self.gradients.were_added or is_other_mode",
        replacement="is_other_mode",
        seen_by="test_write_without_version_is_sent",
    ),
    Sabotage(
        name="a failed call leaves the buffers that it has written",
        promise="all or nothing",
        file="calls/replicas_of_call.py",
        place="ReplicasOfCall.restore_buffers",
        text="copy_each(targets, values)",
        replacement="pass",
        seen_by="test_failed_call_restores_buffers_and_draws",
    ),
    Sabotage(
        name="features that a hook keeps are those of the first replica",
        promise="exact",
        file="calls/left_tensors.py",
        place="_joined_or_first",
        text="return division.join(atoms)",
        replacement="return first",
        seen_by="test_nested_tensors_with_rows_are_joined",
    ),
    Sabotage(
        name="a sum that a module returns is taken for a mean",
        promise="exact",
        file="calls/call_looks.py",
        place="CallLooks.rules_of",
        text="rules[place] = self._rule(call, place, asks)",
        replacement="rules[place] = BY_ROWS",
        seen_by="test_program_equals_plain_torch",
    ),
    Sabotage(
        name="ranks divide accelerators that nobody else sees",
        promise="several processes",
        file="distributed/visible_accelerators.py",
        place="accelerators_of_rank",
        text="if set(names) == set(own):",
        replacement="if names:",
        seen_by="test_rank_has_its_part_of_what_it_sees",
    ),
    Sabotage(
        name="what user code writes into a batch is silent",
        promise="clear errors",
        file="step/row_writes.py",
        place="RowWrites.watched",
        text="if counted:",
        replacement="if False:",
        seen_by="test_pair_tells_what_is_written",
    ),
    Sabotage(
        name="what a call of the pair leaves behind is silent",
        promise="clear errors",
        file="calls/lost_state.py",
        place="LostState._warn",
        text="if new:",
        replacement="if False:",
        seen_by="test_engine_and_pair_answer",
    ),
    Sabotage(
        name="storages that a forward pass sets to the same values are writes",
        promise="as in plain torch",
        file="replicas/parameter_guard.py",
        place="ParameterGuard._writes",
        text="writes[device].discard(numbers[position])",
        replacement="pass",
        seen_by="test_values_plain_torch_follows",
    ),
    Sabotage(
        name="what a fused optimizer has written stays at the master",
        promise="never stale",
        file="replicas/fused_writes.py",
        place="_count_writes",
        text="increment_version(written)",
        replacement="pass",
        seen_by="test_rows_of_a_large_embedding_arrive",
    ),
    Sabotage(
        name="an owner's new values of a sharded optimizer reach no other device",
        promise="exact",
        file="sharded.py",
        place="ShardedOptimizer._step_on_owners",
        text="if parameter in copies.numbers",
        replacement="if self._owners[parameter] == self._memories[0]",
        seen_by="test_plain_bits_no_parameter_sent_again",
    ),
    Sabotage(
        name="an optimizer that cannot be divided is accepted",
        promise="exact",
        file="sharded.py",
        place="ShardedOptimizer.__init__",
        text="(elementwise or _is_known(plain))",
        replacement="True",
        seen_by="test_others_are_refused_before_a_step",
    ),
    Sabotage(
        name="a sharded step that writes elsewhere goes on",
        promise="exact",
        file="sharded.py",
        place="_Writes.check",
        text="if self._parameters.written().counted:",
        replacement="if False:",
        seen_by="test_later_change_is_found_in_its_step",
    ),
    Sabotage(
        name="a sharded step that leaves a parameter of another device alone goes on",
        promise="exact",
        file="sharded.py",
        place="_Writes.check",
        text="if not (what or may_stay):",
        replacement="if False:",
        seen_by="test_later_change_is_found_in_its_step",
    ),
    Sabotage(
        name="a sharded step loses a storage that the optimizer exchanged",
        promise="exact",
        file="sharded.py",
        place="ShardedOptimizer._step_on_owners",
        text="if not stand_in.is_set_to(copy):",
        replacement="if False:",
        seen_by="test_own_optimizers_have_plain_bits",
    ),
    Sabotage(
        name="rounding of shares makes a sub-step more",
        promise="exact",
        file="plan.py",
        place="_plan",
        text="number - _ROUNDING_OF_SHARES)",
        replacement="number)",
        seen_by="test_rounded_shares_add_no_sub_step",
    ),
    Sabotage(
        name="rank 0's parameters are not sent to other ranks",
        promise="exact",
        file="distributed/ranks.py",
        place="Ranks.__init__",
        text="self._collectives.broadcast_from_rank_0(module)",
        replacement="pass",
        seen_by="test_first_ranks_parameters_are_used",
    ),
    Sabotage(
        name=(
            "a gradient that arrives at another network, and that no graph shows, is "
            "not refused"
        ),
        promise="exact",
        file="step/substeps.py",
        place="user_state_guarded",
        text="if leaf.grad is not None:",
        replacement="if False:",
        seen_by="test_error_names_where_gradient_arrives",
    ),
    Sabotage(
        name="two replicas are in one criterion at a time",
        promise="exact",
        file="step/task.py",
        place="make_tasks",
        text="attempt.threads.widen(Scope.CRITERION)",
        replacement="pass",
        seen_by="test_shared_function_runs_one_at_a_time",
    ),
    Sabotage(
        name="a backward pass that calls modules overlaps with another replica's call",
        promise="exact",
        file="verify/look.py",
        place="ReplicaLook._scope",
        text="return Scope.SUBSTEP if calls.calls_modules else Scope.FUNCTION",
        replacement="return Scope.FUNCTION",
        seen_by="test_checkpoint_writes_hook_values_in_own_turn",
    ),
    Sabotage(
        name="a turn begins before that of earlier rows",
        promise="exact",
        file="step/turns.py",
        place="TurnOrder._is_next",
        text="return place == next(iter(self._pending), place)",
        replacement="return self._present is None",
        seen_by="test_calls_in_order_of_rows",
    ),
    Sabotage(
        name="a call begins after an earlier one has failed",
        promise="all or nothing",
        file="step/turns.py",
        place="TurnOrder._begin",
        text="raise Cancelled",
        replacement="pass",
        seen_by="test_no_call_after_one_that_fails",
    ),
    Sabotage(
        name="a look restores nothing that user code has written",
        promise="a look leaves no trace",
        file="objects/journal.py",
        place="Journal.restore",
        text="self.rewind()",
        replacement="return",
        seen_by="test_look_leaves_no_count",
    ),
    Sabotage(
        name="a look compares losses, and no gradients",
        promise="a wrong program is refused",
        file="verify/results.py",
        place="Result.difference_from",
        text="return max(of_losses, of_gradients)",
        replacement="return of_losses",
        seen_by="test_equal_losses_refused_by_gradients",
    ),
    Sabotage(
        name="every object is a library's, so that looks restore none",
        promise="a look leaves no trace",
        file="objects/whose.py",
        place="is_user_class",
        text="not is_library(kind.__module__)",
        replacement="False",
        seen_by="test_look_leaves_no_count",
    ),
    Sabotage(
        name="a search for what a criterion trains enters every log",
        promise="fast",
        file="objects/reach.py",
        place="_to_search_in",
        text="if is_long and not any(issubclass(kind, _REFERENTS) for kind in kinds):",
        replacement="if False:",
        seen_by="test_each_question_follows",
    ),
    Sabotage(
        name="a user's class is a library's if its name ends like one",
        promise="a look leaves no trace",
        file="objects/whose.py",
        place="_rule_for",
        text="if is_user_class(base):",
        replacement="if False:",
        seen_by="test_name_of_a_helper_decides_nothing",
    ),
    # --- once ---
    Sabotage(
        name="a copy is counted twice",
        promise="once",
        file="devices/transfers.py",
        place="Transfers.copy",
        text="self.count(tensor, phase)",
        replacement="self.count(tensor, phase), self.count(tensor, phase)",
        seen_by="test_every_byte_crosses_once",
    ),
    Sabotage(
        name="a copy is not counted",
        promise="once",
        file="devices/transfers.py",
        place="Transfers.copy_into",
        text="self.count(source, phase)",
        replacement="pass",
        seen_by="test_every_byte_crosses_once",
    ),
    Sabotage(
        name="parameters are sent at every step, changed or not",
        promise="once",
        file="replicas/broadcast.py",
        place="Broadcast.send_changed",
        text="- unchanged",
        replacement="- set()",
        seen_by="test_frozen_parameters_sent_once",
    ),
    Sabotage(
        name="a buffer that has stopped changing is sent in each step",
        promise="once",
        file="replicas/broadcast.py",
        place="Broadcast.send_changed",
        text="in_a_row if number in differing else 0",
        replacement="in_a_row",
        seen_by="test_buffers_that_stop_changing_are_not_sent",
    ),
    Sabotage(
        name="an automatic accum is searched again in each step",
        promise="once",
        file="options/auto_accum.py",
        place="Search._keep",
        text="self._fit.accum = accum",
        replacement="pass",
        seen_by="test_fewest_fitting_sub_steps_are_kept",
    ),
    Sabotage(
        name="an evaluation changes the number of sub-steps in training",
        promise="once",
        file="options/auto_accum.py",
        place="Search.__init__",
        text="if not request.backward:",
        replacement="if False:",
        seen_by="test_training_and_evaluation_numbers_apart",
    ),
    # --- never stale ---
    Sabotage(
        name="values count as sent before all devices have them",
        promise="never stale",
        file="replicas/broadcast.py",
        place="Broadcast.send_changed",
        text="self.invalidate()",
        replacement="self._sent = dict(enumerate(present))",
        seen_by="test_failed_refresh_is_sent_again",
    ),
    Sabotage(
        name="a frozen parameter is sent once",
        promise="never stale",
        file="replicas/broadcast.py",
        place="Broadcast.send_changed",
        text="- unchanged",
        replacement=(
            "- unchanged - {i for i in self._sent if not "
            "self._tensors[i].requires_grad}"
        ),
        seen_by="test_every_write_is_followed",
    ),
    Sabotage(
        name="a parameter written through .data is not sent",
        promise="never stale",
        file="replicas/broadcast.py",
        place="Broadcast.send_changed",
        text="- unchanged",
        replacement=(
            "- unchanged - {i for i, old in self._sent.items() if old == present[i]}"
        ),
        seen_by="test_edits_without_version_are_sent",
    ),
    Sabotage(
        name="replicas do not follow training, nor other plain values",
        promise="never stale",
        file="replicas/replicas.py",
        place="ReplicaSet._update_in_place",
        text="replica.apply_changes(changes)",
        replacement="pass",
        seen_by="test_change_reaches_next_step",
    ),
    Sabotage(
        name="a tensor that is stored elsewhere is taken for the one that was sent",
        promise="never stale",
        file="replicas/broadcast.py",
        place="Broadcast.adopt_storages",
        text="present == list(map(Tensor.data_ptr, self.places))",
        replacement="True",
        seen_by="test_change_reaches_each_call",
    ),
    Sabotage(
        name="another shape in the same memory, or requires_grad, is not followed",
        promise="never stale",
        file="replicas/replicas.py",
        place="ReplicaSet._update_in_place",
        text="forms.are_same()",
        replacement="True",
        seen_by="test_change_reaches_each_call",
    ),
    Sabotage(
        name="what is put into an empty container is not followed",
        promise="never stale",
        file="objects/snapshot.py",
        place="Snapshot.has_same_contents",
        text="any(self._empty) or",
        replacement="",
        seen_by="test_change_reaches_the_next_call",
    ),
    Sabotage(
        name="replicas do not follow requires_grad",
        promise="never stale",
        file="replicas/replicas.py",
        place="ReplicaSet._update_in_place",
        text="!= self.slots.requires_grad:",
        replacement="!= self.slots.requires_grad and not self.slots.all:",
        seen_by="test_change_reaches_next_step",
    ),
    Sabotage(
        name="buffers of the last replica are kept",
        promise="never stale",
        file="replicas/replicas.py",
        place="ReplicaSet._build",
        text="first = self.replicas[0]",
        replacement="first = self.replicas[-1]",
        seen_by="test_master_keeps_replica_0_bit_for_bit",
    ),
    Sabotage(
        name="replicas keep the gradients of the last step",
        promise="never stale",
        file="engine.py",
        place="ScatterOnceParallel._attempt",
        text="self._replicas.clear_step_state()",
        replacement="pass",
        seen_by="test_unused_parameter_keeps_its_gradient",
    ),
    # --- all or nothing ---
    Sabotage(
        name="a handler that raises leaves the others replaced",
        promise="all or nothing",
        file="threads/interrupts.py",
        place="Interrupts._restore",
        text="_signal.signal(number, handler)",
        replacement="_signal.signal(number, handler); return",
        seen_by="test_all_handlers_are_back_if_some_raise",
    ),
    Sabotage(
        name="settings of the process stay as replicas leave them",
        promise="all or nothing",
        file="threads/process_settings.py",
        place="_settings_restored",
        text="restore_settings(values)",
        replacement="pass",
        seen_by="test_settings_restored_after_step",
    ),
    Sabotage(
        name="a step restores settings of another engine's look",
        promise="all or nothing",
        file="verify/verifier.py",
        place="Verifier.look_at",
        text="with SETTINGS_KEPT, no_kernel_search()",
        replacement="with no_kernel_search()",
        seen_by="test_step_that_outlives_a_look",
    ),
    Sabotage(
        name="buffers are not restored if a hook on a gradient raises",
        promise="all or nothing",
        file="step/commit.py",
        place="_add_with_hooks",
        text="restore_after(error, buffers.restore)",
        replacement="pass",
        seen_by="test_raising_hook_leaves_buffers",
    ),
    Sabotage(
        name="buffers are written after hooks on gradients have run",
        promise="all or nothing",
        file="step/commit.py",
        place="_add_with_hooks",
        text="_add_gradients(pairs, attempt, observed=True)",
        replacement="_add_gradients(pairs, attempt, observed=True), buffers.write()",
        seen_by=("test_gradient_hook_writes_stay"),
    ),
    Sabotage(
        name="a rollback forgets .grad",
        promise="all or nothing",
        file="step/undo.py",
        place="Undo.save_gradients",
        text='partial(setattr, leaf, "grad", leaf.grad)',
        replacement="(lambda: None)",
        seen_by="test_accumulation_hooks_run_once",
    ),
    Sabotage(
        name="a rollback forgets values",
        promise="all or nothing",
        file="step/undo.py",
        place="Undo.restore",
        text="partial(write, tensor, value)",
        replacement="(lambda: None)",
        seen_by="test_failed_step_restores_closure_state",
    ),
    Sabotage(
        name="a rollback forgets torch's generators",
        promise="all or nothing",
        file="step/undo.py",
        place="Undo.restore",
        text="self._generators.rollback, ",
        replacement="",
        seen_by="test_failed_step_restores_generator",
    ),
    Sabotage(
        name="a rollback forgets the user's generators",
        promise="all or nothing",
        file="step/undo.py",
        place="Undo.save_generator",
        text="partial(generator.set_state, generator.get_state())",
        replacement="(lambda: None)",
        seen_by="test_failed_step_restores_closure_state",
    ),
    Sabotage(
        name="a loss that is not finite is committed in spite of check_finite=True",
        promise="all or nothing",
        file="step/share_losses.py",
        place="ShareLosses.read",
        text="if self._check_finite and not math.isfinite(loss):",
        replacement="if False:",
        seen_by="test_non_finite_loss_named_no_change",
    ),
    Sabotage(
        name="the gradients of a trial stay while the next try runs",
        promise="all or nothing",
        file="step/tries.py",
        place="Tries.__exit__",
        text="self.result = None",
        replacement="pass",
        seen_by="test_trial_gradients_freed_before_retry",
    ),
    Sabotage(
        name="trials of an automatic accum call the user's function of outputs",
        promise="all or nothing",
        file="options/auto_accum.py",
        place="Search._try",
        text="replace(request, return_outputs=False)",
        replacement="request",
        seen_by="test_trials_skip_functions_of_outputs",
    ),
    Sabotage(
        name="inputs are kept while the criterion runs",
        promise="all or nothing",
        file="step/loss.py",
        place="forward",
        text="del rows, inputs",
        replacement="pass",
        seen_by="test_unneeded_inputs_freed_early",
    ),
    Sabotage(
        name="Ctrl-C is forgotten",
        promise="all or nothing",
        file="threads/workers.py",
        place="Workers._wait",
        text="job.errors[_CALLER] = error",
        replacement="pass",
        seen_by="test_long_step_ends_at_next_sub_step",
    ),
    Sabotage(
        name="threads that were abandoned keep replicas that the next step uses",
        promise="all or nothing",
        file="engine.py",
        place="ScatterOnceParallel._attempt",
        text="self._replicas.discard()",
        replacement="pass",
        seen_by="test_second_ctrl_c_leaves_stuck_replica",
    ),
    Sabotage(
        name="a rank that fails lets the others wait",
        promise="all or nothing",
        file="distributed/ranks.py",
        place="Ranks.failing_together",
        text="if not self._error_is_common:",
        replacement="if False:",
        seen_by="test_failing_rank_fails_all",
    ),
    Sabotage(
        name="two engines may step on one module at once",
        promise="all or nothing",
        file="threads/workers.py",
        place="Workers.exclusive",
        text="_claims.setdefault(key, self) is not self:",
        replacement="_claims.setdefault(key, self) is None:",
        seen_by="test_two_engines_in_threads_refused",
    ),
    Sabotage(
        name="the caller's tensors may be written by a sub-step",
        promise="all or nothing",
        file="step/scatter.py",
        place="ShareLoader.load",
        text="self.at_source(sub_step).unwrapped(copy=True)",
        replacement="self.at_source(sub_step).unwrapped()",
        seen_by="test_in_place_layers_spare_the_inputs",
    ),
    # --- same bits ---
    Sabotage(
        name="gradients are added in any order",
        promise="same bits",
        file="step/reduce.py",
        place="sum_in_order",
        text="tree_pairs(len(sums))",
        replacement=(
            "sorted(((0, i) for i in range(1, len(sums))), key=lambda _: "
            '__import__("os").urandom(4))'
        ),
        seen_by="test_sum_has_same_bits_every_time",
    ),
    Sabotage(
        name="owners add large gradients in another order",
        promise="same bits",
        file="step/owners.py",
        place="_Device.add",
        text="while turn & 1:",
        replacement="while len(self._partial_sums) > 1:",
        seen_by="test_sums_have_the_bits_of_the_tree",
    ),
    Sabotage(
        name="owners leave a replica's gradient out",
        promise="exact",
        file="step/owners.py",
        place="_Device._plus",
        text="elif not self._partial_sums:",
        replacement="elif self._partial_sums:",
        seen_by="test_sums_have_the_bits_of_the_tree",
    ),
    Sabotage(
        name="a chain of devices ends early",
        promise="exact",
        file="devices/relay.py",
        place="relay",
        text="pairwise(zip(devices, places, strict=True))",
        replacement="pairwise(zip(devices[:-1], places, strict=False))",
        seen_by="test_all_get_values_of_the_first",
    ),
    Sabotage(
        name="all replicas of a rank draw the same numbers",
        promise="same bits",
        file="threads/generators.py",
        place="Generators._generator",
        text="replica + self._replica_offset",
        replacement="self._replica_offset",
        seen_by="test_each_replica_draws_its_own_masks",
    ),
    Sabotage(
        name="a second pass and checks move the replicas' generators",
        promise="same bits",
        file="step/task.py",
        place="ReplicaTask.isolated",
        text="restored(partial(generators.set_state, replica, state))",
        replacement="contextlib.nullcontext()",
        seen_by=("test_same_seed_same_bits_and_random_state"),
    ),
    Sabotage(
        name="devices of the CPU ask whether there is an accelerator",
        promise="as in plain torch",
        file="devices/device_ids.py",
        place="resolve",
        text="return tuple(map(_resolve_one, device_ids))",
        replacement="_accelerator(); return tuple(map(_resolve_one, device_ids))",
        seen_by="test_cpu_devices_ask_for_no_accelerator",
    ),
    Sabotage(
        name="a look does not save an accelerator's generator",
        promise="a look leaves no trace",
        file="objects/savers.py",
        place="_TorchRandom",
        text="kinds = (torch.Generator, AcceleratorGenerator)",
        replacement="kinds = (torch.Generator,)",
        seen_by="test_generators_of_all_devices_put_back",
    ),
    Sabotage(
        name="a look moves a NumPy generator of the user's own class",
        promise="a look leaves no trace",
        file="objects/savers.py",
        place="_NumpyRandom.fits",
        text="for base in kind.__mro__",
        replacement="for base in [kind]",
        seen_by="test_value_is_put_back",
    ),
    Sabotage(
        name="a look counts what a sequence of seeds spawns",
        promise="a look leaves no trace",
        file="objects/savers.py",
        place="_set_own_state",
        text="value.__setstate__(pickle.loads(state))",
        replacement="pickle.loads(state)",
        seen_by="test_value_is_put_back",
    ),
    Sabotage(
        name="a look does not enter arrays of objects",
        promise="a look leaves no trace",
        file="objects/walk.py",
        place="Walk._follow_array",
        text="array.dtype.hasobject and array.size <= MAX_ENTRIES",
        replacement="array.dtype.kind is None",
        seen_by="test_value_is_put_back",
    ),
    Sabotage(
        name="a look writes the file in a library's object",
        promise="a look leaves no trace",
        file="objects/walk.py",
        place="Walk._follow_object",
        text="if owner is Whose.LIBRARY:",
        replacement="if False:",
        seen_by="test_file_of_a_librarys_object_is_named",
    ),
    Sabotage(
        name="a container of the user's own class is restored by its own methods",
        promise="a look leaves no trace",
        file="objects/snapshot.py",
        place="refill",
        text="base.clear(container)",
        replacement="container.clear()",
        seen_by="test_contents_restored_past_own_methods",
    ),
    Sabotage(
        name="a value that a journal is given is skipped if it has no row",
        promise="a look leaves no trace",
        file="objects/journal.py",
        place="Journal._save_given",
        text="if saver_of(kind) is None:",
        replacement="if False:",
        seen_by="test_given_value_without_row_is_named",
    ),
    Sabotage(
        name="numbers that replicas draw in inference are drawn again",
        promise="same bits",
        file="options/map_rows.py",
        place="Mapped.commit",
        text="self.attempt.generators.commit()",
        replacement="pass",
        seen_by="test_seed_decides_inference_draws",
    ),
    Sabotage(
        name="numbers that only another replica than the first draws are drawn again",
        promise="same bits",
        file="threads/generators.py",
        place="Generators.commit",
        text="for _, device in drawn}",
        replacement="for number, device in drawn if not number}",
        seen_by="test_draw_of_any_replica_moves_generator",
    ),
    # --- as in plain torch ---
    Sabotage(
        name="workers compute under autocast in its default dtype",
        promise="as in plain torch",
        file="threads/caller_context.py",
        place="CallerContext.__init__",
        text="partial(torch.autocast, kind, dtype)",
        replacement="partial(torch.autocast, kind)",
        seen_by="test_autocast_reaches_workers_uncached",
    ),
    Sabotage(
        name="workers do not see the caller's context variables",
        promise="as in plain torch",
        file="threads/caller_context.py",
        place="CallerContext.bound",
        text="partial(variables.run, self._run, device, work, args)",
        replacement="partial(self._run, device, work, args)",
        seen_by="test_contextvars_reach_workers",
    ),
    Sabotage(
        name="hooks on parameters are left out",
        promise="as in plain torch",
        file="step/commit.py",
        place="_add_gradients",
        text="if not observed and not earlier",
        replacement="if not earlier",
        seen_by="test_parameter_hooks_run_once_on_sum",
    ),
    Sabotage(
        name="keys of a state dict begin with module.",
        promise="as in plain torch",
        file="wrapper.py",
        place="Wrapper.state_dict",
        text="return self._inner.state_dict(*args, **kwargs)",
        replacement="return super().state_dict(*args, **kwargs)",
        seen_by="test_keys_load_with_or_without_prefix",
    ),
    Sabotage(
        name="a replica that has compiled in a call does not let the others compile",
        promise="fast",
        file="replicas/replicas.py",
        place="ReplicaSet.end_substep",
        text="self.compiler.release()",
        replacement="pass",
        seen_by="test_calls_of_compiled_criteria_are_exact",
    ),
    Sabotage(
        name="no backward pass of a call gives the compiler's lock back",
        promise="fast",
        file="replicas/compiled.py",
        place="Compiler._enter_backward",
        text="at_end_of_pass(partial(self._release, thread))",
        replacement="pass",
        seen_by="test_calls_of_compiled_criteria_are_exact",
    ),
    Sabotage(
        name="compile= is forgotten, and replicas run eagerly",
        promise="as in plain torch",
        file="replicas/compiled.py",
        place="Compiler.compiled_call",
        text="compile_fn(run)",
        replacement="run",
        seen_by="test_trains_as_the_eager_engine",
    ),
    Sabotage(
        name="inference in training mode moves no statistics",
        promise="as in plain torch",
        file="options/map_rows.py",
        place="buffers_of",
        text="if not any(part.training for part in module.modules()):",
        replacement="if True:",
        seen_by="test_inference_moves_statistics",
    ),
    Sabotage(
        name="a loop's accumulation adds gradients in every batch",
        promise="loops of libraries",
        file="integrations/divided_modules.py",
        place="DividedModules.no_sync",
        text="len(self._device_ids) == 1",
        replacement="True",
        seen_by="test_gradients_are_added_outside_of_no_sync",
    ),
    Sabotage(
        name="a checkpoint inside of the model is divided again",
        promise="loops of libraries",
        file="integrations/divided_modules.py",
        place="DividedModules._is_of_batch",
        text="not is_again or call.module in self._divided_parts",
        replacement="True",
        seen_by="test_checkpoint_inside_of_the_model",
    ),
    Sabotage(
        name="modules without parameters are divided",
        promise="loops of libraries",
        file="integrations/divided_modules.py",
        place="_find_with_parameters",
        text="if has_parameters:",
        replacement="if True:",
        seen_by="test_which_calls_are_divided",
    ),
    Sabotage(
        name="workers do not see the caller's hooks on saved tensors",
        promise="as in plain torch",
        file="threads/caller_context.py",
        place="CallerContext.__init__",
        text="if hooks:",
        replacement="if False:",
        seen_by="test_saved_tensors_hooks_reach_workers",
    ),
    Sabotage(
        name="hooks on parameters run in engine.check",
        promise="as in plain torch",
        file="verify/gradient_check.py",
        place="compare",
        text="hooks_taken_off(leaves)",
        replacement="hooks_taken_off([])",
        seen_by="test_check_leaves_no_trace",
    ),
    # --- clear errors ---
    Sabotage(
        name="the user's exception is replaced",
        promise="clear errors",
        file="threads/workers.py",
        place="Workers.results_of",
        text="raise error",
        replacement="raise RuntimeError(str(error))",
        seen_by="test_lowest_error_raised_others_noted",
    ),
    Sabotage(
        name="the note on an error names no sub-step",
        promise="clear errors",
        file="step/replica_threads.py",
        place="ReplicaNote.__exit__",
        text="if self.sub_step is not None:",
        replacement="if False:",
        seen_by="test_words_of_a_note",
    ),
    Sabotage(
        name="a right step is refused, because its gradient is rounded otherwise",
        promise="clear errors",
        file="numerics/rounding.py",
        place="Rounding.tolerance",
        text="max((known.tolerance for known in self.formats), default=0.0)",
        replacement="0.0",
        seen_by="test_right_program_is_silent",
    ),
    Sabotage(
        name="a right step is refused, because its gradient nearly cancels in a row",
        promise="clear errors",
        file="verify/look.py",
        place="first_report",
        text="if may_be_rounding and in_double.runs.user_code.is_widened:",
        replacement="if False:",
        seen_by="test_cancelling_gradients_not_refused",
    ),
    Sabotage(
        name="after a refusal the next step is not asked",
        promise="exact",
        file="verify/schedule.py",
        place="Kind.count_step",
        text="if self.stage is Stage.REFUSED:",
        replacement="if False:",
        seen_by="test_refused_looked_at_until_agreement",
    ),
    Sabotage(
        name="a module in evaluation mode hides what is wrong, without state that moves",
        promise="exact",
        file="verify/look_causes.py",
        place="depends_on_earlier_parts",
        text="return bool(results.moved) and combines_in_evaluation(results)",
        replacement="return combines_in_evaluation(results)",
        seen_by="test_state_of_earlier_parts",
    ),
    Sabotage(
        name="outputs that depend on other rows hide a loss that does not combine",
        promise="clear errors",
        file="verify/look_causes.py",
        place="do_rows_meet",
        text="if results.request.whole_batch or do_losses_combine(results):",
        replacement="if True:",
        seen_by="test_rows_meet_in_the_module",
    ),
    Sabotage(
        name="a step is trained whose rows broadcast in a micro-batch alone",
        promise="exact",
        file="verify/look.py",
        place="ReplicaLook.verdict_of_broadcast",
        text="if broadcast is None:",
        replacement="if True:",
        seen_by="test_rows_that_broadcast_are_refused",
    ),
    Sabotage(
        name="a criterion for a fixed number of rows is refused",
        promise="clear errors",
        file="verify/row_broadcasts.py",
        place="_has_rows",
        text="return changed == [(num_rows, all_rows)]",
        replacement="return True",
        seen_by="test_fixed_number_of_rows_is_not_refused",
    ),
    Sabotage(
        name="the pair looks at fewer rows than its shares have, if these broadcast",
        promise="exact",
        file="verify/output_looks.py",
        place="_rows_of_look",
        text="if is_even and sizes <= {*columns}:",
        replacement="if False:",
        seen_by="test_rows_of_the_pair_that_broadcast_are_refused",
    ),
    # --- each question that may end in right says yes ---
    Sabotage(
        name="every difference of a look is within its tolerance",
        promise="exact",
        file="verify/look_rounding.py",
        place="ComparedResults.is_within_tolerance",
        text="return self.difference <= self.tolerance",
        replacement="return True",
        seen_by="test_wrong_loss_is_never_silent",
    ),
    Sabotage(
        name="every result of a look is the expected one",
        promise="exact",
        file="verify/look_rounding.py",
        place="ComparedResults.is_expected",
        text="return result.difference_from(self.expected) <= self.limit",
        replacement="return True",
        seen_by="test_no_limit_explains_what_is_not_finite",
    ),
    Sabotage(
        name="a row that is not finite is evidence of rounding",
        promise="exact",
        file="verify/look_rounding.py",
        place="_is_rounding_of",
        text="if not (summands and all(result.is_finite for result in compared)):",
        replacement="if not summands:",
        seen_by="test_row_that_is_not_finite_is_no_evidence",
    ),
    Sabotage(
        name="no row at all is evidence of rounding",
        promise="exact",
        file="verify/look_rounding.py",
        place="_is_rounding_of",
        text="summands and all(",
        replacement="all(",
        seen_by="test_nothing_is_no_evidence",
    ),
    Sabotage(
        name="rows that do not add up are evidence of rounding",
        promise="exact",
        file="verify/look_rounding.py",
        place="_do_rows_cancel",
        text="if _is_rounding_of(summands, summed, at_once, rounding, results.tolerance):",
        replacement="if True:",
        seen_by="test_rows_that_do_not_add_up_say_nothing",
    ),
    Sabotage(
        name="rounding of rows explains every gradient",
        promise="exact",
        file="verify/look_rounding.py",
        place="_is_rounding_of",
        text="if not error <= max(rounding * sum(sizes_of_leaf), by_scale):",
        replacement="if False:",
        seen_by="test_sum_of_zero_differs_by_its_rows",
    ),
    Sabotage(
        name="rounding of rows explains every loss",
        promise="exact",
        file="verify/look_rounding.py",
        place="_is_rounding_of",
        text="if not error <= max(rounding * size, tolerance * scale):",
        replacement="if False:",
        seen_by="test_loss_of_zero_differs_by_its_rows",
    ),
    Sabotage(
        name="every nudge turns the result at once into that in parts",
        promise="exact",
        file="verify/look_rounding.py",
        place="_difference_by_nudges",
        text="nudged.difference_from(results.actual) <= results.tolerance",
        replacement="True",
        seen_by="test_nudges_explain_no_wrong_sum",
    ),
    Sabotage(
        name="a nudge that overflows explains every difference",
        promise="exact",
        file="numerics/nudges.py",
        place="rounding_limit",
        text="filter(math.isfinite, limits)",
        replacement="limits",
        seen_by="test_nudge_that_is_not_finite_explains_nothing",
    ),
    Sabotage(
        name="float64 is not asked what rows alone explain",
        promise="exact",
        file="verify/verdicts.py",
        place="Verdict.may_be_rounding",
        text="return is_refused or self.rests_on_rows",
        replacement="return is_refused",
        seen_by="test_float64_confirms_what_rows_alone_explain",
    ),
    Sabotage(
        name="NaN is no difference of gradients",
        promise="exact",
        file="numerics/comparison.py",
        place="relative_differences",
        text="quotients.append(math.inf)",
        replacement="quotients.append(0.0)",
        seen_by="test_value_that_is_not_finite_is_infinitely_off",
    ),
    Sabotage(
        name="NaN of a loss at once is no difference",
        promise="exact",
        file="verify/results.py",
        place="Result.difference_from",
        text="math.isfinite(self.loss) and math.isfinite(expected.loss)",
        replacement="math.isfinite(self.loss)",
        seen_by="test_results_differ_by_the_larger_part",
    ),
    Sabotage(
        name="NaN is no difference of outputs",
        promise="clear errors",
        file="verify/output_differences.py",
        place="_difference_of_outputs",
        text="left_out = is_same & ~expected.isfinite()",
        replacement="left_out = ~(actual.isfinite() & expected.isfinite())",
        seen_by="test_outputs_relative_to_largest_entry",
    ),
    Sabotage(
        name="everything is close to infinity",
        promise="clear errors",
        file="causes/vectors.py",
        place="is_close",
        text="return bool(bound.isfinite()) and bool(error <= bound)",
        replacement="return bool(error <= bound)",
        seen_by="test_what_is_not_finite_gets_a_no",
    ),
    Sabotage(
        name="a result that is not repeated is right, however losses combine",
        promise="exact",
        file="verify/look_causes.py",
        place="is_unrepeatable",
        text="if not do_losses_combine(results):",
        replacement="if False:",
        seen_by="test_own_module_repeats_its_result",
    ),
    Sabotage(
        name="losses of every output combine",
        promise="exact",
        file="verify/look_causes.py",
        place="do_losses_combine",
        text="return combined.difference_from(whole) <= results.tolerance",
        replacement="return True",
        seen_by="test_losses_of_one_output_combine",
    ),
    Sabotage(
        name="parts are right whatever numbers they draw",
        promise="exact",
        file="verify/look_causes.py",
        place="draws_per_part",
        text="return results.is_expected(results.in_parts(results.runs.user_code.restore_generators))",
        replacement="return True",
        seen_by="test_parts_draw_the_same_numbers",
    ),
    Sabotage(
        name="parts are right in evaluation mode",
        promise="clear errors",
        file="verify/look_causes.py",
        place="combines_in_evaluation",
        text="return actual.difference_from(expected) <= results.limit",
        replacement="return True",
        seen_by="test_state_of_earlier_parts",
    ),
    Sabotage(
        name="rows whose loss is NaN say that a step is right",
        promise="exact",
        file="verify/look.py",
        place="_require_gradients",
        text="if not expected.is_finite:",
        replacement="if False:",
        seen_by="test_look_says_that_it_knows_nothing",
    ),
    Sabotage(
        name="rows without a gradient say that a step is right",
        promise="exact",
        file="verify/look.py",
        place="_require_gradients",
        text="is_loss_zero or (expected.gradients and not has_gradient)",
        replacement="is_loss_zero",
        seen_by="test_zero_is_no_evidence",
    ),
    Sabotage(
        name="a look ends with rows that say nothing",
        promise="exact",
        file="verify/look.py",
        place="ReplicaLook.answer_of_step",
        text="if self._is_small_batch:",
        replacement="if False:",
        seen_by="test_rows_that_say_nothing_are_no_yes",
    ),
    Sabotage(
        name="a row without a term is in a part with others",
        promise="exact",
        file="verify/rows.py",
        place="RowChoice.divided",
        text="for row in candidates[:1]:",
        replacement="for row in ():",
        seen_by="test_row_without_a_term_is_a_part",
    ),
    Sabotage(
        name="state that makes a loss NaN is none",
        promise="clear errors",
        file="verify/measurements.py",
        place="state_that_begins",
        text="return [] if difference <= runs.rounding.limit else names",
        replacement="return names if math.inf > difference > runs.rounding.limit else []",
        seen_by="test_state_that_makes_nan_is_told",
    ),
    Sabotage(
        name="engine.check passes every difference",
        promise="exact",
        file="verify/gradient_check.py",
        place="GradientCheck.passed",
        text="return self.worst <= self.limit",
        replacement="return True",
        seen_by="test_engine_check_does_not_pass_it",
    ),
    Sabotage(
        name="engine.check takes float64's word for another step",
        promise="exact",
        file="verify/gradient_check.py",
        place="PlainComparison.beside",
        text="if not (is_rounding and in_double.report.worst <= self.report.limit):",
        replacement="if not in_double.report.worst <= self.report.limit:",
        seen_by="test_difference_in_single_precision_alone_fails",
    ),
    Sabotage(
        name="splitcheck passes every difference",
        promise="exact",
        file="splitting/check_report.py",
        place="SplitCheck.passed",
        text="return self.worst <= self.limit",
        replacement="return True",
        seen_by="test_splitcheck_does_not_pass_it",
    ),
    Sabotage(
        name="a grid without a cell passes",
        promise="exact",
        file="splitting/grid.py",
        place="SplitGrid.passed",
        text="return bool(self.cells) and all(",
        replacement="return all(",
        seen_by="test_nothing_gets_a_no",
    ),
    Sabotage(
        name="no parameter differs in splitcheck",
        promise="clear errors",
        file="splitting/trial.py",
        place="Trial.differing",
        text="if not error <= self.limit",
        replacement="if False",
        seen_by="test_parameters_beyond_limit_are_named",
    ),
    Sabotage(
        name="a right step is refused, because gradients of its rows nearly cancel",
        promise="clear errors",
        file="verify/look_rounding.py",
        place="ComparedResults.rests_on_rows",
        text="return _do_rows_cancel(self)",
        replacement="return False",
        seen_by="test_cancelling_gradients_not_refused",
    ),
    Sabotage(
        name="a refusal of a loop's step names arguments that the loop has not",
        promise="clear errors",
        file="verify/look_words.py",
        place="step_is_refused",
        text="if not (verdict.problem and remedies):",
        replacement="if True:",
        seen_by="test_refusal_names_the_callers_remedies",
    ),
    Sabotage(
        name="each look takes as many rows as the first one",
        promise="fast",
        file="verify/look_request.py",
        place="_most_rows",
        text="if not number:",
        replacement="if True:",
        seen_by="test_later_looks_have_fewer_rows",
    ),
    Sabotage(
        name="a right step is refused, because slopes of RReLU are drawn",
        promise="clear errors",
        file="numerics/constant_numbers.py",
        place="_constant_arguments",
        text="if set(_SLOPES) <= values.keys():",
        replacement="if False:",
        seen_by="test_right_random_layers_not_refused",
    ),
    Sabotage(
        name="a look's own mistake lets a wrong loss go on",
        promise="clear errors",
        file="verify/look.py",
        place="_is_mistake_in_verify",
        text="if not isinstance(error, _OF_MISTAKES):",
        replacement="if True:",
        seen_by="test_mistake_of_a_look_is_not_silent",
    ),
    Sabotage(
        name="a list with a dict per row goes whole to every micro-batch",
        promise="exact",
        file="batch/markers.py",
        place="_kind_of_entries",
        text='return names if are_records or not has_rows else ""',
        replacement="return names if names == 'texts' else ''",
        seen_by="test_bad_input_refused_changes_nothing",
    ),
    Sabotage(
        name="tensors of a batch lose their classes",
        promise="exact",
        file="batch/classes.py",
        place="like",
        text="if kind not in _PLAIN_TENSORS and type(result) is not kind:",
        replacement="if False:",
        seen_by="test_class_and_attributes_reach_module",
    ),
    Sabotage(
        name="a look moves an argument of the module",
        promise="exact",
        file="verify/user_code.py",
        place="UserCode._save",
        text="*roots_of_batches(request.batches)",
        replacement="*()",
        seen_by="test_look_leaves_argument",
    ),
    Sabotage(
        name="generators that a function moved stay moved if it fails",
        promise="all or nothing",
        file="options/map_rows.py",
        place="map_rows",
        text="save_referents(attempt, function)",
        replacement="pass",
        seen_by="test_failed_function_leaves_generators",
    ),
    Sabotage(
        name="tries that run out of memory draw from a module's generator",
        promise="exact",
        file="options/auto_accum.py",
        place="Search.go_on_after",
        text="self._journal.restore()",
        replacement="pass",
        seen_by="test_tries_that_run_out_of_memory_leave_no_trace",
    ),
    Sabotage(
        name="state that begins in a forward pass is lost, silently",
        promise="exact",
        file="verify/look.py",
        place="ReplicaLook._moved",
        text="moved += self._measured(state_that_begins, rows[:_FEW_ROWS])",
        replacement="pass",
        seen_by="test_state_that_begins_is_told",
    ),
    Sabotage(
        name="a replica's hook that finds its module by a key calls the user's",
        promise="exact",
        file="objects/reach.py",
        place="_parts_or_entries",
        text="return [*value, *value.values()] if isinstance(value, dict) else value",
        replacement="return value.values() if isinstance(value, dict) else value",
        seen_by="test_each_question_follows",
    ),
    Sabotage(
        name="each step searches a vocabulary in the module",
        promise="fast",
        file="replicas/module_contents.py",
        place="ModuleContents._visit",
        text="if not is_shared_data(value):",
        replacement="if True:",
        seen_by="test_long_containers_of_plain_values_are_shared",
    ),
    Sabotage(
        name="a closed engine steps on",
        promise="clear errors",
        file="threads/workers.py",
        place="Workers._refuse_if_closed",
        text="if self._closed:",
        replacement="if False:",
        seen_by="test_close_twice_and_before_use",
    ),
    Sabotage(
        name="a second backward pass of engine.loss gives nothing",
        promise="clear errors",
        file="step/commit.py",
        place="_ReturnGradients.backward",
        text="raise RuntimeError(_TWICE)",
        replacement=(
            "return (None, None, None, *[None] * (len(ctx.needs_input_grad) - 3))"
        ),
        seen_by="test_second_backward_is_an_error",
    ),
    Sabotage(
        name="a report says that nothing was tried again",
        promise="clear errors",
        file="step/step_report.py",
        place="make_report",
        text="retries=attempt.retries",
        replacement="retries=0",
        seen_by="test_auto_has_the_bits_of_fixed_accum",
    ),
    Sabotage(
        name="rows per second are those of the longest phase",
        promise="the report",
        file="report.py",
        place="StepReport.rows_per_second",
        text="return self.plan.rows / sum(self.seconds.values())",
        replacement="return self.plan.rows / max(self.seconds.values())",
        seen_by="test_repr_is_one_line_speed_without_wait",
    ),
    Sabotage(
        name="a report's busy part is the idle one",
        promise="the report",
        file="report.py",
        place="StepReport._replicas",
        text='f"{1 - idle:.0%}"',
        replacement='f"{idle:.0%}"',
        seen_by="test_report_shows_what_devices_do",
    ),
    Sabotage(
        name="the serial part of a step is that of the slowest replica",
        promise="the report",
        file="report.py",
        place="StepReport._speed",
        text="min(self.idle)",
        replacement="max(self.idle)",
        seen_by="test_report_shows_what_devices_do",
    ),
    Sabotage(
        name="a check before the step counts as its serial part",
        promise="the report",
        file="report.py",
        place="StepReport.hint",
        text=" - self.check_seconds",
        replacement="",
        seen_by="test_hint_is_of_a_step_without_a_check",
    ),
    Sabotage(
        name="a report does not print its hint",
        promise="the report",
        file="report.py",
        place="StepReport.__str__",
        text="if self.hint:",
        replacement="if not self.hint:",
        seen_by="test_hint_fits_the_situation",
    ),
    Sabotage(
        name="a step that is mostly serial has no hint",
        promise="the report",
        file="hints.py",
        place="hint_for",
        text="if step.serial > _MUCH_SERIAL:",
        replacement="if step.serial > 1:",
        seen_by="test_hint_fits_the_situation",
    ),
    Sabotage(
        name="a hint comes although graphs will",
        promise="the report",
        file="hints.py",
        place="hint_for",
        text=" or step.may_still_capture",
        replacement="",
        seen_by="test_hint_fits_the_situation",
    ),
    Sabotage(
        name="larger micro-batches are the hint for a memory that is full",
        promise="the report",
        file="hints.py",
        place="remedies_of_launching",
        text="if num_substeps > 1 and has_room:",
        replacement="if num_substeps > 1:",
        seen_by="test_hint_fits_the_situation",
    ),
    Sabotage(
        name="a report of graphs counts replays as all sub-steps",
        promise="the report",
        file="report.py",
        place="GraphReport.__new__",
        text="report.total = total",
        replacement="report.total = replayed",
        seen_by="test_graphs_are_a_record_that_prints_as_a_sentence",
    ),
    Sabotage(
        name="a report does not tell how long the check took",
        promise="the report",
        file="step/step_report.py",
        place="make_report",
        text="check_seconds=attempt.check_seconds",
        replacement="check_seconds=0.0",
        seen_by="test_step_tells_its_check_and_devices",
    ),
    Sabotage(
        name="copies that arrive altered are not noticed",
        promise="clear errors",
        file="engine.py",
        place="ScatterOnceParallel._attempt",
        text="check_links(self.device_ids)",
        replacement="pass",
        seen_by="test_engine_refuses_corrupting_memory",
    ),
    # --- splitcheck: no wrong loop passes ---
    Sabotage(
        name="rows keep their usual order, also if it hides a count",
        promise="splitcheck",
        file="splitting/row_parts.py",
        place="_best",
        text="return int((smallest >= smallest.max() - _ROUNDING_OF_COUNTS).nonzero()[0])",
        replacement="return 0",
        seen_by="test_count_without_first_entry_differs_too",
    ),
    Sabotage(
        name="a part without terms gets none in a second order either",
        promise="splitcheck",
        file="splitting/row_parts.py",
        place="orders_of_rows",
        text="if are_filled[with_terms].sum() > are_filled[numbers].sum():",
        replacement="if False:",
        seen_by="test_part_without_terms_gets_some",
    ),
    Sabotage(
        name="a gradient of the whole batch may be zero",
        promise="splitcheck",
        file="splitting/steady_numbers.py",
        place="first_reference",
        text="if len(vanished) == len(as_drawn.gradients) or is_zero(result.gradients):",
        replacement="if False:",
        seen_by="test_comparison_of_nothing_refused",
    ),
    Sabotage(
        name="a cast widens the limit, though float64 was in its place",
        promise="splitcheck",
        file="splitting/operator_modes.py",
        place="WatchedOperators.__torch_dispatch__",
        text='dtype = arguments.get("dtype") if self._in_double else None',
        replacement="dtype = None",
        seen_by="test_small_mistake_beside_a_cast_is_found",
    ),
    Sabotage(
        name="what is trained outside of the model is not compared",
        promise="splitcheck",
        file="splitting/trained_leaves.py",
        place="leaves_of_step",
        text="if value.is_leaf and value.requires_grad:",
        replacement="if False:",
        seen_by="test_parameters_of_criterion_are_compared",
    ),
    Sabotage(
        name="a teacher that moves counts as weights that are trained",
        promise="splitcheck",
        file="splitting/trained_leaves.py",
        place="TrainedGradients._run_backward",
        text="if id(leaf) in reached:",
        replacement="if True:",
        seen_by="test_what_moves_is_told_from_what_is_trained",
    ),
    Sabotage(
        name="the weight that a loop gives a part alone is not seen",
        promise="splitcheck",
        file="splitting/split_results.py",
        place="SplitResults._own_weights",
        text="return terms / total",
        replacement="pass",
        seen_by="test_wrong_loop_is_found_and_named",
    ),
    Sabotage(
        name="the gradients of rank 0 stand for those of all ranks",
        promise="splitcheck",
        file="splitting/trial.py",
        place="Trial._judged",
        text="for result in results]",
        replacement="for result in results[:1]]",
        seen_by="test_wrong_gradient_of_the_last_rank_is_found",
    ),
    Sabotage(
        name="clipping after each part changes nothing",
        promise="splitcheck",
        file="splitting/clippings.py",
        place="Clippings._halve",
        text="not is_close(gradient, whole(clipped), EXACT)",
        replacement="False",
        seen_by="test_all_clippings_but_the_last_halve",
    ),
    Sabotage(
        name="random operators give other numbers in each part",
        promise="splitcheck",
        file="splitting/operator_modes.py",
        place="RepeatedNumbers.__torch_dispatch__",
        text="if not is_random or self._numbers is Numbers.AS_DRAWN:",
        replacement="if True:",
        seen_by="test_dropout_is_no_draw_of_rows",
    ),
    # --- loops of libraries: as on one device ---
    Sabotage(
        name="a resumed run draws other random numbers",
        promise="the training program: the same bits",
        file="train.py",
        place="ImageBatches.of_epoch",
        text='seed = seed_of("order", self._seed, epoch)',
        replacement='seed = seed_of("order", self._seed, len(self._keys), epoch)',
        seen_by="test_resumed_run_ends_with_the_same_bits",
    ),
    Sabotage(
        name="a resumed run begins its schedule again",
        promise="the training program: the same bits",
        file="train.py",
        place="Run.__init__",
        text='"scheduler": self.scheduler,',
        replacement="",
        seen_by="test_resumed_run_ends_with_the_same_bits",
    ),
    Sabotage(
        name="a picture is varied by what its worker has drawn",
        promise="the training program: the same bits",
        file="train.py",
        place="Pictures.__getitem__",
        text="torch.manual_seed(seed)",
        replacement="",
        seen_by="test_run_on_files_is_same_with_any_workers",
        needs="timm",
    ),
    Sabotage(
        name="a file is written in its place",
        promise="the training program: old or new",
        file="train.py",
        place="atomic_file",
        text='part = path.with_name(path.name + ".part")',
        replacement="part = path",
        seen_by="test_file_is_old_or_new",
    ),
    Sabotage(
        name="a worker's end by SIGTERM is an error",
        promise="the training program: signals",
        file="train.py",
        place="Run.train",
        text="self._stop_if_asked()",
        replacement="",
        seen_by="test_signal_to_all_processes_is_a_stop",
    ),
    Sabotage(
        name="pictures that cannot be read are left out",
        promise="the training program: pictures",
        file="train.py",
        place="ImageBatches.of_epoch",
        text="if unreadable:",
        replacement="if False:",
        seen_by="test_unreadable_picture_is_named",
        needs="timm",
    ),
    Sabotage(
        name="training images are tested",
        promise="the training program: pictures",
        file="train.py",
        place="check_parts",
        text="if train.root is not None and len(roots) < 3:",
        replacement="if False:",
        seen_by="test_other_layout_is_one_line",
        needs="timm",
    ),
]


def main():
    """Try all sabotages, or some, and print which test sees each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only lines that have all of these")
    words = parser.parse_args().words
    tried = []
    for sabotage in SABOTAGES:
        is_installed = not sabotage.needs or find_spec(sabotage.needs) is not None
        if is_installed and all(word in sabotage.line for word in words):
            tried.append(sabotage)
    print("sabotage | promise | seen by")
    seen = 0
    with ThreadPoolExecutor(2) as pool:
        for sabotage, found in zip(tried, pool.map(failed_test, tried), strict=True):
            test, end = found
            print(f"{sabotage.line} | {test or f'NOBODY: {end}'}", flush=True)
            seen += bool(test)
    print(f"{seen} of {len(tried)} sabotages are seen")
    sys.exit(seen < len(tried))


def failed_test(sabotage):
    """The test that fails under a sabotage, and how its process has ended.

    The test is empty if all pass, or if the process hangs or is killed.
    """
    with copy_of_package(dict([sabotaged(sabotage)])) as copy:
        output = Path(copy, "output")
        test = [name_of_test(sabotage), str(output)]
        process = _forks().Process(target=_run_test, args=(copy, *test))
        process.start()
        process.join(LIMIT_SECONDS)
        is_late = process.is_alive()
        if is_late:
            process.kill()
            process.join()
        said = output.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", said, re.MULTILINE)
    end = f"{'late' if is_late else 'ended'} with {process.exitcode}"
    return found[1] if found else "", f"{end}: {said[-8000:]}"


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
    """The path of the file that a sabotage changes, and its text afterwards."""
    path = Path("scatterpar", sabotage.file)
    source, tree = _parsed(path)
    nodes = [tree]
    for part in sabotage.place.split("."):
        children = [child for node in nodes for child in getattr(node, "body", [])]
        nodes = [child for child in children if getattr(child, "name", "") == part]
    changed = []
    for node in nodes:
        body = ast.get_source_segment(source, node)
        for match in in_any_layout(sabotage.text).finditer(body):
            before, after = body[: match.start()], body[match.end() :]
            new_body = before + sabotage.replacement + after
            changed.append(source.replace(body, new_body))
    if len(changed) != 1:
        raise LookupError(
            f"{sabotage.text!r} is {len(changed)} times in {sabotage.place} of {path}: "
            f"mend tests/sabotage.py"
        )
    return path, changed[0]


def in_any_layout(text):
    """A pattern that finds ``text`` however a formatter has cut it into lines."""
    tokens = re.findall(r"\w+|[^\w\s]", text)
    patterns = [r",?\s*" * (token in ")]}") + re.escape(token) for token in tokens]
    return re.compile(r"\s*".join(patterns))


@functools.cache
def _parsed(path):
    """The text of a file, relative to the repository, and its syntax tree."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text, ast.parse(text)


def name_of_test(sabotage):
    """The test that sees a sabotage, as pytest names it; empty if there is none of that
    name.
    """
    begins = f"\ndef {sabotage.seen_by}("
    files = [file for file, text in _tests() if begins in text]
    return f"{files[0]}::{sabotage.seen_by}" if len(files) == 1 else ""


@functools.cache
def _tests():
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [(file, file.read_text(encoding="utf-8")) for file in files]


if __name__ == "__main__":
    main()
