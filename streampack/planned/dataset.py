"""`PackedStreamingDataset`: weighted MDS streams in, device batches of full packs out.

::

    PackedStreamingDataset --plan--> DevicePlan (integers) --gather, batch--> batch (tensors)
           |                                                        ^
           '-- PackedDataLoader: plans here, reads in threads or workers
           '-- torch's DataLoader(dataset, batch_size=None): every worker plans and reads its share

Both give the same batches. The constructor reads index.json of each stream and checks everything
that can be checked. Planning starts at the first batch.

Cost: see `plan` and `gather`. Memory: the packers' buffers (integers), one batch, mapped shards,
and a shuffle block for each stream of each lane that this process plans. A block takes 16 bytes per
sample and has at most 262,144 samples by default, which is 4 MiB.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from streampack.balance import Balance
from streampack.batch.formats.registry import BatchFormat, check_format
from streampack.chapters import Chapter, check_chapters, check_skip
from streampack.config import Buffers, Mixing, Order, Packing
from streampack.errors import ConfigError
from streampack.planned.build import check_run, loss_weights_of
from streampack.planned.config_text import config_text
from streampack.planned.documents import read_document
from streampack.planned.engine import PlanEngine
from streampack.planned.spec import DatasetSpec
from streampack.planned.stream_lengths import warn_of_open_texts, with_own_overflow
from streampack.runtime.arguments import check_batch_size, check_configs, with_hints
from streampack.runtime.resumable import ResumableDataset
from streampack.streams import TokenStream, open_streams
from streampack.streams.registry import resolve_streams
from streampack.streams.sources.values import without_memory
from streampack.types import State
from streampack.world import World


class PackedStreamingDataset(ResumableDataset[PlanEngine]):
    """Streams of tokenized samples, mixed and packed on the fly, resumed exactly.

    Args:
        streams: The streams and their weights: `Stream` or `streaming.Stream` objects.
        remote: Remote location of a single stream, instead of `streams`.
        local: Local or cache folder of a single stream, instead of `streams`.
        split: Subfolder of `remote` and `local`.
        stream_name: Name of the single stream's class in `register_stream`, an entry point or
            MosaicML's `streams_registry`. "streampack" or None: `Stream`.
        stream_config: Further arguments of the single stream.
        packing: How samples share packs.
        mixing: The share of each stream, and how batches mix them.
        order: The order of samples.
        buffers: Memory limits.
        batch_size: Packs in a device batch. None: 1, unless `with_batches` sets it later.
        batch_format: "native", a trainer's format by name such as "hf", or a function of the
            native batch; see `streampack.formats`. None: "native", unless `with_batches` sets it.
        balance: How the packs of a global batch are dealt to ranks so that their batches cost the
            same. None: without regard to cost.
        chapters: The mixture of each part of the run, instead of the streams' own weights; None:
            the run has epochs. See `Chapter`.
        skip: Inclusive ranges of steps of a run of chapters, counted from 0, that are planned and
            counted but not delivered.
        world: Rank and number of ranks. By default from torch.distributed, if it is initialised, or
            from torchrun's variables.

    Raises:
        ConfigError: If the arguments cannot work together.
        DataError: If a stream's index is invalid.

    Each iteration is one epoch, and the next iteration is the next epoch. Each batch is a dict of
    tensors, B packs of S tokens: see the README. Iterate with `PackedDataLoader`, or with torch's
    ``DataLoader(dataset, batch_size=None, num_workers=n)``.
    """

    @with_hints
    def __init__(  # noqa: PLR0913 - the public constructor; four arguments are configs
        self,
        streams: Sequence[Any] | None = None,
        *,
        remote: str | os.PathLike[str] | None = None,
        local: str | os.PathLike[str] | None = None,
        split: str | None = None,
        stream_name: str | None = None,
        stream_config: Mapping[str, Any] | None = None,
        packing: Packing,
        mixing: Mixing | None = None,
        order: Order | None = None,
        buffers: Buffers | None = None,
        batch_size: int | None = None,
        batch_format: BatchFormat | None = None,
        balance: Balance | None = None,
        chapters: Sequence[Chapter] | None = None,
        skip: Sequence[tuple[int, int]] = (),
        world: World | None = None,
    ) -> None:
        configs = {"packing": packing, "mixing": mixing, "order": order, "buffers": buffers}
        check_configs(**configs, balance=balance, world=world)
        self.arguments: dict[str, Any] = {
            **configs,
            "batch_size": batch_size,
            "batch_format": batch_format,
            "balance": balance,
            "chapters": chapters,
            "skip": skip,
            "world": world,
        }
        """The arguments as they were passed, but for the streams. None is left open."""
        location = {"remote": remote, "local": local, "split": split}
        streams = resolve_streams(streams, location, stream_name, stream_config)
        self.buffers = buffers or Buffers()
        opened = OpenedStreams.of(streams, self.buffers, world)
        engine = _make_engine(opened, self.arguments, self.buffers)
        super().__init__(engine, opened, engine.recipe.names)
        self.streams: OpenedStreams = opened

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"streams": self.streams.without_memory()}

    def with_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        batch_format: BatchFormat | None = None,
        world: World | None = None,
    ) -> Self:
        """Return a new dataset, with values for arguments that this one left open.

        It begins at epoch 0, whatever the state of this one.

        Args:
            batch_size: Packs in a device batch. None, here and below: unchanged.
            global_batch_size: Packs in an optimizer step, over all ranks, as in `Mixing`.
            batch_format: The format of batches.
            world: Rank and number of ranks.

        Raises:
            ConfigError: If an argument was set before, to another value.
        """
        mixing = self.arguments["mixing"] or Mixing()
        before = {**self.arguments, "global_batch_size": mixing.global_batch_size}
        values: dict[str, Any] = {
            "batch_size": batch_size,
            "global_batch_size": global_batch_size,
            "batch_format": batch_format,
            "world": world,
        }
        changed = {name: value for name, value in values.items() if value is not None}
        for name, value in changed.items():
            if before[name] not in (None, value):
                raise ConfigError(
                    f"{name}={value!r} was asked for, but the dataset was made with "
                    f"{name}={before[name]!r}; remove it from the dataset, or make both the same"
                )
        if (packs := changed.pop("global_batch_size", None)) is not None:
            changed["mixing"] = replace(mixing, global_batch_size=packs)
        return self.with_arguments(**changed)

    def with_arguments(self, **arguments: Any) -> Self:
        """Return a new dataset with these arguments, and otherwise the arguments of this one.

        ``with_arguments(order=Order(shuffle=False))`` reads the samples in stored order, for
        example. It begins at epoch 0, whatever the state of this one.

        Raises:
            ConfigError: If the arguments cannot work together.
        """
        return type(self)(**{"streams": self.streams, **self.arguments, **arguments})

    def to_config(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the YAML from which `from_config` can recreate this dataset.

        It contains the arguments that were passed, without defaults and without the rank. Paths
        stay as they were passed. The YAML of an amended run describes the run as it began.

        Args:
            path: File to write it to as well.

        Raises:
            ConfigError: If an argument has no place in YAML, such as a function for `batch_format`.
                The message names it.
        """
        text = config_text(self.streams, self.arguments)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text

    def document(self, segment: Sequence[int], tokenizer: Any = None) -> dict[str, Any]:
        """Return the sample of a segment: all its columns, whether batches have them or not.

        Args:
            segment: Integers that begin with stream, pass and sample: a segment of
                `streampack.at`, or a row of ``batch["segments"]`` after its first column.
            tokenizer: An object with `decode`, to return the text as well, or None for no text.

        Returns:
            The columns by name. `tokens` are those of the whole sample as they are stored, shape
            (num_tokens,), and `text` is those tokens, decoded. Values of other columns are text,
            numbers, or bytes. Token files have no other columns. Samples made from files of rows
            have `file`, the number of the `row` in it, from 0, and the `fields` of that row as they
            are now, before a transform. For rows in memory, `file` is "rows".

        Raises:
            ConfigError: If this dataset has no such sample.
            DataError: If the sample's shard is unavailable or damaged, or its file of texts has
                changed.
        """
        return read_document(self._engine.spec.streams, segment, tokenizer)

    @property
    def batch_size(self) -> int:
        """Packs in a device batch."""
        return self._engine.spec.batch_size

    def __len__(self) -> int:
        """Return the number of batches of this rank in the current epoch, or else the next.

        For a run of chapters, it is the number of batches in all of them. Under torch's own
        workers, this process does not see the current epoch: it is the next.

        Raises:
            TypeError: If the last chapter has no end.
        """
        return len(self._engine)

    def load_state_dict(self, state: State, *, replan: bool = False) -> None:
        """Resume from `state` at the next iteration; change nothing if it does not fit.

        The number of ranks, workers and packs in a batch may differ from the run's, and so may
        global_batch_size if the packs stay the same. An iterator that is already running raises a
        ConfigError at its next batch.

        Args:
            state: What `state_dict`, `state_after` or a loader returned.
            replan: Whether texts that were delivered before the state may be tokenized again, if
                the state has no snapshots from which to continue planning their lanes. Only states
                without them need this.

        Raises:
            ResumeError: If the state belongs to another sequence, or lacks such snapshots; the
                message names the difference, or the number of tokens.
        """
        self._engine.load_state_dict(state, replan=replan)

    def state_after(self, batch: Mapping[str, Any]) -> State:
        """Return the state of a run that has trained on `batch`, delivered by any loader.

        Raises:
            ResumeError: If the batch has no `epoch` and `position`.
        """
        return self._engine.state_after(batch)


