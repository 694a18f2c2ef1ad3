"""The table of options that need, exclude or divide each other; `combinations.py` reads it.

::

    Needs("a", "b", unless=one_of("c", 1))         if a is set, b must be, except where c is 1
    Needs(one_of("a", 1, 2), one_of("b", 3))       if a is 1 or 2, b must be 3
    Excludes("a", ("b", "c"))                      if a is set, neither b nor c may be
    Divides("a", "b", by="d")                      if a is set, b must be a multiple of d, or of a

An option of the table may also be the class of a dataset, a function, the lengths of a stream's
samples, or a product of options.
docs/combinations.md is generated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple


class Option(NamedTuple):
    """An option, and the values that are meant; none: all but its default."""

    name: str
    values: tuple[Any, ...] = ()


Options = str | Option | tuple[str | Option, ...]


class Rule(NamedTuple):
    """A row of the table: each of its options needs, excludes or divides each of the others."""

    relation: str
    options: Options
    others: Options
    by: str = ""
    unless: Option = Option("")


def one_of(name: str, *values: Any) -> Option:
    """Return an option of which these values are meant."""
    return Option(name, values)


def listed(options: Options) -> tuple[Option, ...]:
    """Return the options of a rule one by one.

    >>> listed(("index", one_of("unit", "sequence")))
    (Option(name='index', values=()), Option(name='unit', values=('sequence',)))
    """
    several = (options,) if isinstance(options, str | Option) else options
    return tuple(Option(each) if isinstance(each, str) else each for each in several)


Needs, Excludes, Divides = (partial(Rule, each) for each in ("needs", "excludes", "divides"))

# Formats that have a row of tokens for each pack.
WHOLE_ROWS = ("hf", "torchtune", "olmo_core", "llm_foundry", "llama_factory")
SLOTS = "Stream(max_seq_len) / Packing(max_seq_len)"
ALL_LENGTHS = "the lengths of all samples"
TO_KNOW_LENGTHS = {
    "fetch": "run `streampack index` on it",
    "tokenize": "set lengths='eager' of its texts, which are then tokenized at the start, run "
    "`streampack index --tokenizer` on them once and set index=, or write them as shards once: "
    "`streampack write`",
}
"""By what it costs to learn lengths, how a user makes them known first."""

TABLE: Mapping[str, Mapping[Rule, str]] = {
    "Packing": {
        Needs(
            "max_samples_per_pack",
            one_of("method", "best_fit_decreasing", "next_fit", "knapsack"),
        ): "other methods have no use for it",
        Needs("short_seq_len", one_of("method", "two_tiers")): "other methods have no use for it",
        Needs("cost", one_of("method", "best_fit_decreasing")): "other methods have no use for it",
        Needs(one_of("method", "two_tiers"), "short_seq_len"): (
            "it makes packs of two lengths; set it to the length of short packs, such as a quarter "
            "of max_seq_len"
        ),
        Divides(
            "pad_to_multiple", ("max_seq_len", "short_seq_len", "capacity")
        ): "samples and their padding fill a pack",
        Needs("pack_shuffle", one_of("shuffle", True)): "shuffled packs are not in stored order",
    },
    "Batch formats": {
        Excludes(
            "Stream(loss_weight)",
            one_of("batch_format", *WHOLE_ROWS, "hf_flash", "torchtitan", "torchtitan_flat"),
        ): (
            "its trainer computes the loss without weights; use 'native' or 'compact' with "
            "streampack.loss_weights, 'megatron', or PackedTrainer, which sets the format itself"
        ),
        Excludes(
            one_of("positions", "continue"),
            one_of("batch_format", "hf", "hf_flash", "torchtitan", "torchtitan_flat"),
        ): (
            "the format shows the edges of samples by positions that restart at 0, and with "
            "overflow='split' these continue where a sample was cut; set positions='restart'"
        ),
        Excludes(
            one_of("positions", "continue"),
            one_of("batch_format", "llama_factory"),
            unless=one_of("dense", True),
        ): (
            "its mask is found from positions that restart at 0, and with overflow='split' these "
            "continue where a sample was cut; set positions='restart'"
        ),
        Excludes("cost", one_of("batch_format", *WHOLE_ROWS, "native", "torchtitan")): (
            "the bound is for varlen attention, and the format computes whole rows; choose "
            "'compact', 'hf_flash', 'megatron' or 'torchtitan_flat', or omit cost"
        ),
        Needs(
            one_of("batch_format", "llama_factory"),
            one_of("batch_size", 1),
            unless=one_of("dense", True),
        ): (
            "flash attention in transformers finds the edges of documents only in batches of one "
            "pack, and documents of more packs would see each other; set batch_size=1, take "
            "batch_format='hf_flash', or for sdpa and eager "
            "batch_format=functools.partial(to_llama_factory, dense=True)"
        ),
    },
    "Context parallelism": {
        Excludes("context_parallel", one_of("batch_format", *WHOLE_ROWS, "hf_flash")): (
            "the trainer needs whole rows, to shift labels in them or to build masks of them; omit "
            "context_parallel and let the trainer cut the batch, or use 'native', 'compact', "
            "'megatron', 'torchtitan' or 'torchtitan_flat'"
        ),
        Needs(
            one_of("batch_format", "megatron"), one_of("context_layout", "zigzag_per_document")
        ): (
            "TransformerEngine cuts each document by cu_seqlens; set "
            "context_layout='zigzag_per_document', or use batch_format='native'"
        ),
        Divides(
            one_of("context_layout", "zigzag", "contiguous"),
            "max_seq_len",
            by="the chunks of a row",
        ): "each rank gets equal chunks of a row, one of them or, with zigzag, two",
        Divides(
            one_of("context_layout", "zigzag_per_document", "contiguous_per_document"),
            "pad_to_multiple",
            by="the chunks of a document",
        ): "each rank gets equal chunks of a document, one of them or, with zigzag, two",
        Excludes(
            "cost", "context_parallel"
        ): "the bound is on whole packs, and context parallelism cuts them",
        Excludes("context_parallel", one_of("dataset", "BucketedIterableDataset")): (
            "rows of many lengths cannot be cut into equal chunks; use PackedIterableDataset, or "
            "omit context_parallel from World"
        ),
    },
    "Batches and ranks": {
        Divides("batch_size", "global_batch_size"): (
            "a global batch consists of whole device batches; {usual}, or set batch_size to "
            "{divisor}, for example; to resume from a state without chapters, omit it, and the run "
            "keeps its own"
        ),
        Divides(
            one_of("batching_method", "device_per_stream"),
            "global_batch_size",
            by="the run's first batch_size",
        ): "each device batch is of one stream",
        Divides(
            one_of("batching_method", "per_stream"),
            "global_batch_size",
            by="num_lanes * batch_size",
        ): (
            "each global batch is of one stream, and takes as many packs from every lane; {usual}, "
            "or set Order(num_lanes=1); to resume from a state, omit num_lanes, and without "
            "chapters both: the run keeps its own"
        ),
        Divides("balance", "global_batch_size", by="batch_size * devices"): (
            "the packs of a global batch are dealt to whole steps of all ranks; {usual}, or omit "
            "balance"
        ),
        Needs("cost", ALL_LENGTHS): (
            "the number of packs follows from them; {to_know_lengths}, or omit cost"
        ),
        Needs("Balance(within='batch')", ALL_LENGTHS): (
            "every node plans all lanes, and would tokenize the texts of all; {to_know_lengths}, "
            "or set within='node'"
        ),
    },
    "Streams with packs of their own length": {
        Needs(
            "Stream(max_seq_len)", one_of("batching_method", "device_per_stream", "per_stream")
        ): "the packs of a batch have one length",
        Divides(
            "Packing(max_seq_len)", "Stream(max_seq_len)"
        ): "a long pack takes the place of several; {usual}, or omit it",
        Divides("Stream(max_seq_len)", ("the run's first batch_size", "batch_size"), by=SLOTS): (
            "a device batch consists of whole packs; set batch_size to {batch_sizes}, or shorten "
            "the stream's max_seq_len"
        ),
        Divides(
            "Stream(max_seq_len)",
            "global_batch_size",
            by="the run's first batch_size",
            unless=one_of("batching_method", "device_per_stream"),
        ): "each global batch is of one stream, in whole device batches",
        Divides("Stream(max_seq_len)", "the packs of one stream", by="batch_size"): (
            "the packs of a device batch have one length; set batch_size to {batch_sizes}, on any "
            "number of ranks"
        ),
        Excludes("cost", "Stream(max_seq_len)"): "it is one bound for the packs of all streams",
    },
    "Epochs and chapters": {
        Needs(one_of("epoch_end", "pad", "drop"), ALL_LENGTHS, unless=one_of("num_lanes", 1)): (
            "every node must know where the lanes of the others end; {to_know_lengths}, or set "
            "Mixing(epoch_end='carry') or Order(num_lanes=1)"
        ),
        Needs("chapters", "global_batch_size"): (
            "chapters end at global batches, and the default depends on the number of ranks; set "
            "Mixing(global_batch_size=...), or one in every chapter"
        ),
        Divides(
            "chapters", "global_batch_size", by="batch_size * ranks"
        ): "a chapter ends with a step of all ranks; {usual}, or lower batch_size",
        Excludes(
            "chapters", ("epoch_size", "epoch_end", "sampling_method")
        ): "a run of chapters has no epochs; omit it, and set until or steps of the chapters",
        Excludes("chapters", ("Stream(proportion)", "Stream(repeat)", "Stream(choose)")): (
            "the chapters say what a run takes of each stream; omit it, and write the stream into "
            "the weights of a Chapter"
        ),
        Excludes(
            "chapters", "Stream(max_seq_len)"
        ): "the packs of a chapter have one length; omit it, and give a Chapter its own packing",
        Excludes("Stream(overflow)", "Chapter(packing)"): (
            "the samples of all chapters are cut alike, for packs of one length; omit packing of "
            "the chapters, or set Packing(overflow=...) for all streams"
        ),
        Excludes("chapters", "cost"): (
            "a chapter is counted in full packs, and these have unequal lengths; omit it, or use "
            "Balance"
        ),
        Needs("skip", "chapters"): (
            "this is a run of epochs; omit it, or pass chapters=[Chapter(weights=...)], such as "
            "one without an end"
        ),
        Needs("max_repeats", "chapters"): (
            "this is a run of epochs, which has no end; omit it, or pass "
            "chapters=[Chapter(weights=..., steps=...)]"
        ),
        Needs("max_repeats", ALL_LENGTHS): (
            "passes are counted in tokens; {to_know_lengths}, or omit it"
        ),
        Needs("Chapter(passes)", ALL_LENGTHS): (
            "they say where the run ends; {to_know_lengths}, or set steps in place of passes"
        ),
        Needs(("len(dataset)", "simulate", "where", "diff"), ALL_LENGTHS): (
            "it would tokenize the texts of a whole epoch, or of a run up to there; "
            "{to_know_lengths}"
        ),
    },
    "Sources": {
        Needs("split_at", "index"): (
            "where documents end is learnt once; run `streampack index DATA --eos-id ID --out "
            "FOLDER`, and set index=FOLDER"
        ),
        Excludes("split_at", ("labels", "loss_mask")): (
            "only the tokens of a row are split; omit split_at, or write documents: streampack "
            "write"
        ),
        Excludes("index", one_of("unit", "sequence")): "an index has documents",
    },
    "Iterables": {
        Excludes(
            one_of("dataset", "PackedIterableDataset", "BucketedIterableDataset"),
            (
                "global_batch_size",
                "max_repeats",
                "num_lanes",
                "cache_limit",
                one_of("epoch_end", "carry"),
            ),
        ): (
            "an iterable has no shards, and its lengths are not known before its samples are read; "
            "omit it, or read MDS streams with PackedStreamingDataset"
        ),
        Excludes(
            one_of("dataset", "BucketedIterableDataset"),
            (one_of("epoch_end", "drop"), "pack_shuffle"),
        ): "it makes no packs; omit it, or use PackedIterableDataset",
        Excludes(
            one_of("dataset", "PackedStreamingDataset"), "stop"
        ): "its epochs end by the weights of the streams, or by epoch_size; omit stop",
        Excludes("Stream(payloads)", one_of("method", "next_fit", "concat")): (
            "payloads stay with whole samples, and samples are cut where a pack ends; use "
            "method='best_fit_decreasing'"
        ),
        Excludes(one_of("steps", "equal"), one_of("stop", "repeat")): (
            "the loop ends with the first rank whose sources end, and these never do; set steps to "
            "a number, such as steps=1000"
        ),
        Excludes(
            "steps", one_of("batching_method", "per_stream"), unless=one_of("stop", "repeat")
        ): (
            "all ranks get the same stream at each step, but begin their epochs at different "
            "steps; set Mixing(stop='repeat') and steps to a number, or "
            "batching_method='device_per_stream'"
        ),
    },
}
"""By section: each rule, why, and after a semicolon a way out, if the usual one does not do."""
