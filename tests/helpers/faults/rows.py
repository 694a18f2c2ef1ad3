"""Every fault of the reliability table, and its test.

::

    "net_500_forever" --> faults/test_network.py, function ...

Each of the 93 cases broke a widely used loader, or made it misbehave; its test shows what
streampack guarantees instead. `tests/faults/test_rows.py` checks that the tests exist.
"""

from __future__ import annotations

NETWORK = "faults/test_network.py"
BYTES = "faults/test_bytes.py"
INDEX = "faults/test_index.py"
DISK = "faults/test_disk.py"
FORK = "faults/test_fork.py"
JOBS = "faults/test_jobs.py"
PROCESSES = "faults/test_processes.py"
RESUME = "behaviour/test_resume.py"
EPOCHS = "behaviour/test_epochs.py"
STATE = "plan/test_state.py"

STORES: dict[tuple[str, str], tuple[str, ...]] = {
    (NETWORK, "test_base_ok_an_epoch_without_faults_is_exact"): ("base_ok",),
    (BYTES, "test_a_damaged_shard_is_a_typed_error_until_its_origin_is_mended"): (
        "bytes_empty_shard",
        "bytes_flip_hash",
        "bytes_flip_hash_1worker",
        "bytes_flip_offsets_nohash",
        "bytes_flip_zstd_hash",
        "bytes_trunc_hash",
        "bytes_trunc_midsample_bytescol_nohash",
        "bytes_trunc_nohash",
        "bytes_trunc_zstd_nohash",
    ),
    (BYTES, "test_a_flip_at_the_origin_without_hashes_is_an_error_once_the_stream_is_indexed"): (
        "bytes_flip_nohash",
        "bytes_flip_zstd_nohash",
    ),
    (BYTES, "test_bytes_hash_asked_not_present_is_refused_at_construction"): (
        "bytes_hash_asked_not_present",
    ),
    (BYTES, "test_a_cached_shard_that_rots_between_runs_is_fetched_again"): (
        "bytes_local_flip_between_runs_hash",
        "bytes_local_rot_between_runs",
    ),
    (BYTES, "test_a_missing_shard_is_a_typed_error_within_10_s"): (
        "bytes_missing_shard",
        "bytes_missing_shard_0workers",
        "bytes_missing_shard_1worker",
    ),
    (BYTES, "test_bytes_origin_replaced_same_names_is_refused_and_never_mixed"): (
        "bytes_origin_replaced_same_names",
    ),
    (INDEX, "test_what_only_the_shard_can_tell_is_refused_before_a_sample_of_it"): (
        "index_bytes_wrong",
        "index_encoding_swapped",
        "index_samples_less",
        "index_samples_more",
    ),
    (INDEX, "test_a_hostile_index_is_refused_at_construction"): (
        "index_cut",
        "index_dup_basename",
        "index_empty",
        "index_encoding_unknown",
        "index_html",
        "index_list",
        "index_no_shards",
        "index_samples_1e12",
        "index_samples_negative",
        "index_samples_str",
        "index_traversal_read",
        "index_traversal_write",
        "index_version",
    ),
    (INDEX, "test_no_index_makes_a_file_outside_the_cache_vanish"): (
        "index_traversal_delete",
        "index_traversal_delete_zip",
    ),
    (INDEX, "test_index_zip_bomb_stops_at_the_stated_bytes"): ("index_zip_bomb",),
    (NETWORK, "test_what_no_retry_can_mend_is_an_error_at_once"): ("net_403_midrun",),
    (NETWORK, "test_a_fault_that_stays_ends_in_a_typed_error_in_time"): (
        "net_500_forever",
        "net_reset_forever",
        "net_shorter_object",
        "net_stall_body",
        "net_stall_headers",
        "net_trickle",
    ),
    (NETWORK, "test_a_fault_that_passes_is_ridden_out"): (
        "net_500_twice",
        "net_503_burst_of_20",
        "net_close_short_once",
        "net_reset_once_each",
        "net_stall_headers_once",
    ),
    (NETWORK, "test_an_outage_within_the_budget_is_ridden_out"): ("net_down_20s_midrun",),
    (NETWORK, "test_net_down_at_start_is_a_typed_error_within_30_s"): ("net_down_at_start",),
    (NETWORK, "test_a_bit_that_flips_in_flight_is_caught_by_the_hash_that_was_asked_for"): (
        "net_flip_in_flight_once_hash",
    ),
    (NETWORK, "test_bytes_that_drip_on_do_not_keep_a_download_alive"): (
        "net_trickle_no_retry_seen",
    ),
    (INDEX, "test_pickle_colon_bypass_is_refused_at_construction"): ("pickle_colon_bypass",),
    (INDEX, "test_a_pickled_column_is_refused_at_construction"): ("pickle_default",),
    (INDEX, "test_pickle_opt_in_there_is_none_and_what_lies_beside_the_tokens_is_never_read"): (
        "pickle_opt_in",
    ),
    (STATE, "test_a_damaged_state_is_refused_or_gives_batches_and_nothing_else"): (
        "pickle_state_dict",
    ),
}
"""Base, network, bytes, index and pickle: (file, function) to its rows."""

