"""What users of other systems ran into, as tests on one tiny Llama, and the table of where each is tested."""

from __future__ import annotations

import ast
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import equality
import pytest
import torch
from torch import Tensor

from dtrain import layout, plan, verify
from dtrain.program.interpret import Place
from dtrain.program.lower import Program
from dtrain.program.update import State, UpdateConfig

STEPS = 5
CASES = {
    "one": ("", "", "", ""),
    "tp2": ("tp: {size: 2}", "HEADS", "HEADS", ""),
    "tp2+sp": ("tp: {size: 2}", "HEADS", "HEADS, res_seq: tp", ""),
    "tp4": ("tp: {size: 4}", "HEADS", "HEADS, res_seq: tp", ""),
    "pp2": ("pp: {size: 2}", "layers: pp", "layers: pp", ""),
    "fsdp2": ("fsdp: {size: 2}", "embed: fsdp", "batch: fsdp", ""),
    "fsdp4": ("fsdp: {size: 4}", "embed: fsdp", "batch: fsdp", ""),
    "dp2": ("dp: {size: 2}", "", "batch: dp", ""),
    "tp2xpp2": ("pp: {size: 2}, tp: {size: 2}", "HEADS, layers: pp", "HEADS, layers: pp, res_seq: tp", ""),
    "dp2xtp2": ("dp: {size: 2}, tp: {size: 2}", "HEADS", "HEADS, batch: dp", "embed: dp"),
}


@dataclass(frozen=True)
class Ran:
    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    params: dict[str, Tensor]
    copies: bool


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def tiny(name: str, microbatch: int = 1, vocab: int = 256, tied: bool = False, precision: str = "fp32") -> plan.Plan:
    mesh, params, compute, optimizer = CASES[name]
    heads = "vocab: tp, heads: tp, kv_heads: tp, mlp: tp"
    made = layout.loads(
        f"cluster: {{gpus_per_node: {1 if name == 'one' else 4 if '4' in name or 'x' in name else 2}}}\n"
        f"mesh: {{{mesh}}}\n"
        f"shard: {{params: {{{params.replace('HEADS', heads)}}}, compute: {{{compute.replace('HEADS', heads)}}}, "
        f"optimizer: {{{optimizer}}}}}\n"
        f"model: {{family: llama, layers: 4, embed: 64, heads: 4, kv_heads: 2, mlp: 128, vocab: {vocab}, "
        f"tied: {str(tied).lower()}}}\n"
        f"data: {{source: synthetic, seq: 32, batch: 8, microbatch: {microbatch}}}\n"
        f"run: {{steps: {STEPS}, precision: {precision}}}\n"
    )
    return plan.plan(made)


@functools.cache
def ran(
    name: str,
    labels: str = "all",
    microbatch: int = 1,
    vocab: int = 256,
    tied: bool = False,
    clip: float | None = 1.0,
) -> Ran:
    """Five steps of the tiny model under a layout, on simulated ranks."""
    made = tiny(name, microbatch, vocab, tied)
    batches = equality.make_batches(equality.Case("", labels, 0, clip), made, STEPS)
    counts = [made.job.module.counts(made.job.config, b) for b in batches]
    config = UpdateConfig(equality.ADAMW, clip)
    out = verify.train(made, batches, counts, config, lambda step: 3e-3, seed=0)
    return Ran([r.loss for r in out.reports], [r.norm for r in out.reports], out.initial, out.params[-1], out.copies)


def assert_match(a: Ran, b: Ran) -> None:
    """Step-1 loss within 1e-5, gradient norm within 1e-4 relative, step-5 loss within 1e-4."""
    assert abs(a.losses[0] - b.losses[0]) < 1e-5
    assert abs(a.norms[0] / b.norms[0] - 1) < 1e-4
    assert abs(a.losses[-1] - b.losses[-1]) < 1e-4


