"""Keys whose example is a test of its own, since it takes a whole run."""

from __future__ import annotations

TRIGGERED_BY = {
    "another-rank-ended": "tests/distributed/test_out_of_memory_ranks.py::test_all_ranks_end_with_the_message",
    "bench-model-too-large": "tests/tools/bench/test_setup.py::test_weights_beyond_the_free_memory_are_refused_unbuilt",
    "buffers-given-back": "tests/engine/transfer/test_layout.py::test_asking_for_a_released_tensor_is_an_error",
    "checkpoint-plan-ignored": "tests/auto/test_auto_levers.py::test_a_plan_in_a_checkpoint_is_followed_with_its_levers",
    "experts-all-at-once": "tests/parity/test_streamed_experts.py::test_what_needs_all_experts_at_once_is_refused_in_a_sentence",
    "head-loss-left": "tests/engine/runtime/test_without_collector.py::test_a_kept_output_keeps_one_step",
    "hooks-forbidden": "tests/engine/runtime/test_forward_in_backward.py::test_a_layer_that_forbids_hooks_is_named",
    "kernels-not-deterministic": "tests/auto/retry/test_verify_recompute.py::test_an_unsteady_layer_is_compared_with_a_bound",
    "layer-inside-layer": "tests/engine/runtime/test_lifecycle.py::test_layers_that_call_one_another_are_warned_about",
    "layer-not-checkpointed": "tests/engine/recompute/test_nested_segments.py::test_a_layer_that_changes_its_input_runs_once",
    "micro-batch-not-chosen": "tests/hf/micro_batch/test_auto_micro_batch.py::test_out_of_memory_is_told_and_at_a_single_sample_it_is_an_error",
    "micro-batch-ran-again": "tests/auto/retry/test_out_of_memory_cases.py::test_one_that_never_ends_is_ended",
    "mlp-not-tiled": "tests/engine/recompute/test_tiles_and_segments.py::test_mlps_that_draw_numbers_of_others",
    "no-plan-fits": "tests/auto/test_auto_levers.py::test_what_was_given_stays",
    "disk-full": "tests/engine/stores/test_disk_store.py::test_training_goes_on_where_nothing_is_lost[allocate-28-disk-full]",
    "disk-stopped": "tests/engine/stores/test_disk_store.py::test_training_goes_on_where_nothing_is_lost[write-5-disk-stopped]",
    "disk-write-limit": "tests/engine/stores/test_disk_store.py::test_at_the_limit_writing_ends_and_training_goes_on",
    "disk-writes-too-much": "tests/hf/test_disk.py::test_a_run_that_would_write_too_much_is_refused",
    "out-of-memory": "tests/auto/retry/test_out_of_memory_cases.py::test_one_that_never_ends_is_ended",
    "out-of-memory-advice": "tests/auto/retry/test_out_of_memory_cases.py::test_a_loop_that_does_not_use_it_is_told",
    "out-of-memory-not-repeatable": "tests/auto/retry/test_out_of_memory_loops.py::test_inputs_that_a_try_changes_end_the_run",
    "plan-does-not-fit": "tests/auto/test_auto_levers.py::test_what_was_given_stays",
    "plan-lossy-codec": "tests/auto/test_auto_odd_loops.py::test_a_kept_plan_loses_nothing_without_leave",
    "plan-made-anew": "tests/auto/test_auto_resumed.py::test_the_plan_that_is_kept_is_made_anew_too",
    "plan-not-written": "tests/auto/test_auto_odd_loops.py::test_a_plan_that_cannot_be_kept_is_followed",
    "disk-weights-changed": "tests/engine/weights/test_weights_from_disk.py::test_a_merge_is_refused_until_it_is_attached_again",
    "plan-other-model": "tests/plan/policies/test_policies.py::test_plans_of_other_models_and_shapes_are_refused",
    "plan-other-sizes": "tests/plan/policies/test_policies.py::test_plans_of_other_models_and_shapes_are_refused",
    "profile-incomplete": "tests/plan/measure/test_profile.py::test_a_run_that_was_too_short_says_so",
    "profile-running": "tests/plan/measure/test_profile.py::test_one_profile_after_another",
    "replayed-device-full": "tests/plan/hardware/test_caching_allocator.py::test_a_segment_that_is_partly_in_use_cannot_be_given_back",
    "second-run-differs": "tests/auto/retry/test_hand_loops.py::test_the_next_forward_does_without_second_runs",
    "second-thread": "tests/engine/runtime/test_threads.py::test_a_second_thread_is_passed_over[settings0]",
    "sequence-parallel-untried": "tests/auto/effects/test_no_effect.py::test_ring_attention_is_said",
    "step-not-recorded": "tests/auto/recording/test_model_copy.py::test_what_cannot_be_recorded_says_why_and_trains_on",
    "streamed-weight-cast": "tests/engine/weights/test_casts.py::test_all_ways_in_one_model_and_in_inference_mode",
    "streamed-weight-held": "tests/engine/weights/test_streaming.py::test_a_view_that_is_kept_on_ctx_keeps_its_bytes",
    "weights-keep-places": "tests/auto/test_auto_disk.py::test_auto_says_that_layers_keep_their_places",
    "weights-stay": "tests/auto/install/test_rearranged_streaming.py::test_what_the_host_has_no_room_for_stays",
    "weights-streamed-late": "tests/auto/install/test_rearranged_streaming.py::test_what_the_device_has_no_room_for_is_streamed",
    "zeroth-order-loss": "tests/auto/zeroth_order/test_step.py::test_a_loss_that_is_not_finite_changes_nothing",
    "writes-not-forbidden": "tests/tools/advise/test_advise.py::test_a_system_that_cannot_forbid_to_write_is_refused_before_the_script_runs",
}
"""Key -> a test, or a case of one, in whose run its message comes; ``conftest.py`` watches it."""

IN_OTHER_PROCESSES = frozenset({"another-rank-ended"})
"""Keys whose message comes in a process that the test starts; that test reads what was printed."""
