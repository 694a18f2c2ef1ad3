"""The table of options that need or exclude each other; `combinations.py` reads it.

::

    a=x|y needs b=z unless c=t    if a is x or y, b must be z, except where c is t
    a excludes b, c               if a is set, neither b nor c may be
    a divides b by d              if a is set, b must be a multiple of d, or else of a itself

An option of the table may also be the class of a dataset, a length file, or a product of options.
docs/combinations.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping

FIT_METHODS = ("exact_fit", "next_fit", "first_fit", "best_fit")  # place one sample at a time
COST_OPTIONS = ("max_cost", "capacity", "cost_hidden_size", "cost_window")
# Options of Packing that only some methods support. They default to None.
OPTION_METHODS = {
    "split_gap": FIT_METHODS,
    "min_fragment": FIT_METHODS,
    "guard": ("exact_fit", "first_fit", "best_fit"),
    "max_samples_per_pack": (*FIT_METHODS, "best_fit_decreasing", "knapsack"),
    "open_packs": ("first_fit", "best_fit"),
    "short_seq_len": ("two_tiers",),
    **dict.fromkeys(COST_OPTIONS, ("best_fit_decreasing",)),
}
SLOTS = "Stream(max_seq_len) / Packing(max_seq_len)"

TABLE: Mapping[str, Mapping[str, str]] = {
    "Packing": {
        **{
            f"{', '.join(name for name in OPTION_METHODS if OPTION_METHODS[name] == methods)} "
            f"needs method={'|'.join(methods)}": "other methods have no use for it"
            for methods in dict.fromkeys(OPTION_METHODS.values())
        },
        "capacity, cost_hidden_size, cost_window needs max_cost": (
            "it describes packs of equal cost"
        ),
        "min_fragment needs split_gap": "it bounds cuts, and nothing is cut without that",
        "method=two_tiers needs short_seq_len": (
            "it makes packs of two lengths; set it to the length of short packs, such as a quarter "
            "of max_seq_len"
        ),
        "pad_to_multiple divides max_seq_len, short_seq_len, capacity": (
            "samples and their padding fill a pack"
        ),
        "pack_shuffle needs shuffle=True": "shuffled packs are not in stored order",
    },
    "Batch formats": {
        "Stream(loss_weight) excludes batch_format="
        "hf|hf_flash|torchtune|torchtitan|torchtitan_flat|olmo_core|llm_foundry|llama_factory": (
            "its trainer computes the loss without weights; use 'native' or 'compact' with "
            "streampack.loss_weights, 'megatron', or PackedTrainer, which sets the format itself"
        ),
        "positions=continue excludes batch_format=hf|hf_flash|torchtitan|torchtitan_flat": (
            "the format shows the edges of samples by positions that restart at 0, and with "
            "overflow='split' these continue where a sample was cut; set positions='restart'"
        ),
        "positions=continue excludes batch_format=llama_factory unless dense=True": (
            "its mask is found from positions that restart at 0, and with overflow='split' these "
            "continue where a sample was cut; set positions='restart'"
        ),
        "max_cost excludes "
        "batch_format=native|hf|torchtune|torchtitan|olmo_core|llm_foundry|llama_factory": (
            "the bound is for varlen attention, and the format computes whole rows; choose "
            "'compact', 'hf_flash', 'megatron' or 'torchtitan_flat', or omit max_cost"
        ),
        "batch_format=llama_factory needs batch_size=1 unless dense=True": (
            "flash attention in transformers finds the edges of documents only in batches of one "
            "pack, and documents of more packs would see each other; set batch_size=1, take "
            "batch_format='hf_flash', or for sdpa and eager "
            "batch_format=functools.partial(to_llama_factory, dense=True)"
        ),
    },
    "Context parallelism": {
        "context_parallel excludes "
        "batch_format=hf|hf_flash|llama_factory|torchtune|olmo_core|llm_foundry": (
            "the trainer needs whole rows, to shift labels in them or to build masks of them; "
            "omit context_parallel and let the trainer cut the batch, or use 'native', "
            "'compact', 'megatron', 'torchtitan' or 'torchtitan_flat'"
        ),
        "batch_format=megatron needs context_layout=zigzag_per_document": (
            "TransformerEngine cuts each document by cu_seqlens; set "
            "context_layout='zigzag_per_document', or use batch_format='native'"
        ),
        "context_layout=zigzag|contiguous divides max_seq_len by the chunks of a row": (
            "each rank gets equal chunks of a row, one of them or, with zigzag, two"
        ),
        "context_layout=zigzag_per_document|contiguous_per_document divides pad_to_multiple by "
        "the chunks of a document": (
            "each rank gets equal chunks of a document, one of them or, with zigzag, two"
        ),
        "max_cost excludes context_parallel": (
            "the bound is on whole packs, and context parallelism cuts them"
        ),
        "context_parallel excludes dataset=BucketedIterableDataset": (
            "rows of many lengths cannot be cut into equal chunks; use PackedIterableDataset, or "
            "omit context_parallel from World"
        ),
    },
    "Batches and ranks": {
        "batch_size divides global_batch_size": (
            "a global batch consists of whole device batches; {usual}, or set batch_size to "
            "{divisor}, for example; to resume from a state without chapters, omit it, and "
            "the run keeps its own"
        ),
        "batching_method=device_per_stream divides global_batch_size by the run's first "
        "batch_size": "each device batch is of one stream",
        "batching_method=per_stream divides global_batch_size by num_lanes * batch_size": (
            "each global batch is of one stream, and takes as many packs from every lane; {usual}, "
            "or set Order(num_lanes=1); to resume from a state, omit num_lanes, and without "
            "chapters both: the run keeps its own"
        ),
        "balance divides global_batch_size by batch_size * devices": (
            "the packs of a global batch are dealt to whole steps of all ranks; {usual}, or omit "
            "balance"
        ),
        "max_cost needs a length file": (
            "the number of packs follows from the lengths; run `streampack index` on it, or omit "
            "max_cost"
        ),
    },
    "Streams with packs of their own length": {
        "Stream(max_seq_len) needs batching_method=device_per_stream|per_stream": (
            "the packs of a batch have one length"
        ),
        "Packing(max_seq_len) divides Stream(max_seq_len)": (
            "a long pack takes the place of several; {usual}, or omit it"
        ),
        f"Stream(max_seq_len) divides the run's first batch_size, batch_size by {SLOTS}": (
            "a device batch consists of whole packs; set batch_size to {batch_sizes}, or shorten "
            "the stream's max_seq_len"
        ),
        "Stream(max_seq_len) divides global_batch_size by the run's first batch_size unless "
        "batching_method=device_per_stream": (
            "each global batch is of one stream, in whole device batches"
        ),
        "Stream(max_seq_len) divides the packs of one stream by batch_size": (
            "the packs of a device batch have one length; set batch_size to {batch_sizes}, on any "
            "number of ranks"
        ),
        "max_cost excludes Stream(max_seq_len)": "it is one bound for the packs of all streams",
    },
    "Epochs and chapters": {
        "epoch_end=pad|drop needs a length file unless num_lanes=1": (
            "every node must know where the lanes of the others end; run `streampack index` on it, "
            "or set Mixing(epoch_end='carry') or Order(num_lanes=1)"
        ),
        "chapters needs global_batch_size": (
            "chapters end at global batches, and the default depends on the number of ranks; set "
            "Mixing(global_batch_size=...), or one in every chapter"
        ),
        "chapters divides global_batch_size by batch_size * ranks": (
            "a chapter ends with a step of all ranks; {usual}, or lower batch_size"
        ),
        "chapters excludes epoch_size, epoch_end, sampling_method": (
            "a run of chapters has no epochs; omit it, and set until or steps of the chapters"
        ),
        "chapters excludes Stream(proportion), Stream(repeat), Stream(choose)": (
            "the chapters say what a run takes of each stream; omit it, and write the stream "
            "into the weights of a Chapter"
        ),
        "chapters excludes Stream(max_seq_len)": (
            "the packs of a chapter have one length; omit it, and give a Chapter its own packing"
        ),
        "Stream(overflow) excludes Chapter(packing)": (
            "the samples of all chapters are cut alike, for packs of one length; omit packing "
            "of the chapters, or set Packing(overflow=...) for all streams"
        ),
        "chapters excludes max_cost": (
            "a chapter is counted in full packs, and these have unequal lengths; omit it, or "
            "use Balance"
        ),
        "skip, Stream(max_passes) needs chapters": (
            "this is a run of epochs; omit it, or pass chapters=[Chapter(weights=...)], such "
            "as one without an end"
        ),
        "Stream(on_exhausted)=end|error needs a length file": (
            "the run has to know how many tokens the stream has; write it with `streampack index`, "
            "or set on_exhausted='substitute'"
        ),
    },
    "Rows": {
        "rows excludes remote, split": "the stream is made of its rows",
        "tokenizer, chat, on_bad_row needs rows": "it is about making samples of rows",
        "chat needs tokenizer": (
            "a chat template makes the tokens of a conversation; set tokenizer to one that has a "
            "template, or omit chat for rows of token ids"
        ),
        "tokenizer excludes labels, loss_mask": (
            "they have a value for each token, and the tokenizer decides how many there are; leave "
            "one of them out; the loss mask of a conversation is made by chat"
        ),
    },
    "Token files": {
        "split_at needs index": (
            "where documents end is learnt once; run `streampack index DATA --eos-id ID --out "
            "FOLDER`, and set index=FOLDER"
        ),
        "split_at excludes rows, labels, loss_mask": (
            "only the tokens of a row are split; omit split_at, or write documents: "
            "streampack write"
        ),
        "index excludes unit=sequence": "an index has documents",
    },
    "Held-out splits": {
        "part needs fraction": "it is split by a share; set fraction=0.005, for example",
        "part needs unit=shard|sample": (
            "whole shards are held out, or samples of every shard; set unit='shard' for a remote, "
            "unit='sample' for a stream on a disk, and the same in both parts"
        ),
        "fraction, unit=shard|sample needs part": (
            "it describes a split; set part='train' or 'held_out', or omit it"
        ),
        "part excludes samples": (
            "a slice changes the numbers of samples; omit samples, or choose with shards"
        ),
    },
    "Iterables": {
        "dataset=PackedIterableDataset|BucketedIterableDataset excludes global_batch_size, "
        "num_lanes, cache_limit, epoch_end=carry, max_cost, method=best_fit_decreasing": (
            "an iterable has no shards, and its lengths are not known before its samples are read; "
            "omit it, or read MDS streams with PackedStreamingDataset"
        ),
        "dataset=BucketedIterableDataset excludes epoch_end=drop, pack_shuffle": (
            "it makes no packs; omit it, or use PackedIterableDataset"
        ),
        "dataset=PackedStreamingDataset excludes stop": (
            "its epochs end by the weights of the streams, or by epoch_size; omit stop"
        ),
        "Stream(payloads) excludes method=next_fit|concat, split_gap": (
            "payloads stay with whole samples, and samples are cut where a pack ends; use "
            "method='exact_fit' without split_gap"
        ),
        "steps=equal excludes stop=repeat": (
            "the loop ends with the first rank whose sources end, and these never do; set steps to "
            "a number, such as steps=1000"
        ),
        "steps excludes batching_method=per_stream unless stop=repeat": (
            "all ranks get the same stream at each step, but begin their epochs at different "
            "steps; set Mixing(stop='repeat') and steps to a number, or "
            "batching_method='device_per_stream'"
        ),
    },
}
"""By section: each rule, why, and after a semicolon a way out, if the usual one does not do."""