@pytest.mark.parametrize("name", ["tp2", "tp2+sp", "pp2", "fsdp2", "tp2xpp2"])
def test_layouts_match_one_process_in_fp32(name: str) -> None:
    assert_match(ran(name), ran("one"))


def test_a_vocabulary_that_tp_does_not_divide() -> None:
    assert_match(ran("tp2", vocab=257), ran("one", vocab=257))


def test_shared_kv_heads_match() -> None:
    assert_match(ran("tp4"), ran("one"))


@pytest.mark.parametrize("name", ["tp2", "tp4", "fsdp4", "pp2", "dp2xtp2"])
def test_initial_weights_do_not_depend_on_the_layout(name: str) -> None:
    ours, theirs = ran(name).initial, ran("one").initial
    assert ours.keys() == theirs.keys()
    for path, w in theirs.items():
        assert torch.equal(ours[path], w), path


def test_no_two_blocks_of_rows_or_layers_are_equal() -> None:
    initial = ran("one").initial
    for w in initial.values():
        if w.ndim > 1:
            first, second = w.flatten(1).chunk(2)
            assert not torch.equal(first, second)
    assert not torch.equal(initial["block.0/wq"], initial["block.2/wq"])


@pytest.mark.parametrize("microbatch", [1, 2, 4, 8])
def test_accumulation_with_ignored_labels_is_one_batch(microbatch: int) -> None:
    whole, parts = ran("one", "some", 8), ran("one", "some", microbatch)
    assert abs(parts.losses[0] / whole.losses[0] - 1) < 1e-6
    assert abs(parts.norms[0] / whole.norms[0] - 1) < 1e-6


@pytest.mark.parametrize("name", ["dp2", "dp2xtp2", "fsdp4", "pp2"])
def test_gradients_are_divided_by_the_global_count_alone(name: str) -> None:
    ours, theirs = ran(name, "some", clip=None), ran("one", "some", clip=None)
    assert abs(ours.norms[0] / theirs.norms[0] - 1) < 1e-5
    assert abs(ours.losses[0] - theirs.losses[0]) < 1e-5
    for path, w in theirs.params.items():
        assert (ours.params[path] - w).abs().max() < 1e-4, path


def test_a_replica_without_valid_labels_counts_for_nothing() -> None:
    ours, theirs = ran("dp2", "one sequence"), ran("one", "one sequence")
    assert torch.tensor(ours.losses).isfinite().all()
    assert_match(ours, theirs)


@pytest.mark.parametrize("name", ["pp2", "tp2xpp2"])
def test_tied_tables_on_two_stages_stay_equal(name: str) -> None:
    ours = ran(name, tied=True)
    assert ours.copies  # of every shard that several ranks hold, after each step
    assert_match(ours, ran("one", tied=True))


def test_replicated_parameters_are_bitwise_equal_on_all_ranks() -> None:
    assert ran("tp2+sp").copies
    assert ran("dp2xtp2").copies


def test_the_same_run_twice_is_bitwise_equal() -> None:
    first = ran("dp2xtp2")
    ran.cache_clear()
    second = ran("dp2xtp2")
    assert first.losses == second.losses
    assert all(torch.equal(first.params[p], second.params[p]) for p in first.params)


BIGRAM = """
cluster: {gpus_per_node: RANKS}
MESH
model: {family: llama, layers: 1, embed: 8, heads: 1, kv_heads: 1, mlp: 8, vocab: 8}
data: {source: synthetic, seq: 6, batch: 2, microbatch: 1}
run: {steps: 1, precision: fp64}
"""
DP2 = "mesh: {dp: {size: 2}}\nshard: {compute: {batch: dp}}"


