"""Every fault of the reliability table has a test that names it."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]

# Each of these 93 cases broke a widely used loader, or made it misbehave. Its test, which has its
# name as a parameter or in a comment, shows what streampack guarantees instead.
FAULTS = {
    "faults/test_network.py": """
        base_ok net_403_midrun net_500_forever net_reset_forever net_shorter_object
        net_stall_body net_stall_headers net_trickle net_500_twice net_503_burst_of_20
        net_close_short_once net_reset_once_each net_stall_headers_once net_down_20s_midrun
        net_down_at_start net_flip_in_flight_once_hash net_trickle_no_retry_seen
    """,
    "faults/test_bytes.py": """
        bytes_empty_shard bytes_flip_hash bytes_flip_hash_1worker bytes_flip_offsets_nohash
        bytes_flip_zstd_hash bytes_trunc_hash bytes_trunc_midsample_bytescol_nohash
        bytes_trunc_nohash bytes_trunc_zstd_nohash bytes_flip_nohash bytes_flip_zstd_nohash
        bytes_hash_asked_not_present bytes_local_flip_between_runs_hash
        bytes_local_rot_between_runs bytes_missing_shard bytes_missing_shard_0workers
        bytes_missing_shard_1worker bytes_origin_replaced_same_names
    """,
    "faults/test_index.py": """
        index_bytes_wrong index_encoding_swapped index_samples_less index_samples_more index_cut
        index_dup_basename index_empty index_encoding_unknown index_html index_list
        index_no_shards index_samples_1e12 index_samples_negative index_samples_str
        index_traversal_read index_traversal_write index_version index_traversal_delete
        index_traversal_delete_zip pickle_colon_bypass pickle_default
        pickle_opt_in
    """,
    "faults/test_hostile.py": "index_zip_bomb",
    "plan/test_state.py": "pickle_state_dict",
    "faults/test_disk.py": """
        disk_full disk_full_1worker disk_full_2ranks disk_full_zstd_rawfull
        disk_cache_deleted_midrun disk_shm_full disk_evict_4workers disk_evict_local_only_stream
    """,
    "faults/test_fork.py": "fork_shared_connection",
    "faults/test_jobs.py": """
        two_jobs_same_cache_same_host two_jobs_same_cache_two_containers_evict
        eight_jobs_start_at_once tmp_lockfile_owned_by_other
    """,
    "faults/test_processes.py": """
        proc_worker_kill_1rank proc_worker_kill_2ranks proc_rank_kill_peer_next_epoch
        proc_restart_after_group proc_kill_mid_download_restart proc_restart_after_main
        proc_restart_after_int proc_restart_after_term proc_restart_after_cgroup
    """,
    "behaviour/test_resume.py": """
        resume_same resume_odd_stop_3_workers resume_workers_2_to_0 resume_workers_2_to_3
        resume_ranks_1_to_2 resume_ranks_2_to_1 resume_batch_8_to_12 resume_block_size_changed
        resume_shuffle_algo_changed resume_dataset_grew resume_list_collate
    """,
    "behaviour/test_epochs.py": "resume_epoch_boundary",
}


def test_every_fault_of_the_table_has_a_test_that_names_it():
    faults = [(file, fault) for file, names in FAULTS.items() for fault in names.split()]
    assert len(set(faults)) == len(faults) == 93
    assert not [(file, fault) for file, fault in faults if fault not in (TESTS / file).read_text()]