class OpenedStreams(list[Any]):
    """The streams that were passed, and what they opened to: a copy of a dataset opens nothing."""

    opened: tuple[TokenStream, ...]
    options: tuple[Any, ...]
    """What the streams were opened with."""

    @classmethod
    def of(cls, streams: Sequence[Any], buffers: Buffers, world: World | None) -> Self:
        """Return streams with what they open to, which may be known."""
        options = (buffers.cache_bytes, buffers.tokenizing)
        made = cls(streams)
        made.options = options
        if isinstance(streams, OpenedStreams) and streams.options == options:
            made.opened = streams.opened
        else:
            # When a run resumes, shards of streams that it no longer uses may be deleted.
            ranks = (world or World.from_env(os.environ)).num_local_ranks
            made.opened = open_streams(
                streams,
                cache_limit=buffers.cache_bytes,
                num_workers=buffers.processes(ranks),
            )
        return made

    def without_memory(self) -> Self:
        """Return the streams without clients, rows and tokenizers, which no worker needs."""
        made = copy.copy(self)
        made[:] = map(without_memory, self)
        return made


def _make_engine(
    streams: OpenedStreams, arguments: Mapping[str, Any], buffers: Buffers
) -> PlanEngine:
    packing, world, chapters = (arguments[name] for name in ("packing", "world", "chapters"))
    size, batch_format = arguments["batch_size"], arguments["batch_format"]
    batch_size = check_batch_size(1 if size is None else size, packing.row_tokens)
    batch_format = "native" if batch_format is None else batch_format
    finds_world = world is None
    world = world or World.from_env(os.environ)
    warn_of_open_texts(streams, streams.opened, packing)
    opened, packing = with_own_overflow(streams.opened, packing)
    convert = check_format(batch_format, packing, batch_size)
    spec = DatasetSpec(
        streams=opened,
        packing=packing,
        mixing=arguments["mixing"] or Mixing(),
        order=arguments["order"] or Order(),
        batch_size=batch_size,
        world=world,
        balance=arguments["balance"],
        chapters=() if chapters is None else check_chapters(chapters, packing),
        skip=check_skip(arguments["skip"], has_chapters=chapters is not None),
        loss_weights=loss_weights_of(streams, convert),
    )
    spec = replace(spec, context=spec.slice_for(convert))
    if spec.chapters:
        check_run(spec, streams, batch_format)
    return PlanEngine(spec, convert, buffers, finds_world=finds_world)