@pytest.mark.parametrize("mesh", ["", DP2], ids=["two microbatches", "dp2"])
def test_ranks_with_different_numbers_of_labels_have_the_mean_of_all_tokens(mesh: str) -> None:
    """Two tokens with losses 1 and 3 on one rank, six of 4 on the other: 28/8. Token t has the t-th unit vector as
    embedding and attention and MLP add nothing, so that column t of the head alone says what follows."""
    losses = {1: 1.0, 2: 3.0, 3: 4.0}
    made = plan.plan(layout.loads(BIGRAM.replace("RANKS", "2" if mesh else "1").replace("MESH", mesh)))

    def fill(program: Program, place: Place, state: State) -> None:
        for path, w in state.weights.masters.items():
            w.fill_(1.0 if "norm" in path else 0.0)
            if path == "embed/table":
                w[:8] = torch.eye(8) * 1e6
            if path == "head/table":  # label 0 has the only logit a: its loss is log(1 + 7 exp(-a))
                for token, loss in losses.items():
                    w[0, token] = -math.log(math.expm1(loss) / 7) / math.sqrt(8)

    one = {
        "tokens": torch.tensor([[1, 2, 5, 5, 5, 5], [3] * 6]),
        "labels": torch.tensor([[0, 0, -1, -1, -1, -1], [0] * 6]),
        "sample": torch.arange(2),
    }
    counts = [made.job.module.counts(made.job.config, one)]
    out = verify.train(made, [one], counts, UpdateConfig(equality.ADAMW, None), lambda step: 1e-3, enter=fill)
    assert out.reports[0].loss == pytest.approx(3.5, abs=1e-9)
    for token, times in ((1, 1), (2, 1), (3, 6)):  # and what is differentiated: (probability - 1) / 8 a token
        want = times * (math.exp(-losses[token]) - 1) * math.sqrt(8) / 8
        assert float(out.grads[0]["head/table"][0, token]) == pytest.approx(want, rel=1e-9)


def test_no_valid_label_on_any_replica_is_a_finite_step_without_gradient() -> None:
    made = tiny("dp2")
    (one,) = equality.make_batches(equality.Case("", "all", 0, None), made, 1)
    one["labels"].fill_(-1)
    counts = {k: n.clamp(min=1) for k, n in made.job.module.counts(made.job.config, one).items()}  # as training does
    out = verify.train(made, [one], [counts], UpdateConfig(equality.ADAMW, 1.0), lambda step: 3e-3)
    assert (out.reports[0].loss, out.reports[0].norm) == (0.0, 0.0)
    assert all(bool(torch.isfinite(w).all()) for w in out.params[-1].values())


# --------------------------------------------------------------------------------------------- the table