MACHINES: dict[tuple[str, str], tuple[str, ...]] = {
    (DISK, "test_a_full_disk_is_an_error_that_names_the_path_and_the_bytes_needed"): (
        "disk_full",
        "disk_full_1worker",
    ),
    (DISK, "test_a_disk_that_fills_up_stops_both_ranks_of_a_node"): ("disk_full_2ranks",),
    (DISK, "test_a_disk_that_fills_up_while_unpacking_is_the_same_error"): (
        "disk_full_zstd_rawfull",
    ),
    (DISK, "test_a_cache_that_is_deleted_in_mid_run_is_fetched_again"): (
        "disk_cache_deleted_midrun",
    ),
    (DISK, "test_a_full_dev_shm_is_an_error_at_construction_and_none_without_workers"): (
        "disk_shm_full",
    ),
    (DISK, "test_readers_under_a_limit_of_a_quarter_are_exact_and_within_it"): (
        "disk_evict_4workers",
    ),
    (DISK, "test_a_local_only_stream_loses_no_file_to_a_cache_limit"): (
        "disk_evict_local_only_stream",
    ),
    (FORK, "test_forked_workers_never_get_the_bytes_of_another_shard"): ("fork_shared_connection",),
    (JOBS, "test_two_jobs_on_one_cache_are_exact_and_fetch_each_shard_once"): (
        "two_jobs_same_cache_same_host",
    ),
    (JOBS, "test_two_jobs_under_a_limit_below_their_data_are_exact"): (
        "two_jobs_same_cache_two_containers_evict",
    ),
    (JOBS, "test_eight_jobs_that_start_at_once_all_run_and_fetch_each_shard_once"): (
        "eight_jobs_start_at_once",
    ),
    (JOBS, "test_files_of_others_in_the_temporary_folder_cannot_stop_a_job"): (
        "tmp_lockfile_owned_by_other",
    ),
    (
        PROCESSES,
        "test_a_killed_worker_is_named_within_10_s_and_the_run_goes_on_from_its_last_state",
    ): ("proc_worker_kill_1rank",),
    (PROCESSES, "test_a_killed_worker_of_one_rank_stops_that_rank_alone"): (
        "proc_worker_kill_2ranks",
    ),
    (PROCESSES, "test_a_rank_goes_on_into_the_next_epoch_when_its_peer_was_killed"): (
        "proc_rank_kill_peer_next_epoch",
    ),
    (PROCESSES, "test_a_killed_job_starts_again_at_once_and_its_epoch_is_exact"): (
        "proc_restart_after_group",
    ),
    (PROCESSES, "test_a_job_killed_in_mid_download_never_reads_half_a_shard"): (
        "proc_kill_mid_download_restart",
    ),
    (PROCESSES, "test_a_restart_beside_the_orphans_of_a_killed_trainer_is_exact_and_they_end"): (
        "proc_restart_after_main",
    ),
    (PROCESSES, "test_a_job_that_was_interrupted_starts_again_at_once"): (
        "proc_restart_after_int",
        "proc_restart_after_term",
    ),
    (PROCESSES, "test_a_job_whose_every_process_is_killed_one_by_one_starts_again_at_once"): (
        "proc_restart_after_cgroup",
    ),
    (RESUME, "test_a_loader_goes_on_from_every_batch"): ("resume_same",),
    (RESUME, "test_the_state_is_of_what_was_delivered_whatever_was_read_ahead"): (
        "resume_odd_stop_3_workers",
        "resume_workers_2_to_0",
        "resume_workers_2_to_3",
    ),
    (RESUME, "test_any_world_goes_on_where_another_world_stopped"): (
        "resume_ranks_1_to_2",
        "resume_ranks_2_to_1",
    ),
    (RESUME, "test_a_run_goes_on_in_batches_of_any_size_that_divides_its_position"): (
        "resume_batch_8_to_12",
    ),
    (EPOCHS, "test_a_run_stopped_anywhere_in_each_epoch_goes_on_in_a_new_loader"): (
        "resume_epoch_boundary",
    ),
    (RESUME, "test_a_state_of_another_sequence_is_refused_by_the_differing_field"): (
        "resume_block_size_changed",
        "resume_shuffle_algo_changed",
    ),
    (RESUME, "test_a_state_of_other_streams_is_refused"): ("resume_dataset_grew",),
    (RESUME, "test_a_collate_that_drops_the_place_leaves_no_wrong_state"): ("resume_list_collate",),
}
"""Disks, processes, jobs, forks and resumption, in the same form."""

ROWS = {row: test for test, rows in (STORES | MACHINES).items() for row in rows}
"""Row to its test: (file in tests/, function)."""