# Report -> file and test, or several. B07 does not apply (gate and up are two weights) and B18 needs a GPU; the other
# reports that are not listed are about parts that do not exist yet. Of B23, B104 and B106 what context parallelism
# would be asked for is left, as cp above 1 is refused; B106's labels are held to both ways in which it would cut them.
# B110's workers are the thread that reads ahead.
#
# B41: no rows of q and k are moved, since rotary pairs lie half a head apart here as in transformers' folders.
# B43: the report's value at index 63 is misprinted; 5e5^(-126/128) / 8 is 3.068926e-7.
# B45: no rotary table is a buffer that could hold what memory held: a step computes its own, from positions.
TABLE: dict[str, str] = {
    "B01": "test_mutants.py::test_a_mutant_is_caught",
    "B02": "test_user_reports.py::test_layouts_match_one_process_in_fp32",
    "B03": "test_user_reports.py::test_a_vocabulary_that_tp_does_not_divide",
    "B06": "test_equality.py::test_a_layout_equals_one_device",
    "B09": "test_layout.py::test_a_sequence_that_tp_does_not_divide",
    "B10": "test_layout.py::test_legal_tp_degrees_are_listed",
    "B12": "test_user_reports.py::test_initial_weights_do_not_depend_on_the_layout",
    "B14": "test_user_reports.py::test_no_two_blocks_of_rows_or_layers_are_equal",
    "B16": "test_ops.py::test_attention_dropout_differs_between_heads_and_follows_the_head_when_heads_are_cut",
    "B17": "test_ops.py::test_the_mask_of_backward_is_the_mask_of_forward",
    "B19": "test_user_reports.py::test_ranks_with_different_numbers_of_labels_have_the_mean_of_all_tokens",
    "B20": "test_user_reports.py::test_accumulation_with_ignored_labels_is_one_batch",
    "B22": "test_user_reports.py::test_gradients_are_divided_by_the_global_count_alone",
    "B23": "test_user_reports.py::test_gradients_are_divided_by_the_global_count_alone",
    "B26": "test_user_reports.py::test_a_replica_without_valid_labels_counts_for_nothing "
    "test_user_reports.py::test_no_valid_label_on_any_replica_is_a_finite_step_without_gradient "
    "test_train.py::test_a_step_without_valid_labels_is_finite",
    "B27": "test_optim.py::test_clip_scale",
    "B28": "test_mutants.py::test_a_mutant_is_caught",
    "B30": "test_equality.py::test_a_layout_equals_one_device",
    "B31": "test_train.py::test_sharded_padded_state_survives_a_resume",
    "B34": "test_layout.py::test_uneven_pipelines_are_refused_or_written_out",
    "B35": "test_user_reports.py::test_tied_tables_on_two_stages_stay_equal",
    "B36": "test_schedule.py::test_fewer_microbatches_than_stages",
    "B37": "test_layout.py::test_batches_are_never_truncated",
    "B39": "test_gloo.py::test_five_steps_equal_one_process",
    "B41": "test_hf.py::test_what_is_read_has_the_logits_of_transformers",
    "B43": "test_ops.py::test_llama31_frequencies "
    "test_hf.py::test_what_would_change_the_mathematics_is_refused_by_name",
    "B45": "test_ops.py::test_rotary_tables_are_fp32_for_every_smaller_dtype",
    "B46": "test_hf.py::test_rotary_settings_are_under_old_and_new_keys",
    "B48": "test_convert.py::test_vocabularies_that_are_padded_are_cut",
    "B49": "test_hf.py::test_ties_are_told test_convert.py::test_from_a_folder_over_ranks_to_a_folder",
    "B50": "test_convert.py::test_from_a_folder_over_ranks_to_a_folder "
    "test_hf.py::test_an_index_names_each_tensor_once_and_where_it_is",
    "B53": "test_hf.py::test_what_is_read_has_the_logits_of_transformers "
    "test_hf.py::test_as_many_tokens_as_positions_and_no_more",
    "B54": "test_models.py::test_bert_counts_masked_tokens_only_and_class_zero_too",
    "B55": "test_saving.py::test_a_run_that_is_killed_while_it_writes_goes_on_from_the_one_before "
    "test_damage.py::test_killed_full_and_damaged_the_newest_whole_one_loads",
    "B57": "test_layout.py::test_a_disk_without_room_for_checkpoints test_checkpoint.py::test_a_disk_that_fills_up",
    "B58": "test_checkpoint.py::test_the_latest_is_the_largest_number_and_foreign_names_are_left_alone "
    "test_saving.py::test_pruning_keeps_the_last_and_each_so_many",
    "B60": "test_launch.py::test_a_step_that_is_not_there",
    "B61": "test_strict.py::test_a_loaded_model_of_more_or_fewer_layers test_checkpoint.py::test_loading_is_strict",
    "B63": "test_train.py::test_a_run_goes_on_under_any_layout "
    "test_layout_free.py::test_saved_under_one_layout_and_restored_under_another",
    "B64": "test_saving.py::test_a_folder_that_is_another_one_on_each_node",
    "B65": "test_train.py::test_a_resumed_run_is_the_uninterrupted_one "
    "test_layout_free.py::test_saved_under_one_layout_and_restored_under_another",
    "B66": "test_order.py::test_a_step_sees_the_same_samples_under_every_layout "
    "test_train.py::test_a_run_goes_on_under_any_layout",
    "B68": "test_train.py::test_a_resumed_run_is_the_uninterrupted_one",
    "B70": "test_optim.py::test_rates_do_not_depend_on_where_a_run_starts_or_stops",
    "B71": "test_train.py::test_a_finished_run_says_so_and_can_be_extended",
    "B73": "test_launch.py::test_sigterm_to_one_rank_stops_all_at_the_same_step "
    "test_train.py::test_evaluation_counts_every_sequence_once",
    "B77": "test_compile.py::test_nothing_is_compiled_after_the_first_step",
    "B79": "test_compile.py::test_recomputation_and_dropout_under_compile_are_the_uncompiled_run",
    "B80": "test_compile.py::test_a_compiled_segment_equals_the_uncompiled_one",
    "B81": "test_layout.py::test_groups_follow_the_mesh_order",
    "B83": "test_launch.py::test_device",
    "B85": "test_launch.py::test_a_rank_that_hangs_is_named",
    "B87": "test_launch.py::test_a_slow_first_step_and_a_slow_save_are_no_hang",
    "B89": "test_layout.py::test_misspelt_keys_stop_the_run",
    "B91": "test_layout.py::test_batches_are_never_truncated",
    "B92": "test_metrics.py::test_llama3_8b_flops",
    "B94": "test_metrics.py::test_a_token_counts_once",
    "B96": "test_metrics.py::test_everything_is_written_everywhere",
    "B98": "test_train.py::test_a_profile_holds_exactly_the_steps_asked_for",
    "B99": "test_train.py::test_a_bad_weight_is_named_and_never_saved",
    "B101": "test_pack.py::test_an_id_of_70000_is_packed_and_read_back "
    "test_pack.py::test_sixteen_bits_up_to_65536_ids_and_never_a_wrap "
    "test_tokens.py::test_both_indexes_and_every_type_are_read "
    "test_tokens.py::test_damage_is_told_with_file_offset_and_what_was_expected",
    "B103": "test_tokens.py::test_damage_is_told_with_file_offset_and_what_was_expected "
    "test_tokens.py::test_an_id_outside_the_vocabulary_is_named_before_the_start_or_when_it_is_met "
    "test_tokens.py::test_a_file_of_seq_tokens_lacks_one_for_the_last_label "
    "test_tokens.py::test_empty_documents_are_harmless",
    "B104": "test_sequences.py::test_a_changed_token_is_not_seen_by_the_next_document "
    "test_sequences.py::test_the_positions_of_packed_documents "
    "test_sequences.py::test_packed_equals_each_document_alone "
    "test_sequences.py::test_packed_on_ranks_equals_each_document_alone",
    "B106": "test_data.py::test_seven_of_eight_tokens_are_labels_however_a_sequence_is_cut",
    "B109": "test_data.py::test_an_epoch_is_a_permutation_and_wraps_inside_a_batch "
    "test_order.py::test_a_step_sees_the_same_samples_under_every_layout",
    "B110": "test_order.py::test_ranks_read_the_planned_batch",
    "B112": "test_tokenizer.py::test_a_tokenizer_larger_than_the_model_is_refused_with_the_highest_id_in_the_data",
    "B113": "test_optim.py::test_small_updates_reach_an_fp32_master_but_not_a_bf16_weight",
    "B115": "test_optim.py::test_decay_leaves_norms_and_biases_alone",
    "B116": "test_train.py::test_evaluation_counts_every_sequence_once",
    "B120": "test_gloo.py::test_five_steps_equal_one_process",
    "B121": "test_lower.py::test_shipped_layouts_lower_alike_on_the_first_and_the_last_rank",
    "B122": "test_user_reports.py::test_the_same_run_twice_is_bitwise_equal",
}


@pytest.mark.parametrize(("report", "where"), TABLE.items(), ids=list(TABLE))
def test_the_table_names_tests_that_exist(report: str, where: str) -> None:
    for test in where.split():
        file, name = test.split("::")
        source = ast.parse((Path(__file__).parent / file).read_text())
        assert name in {n.name for n in source.body if isinstance(n, ast.FunctionDef)}, test
