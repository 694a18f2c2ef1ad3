"""What a planned run refuses: empty epochs, packs that fit no batch, and states of others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from streampack.config import Packing
from streampack.config.combination_table import ALL_LENGTHS, SLOTS, TO_KNOW_LENGTHS
from streampack.config.combinations import check_combination
from streampack.errors import ConfigError, DataError, ResumeError
from streampack.pack.cost import check_max_cost
from streampack.plan.device_plan import DeviceView
from streampack.plan.recipe import Recipe
from streampack.plan.sequence import PackSequence
from streampack.runtime.torch_worker import worker_here
from streampack.streams import TokenStream
from streampack.types import State


def check_not_empty(recipe: Recipe, epoch: int) -> None:
    """Refuse an epoch that has no batch, on which a training loop would spin."""
    if recipe.mixing.epoch_end == "drop":
        raise ConfigError(
            "epoch_end='drop' leaves no batch: an epoch has fewer packs than one global batch, "
            f"global_batch_size={recipe.global_batch_size}; lower it, raise epoch_size, "
            "or set epoch_end='pad'"
        )
    # The steps of a chapter may all be skipped.
    if recipe.mixing.epoch_end == "pad" and recipe.chapter is None:
        if "drop" not in (recipe.packing.overflow, *(each.overflow for each in recipe.streams)):
            raise DataError(
                f"epoch {epoch}: none of its samples has tokens; name other streams, or other "
                "shards of them"
            )
        longest = max(packing.max_seq_len for packing in recipe.shapes.packings)
        raise DataError(
            f"epoch {epoch}: all of its samples are longer than max_seq_len="
            f"{longest}, and overflow='drop' leaves nothing; raise "
            "max_seq_len, or set overflow to split or truncate"
        )


def check_whole_batches(recipe: Recipe) -> None:
    """Refuse streams that epoch_end="drop" would omit: they fill no batch of their own."""
    if recipe.mixing.epoch_end != "drop" or not recipe.shapes.is_pure:
        return
    lanes, turn = recipe.num_lanes, recipe.lane_turn
    is_whole = recipe.mixing.batching_method == "per_stream"
    batch = "global batch" if is_whole else "turn of batch_size packs in one lane"
    for stream in recipe.streams:
        # With one pack more than this, some lane fills a turn.
        slots = recipe.global_batch_size - 1 if is_whole else lanes * (turn - stream.slots_per_pack)
        least = slots * recipe.packing.max_seq_len + 1
        if 0 < stream.chosen_tokens < least:
            raise ConfigError(
                f"stream {stream.name!r} may never appear: epoch_end='drop' delivers whole "
                f"batches of each stream, and an epoch takes about {stream.chosen_tokens} of its "
                f"tokens, less than the {least} that fill a {batch}; set epoch_end to 'carry' or "
                "'pad', or raise its share"
            )


def check_lengths(
    stream: TokenStream, given: Mapping[str, Any], *, may_fetch: bool = False
) -> None:
    """Refuse what needs the lengths of all samples of a stream, where they are not known.

    With `may_fetch`, shards are fetched for them, and only texts are not tokenized.
    """
    cost = stream.shards.length_cost
    is_known = cost == "none" or (may_fetch and cost == "fetch")
    known = {ALL_LENGTHS: is_known, "to_know_lengths": TO_KNOW_LENGTHS.get(cost)}
    check_combination({**given, **known}, f"stream {stream.name!r}: ")


def check_tokenized(streams: Sequence[TokenStream], what: str) -> None:
    """Refuse to plan an epoch, or a run up to some step, where that would tokenize its texts."""
    for stream in streams:
        check_lengths(stream, {what: True}, may_fetch=True)


def check_equal_cost(packing: Packing, streams: Sequence[TokenStream]) -> None:
    """Refuse `cost` where packs of equal cost are not possible."""
    check_max_cost(packing)
    for stream in streams:
        given = {"cost": packing.cost, "Stream(max_seq_len)": stream.max_seq_len}
        check_lengths(stream, given)


def slots_per_pack(stream: TokenStream, packing: Packing) -> int:
    """Return the length of a stream's packs, in units of the packing's max_seq_len."""
    own, size = stream.max_seq_len, packing.max_seq_len
    given = {"Packing(max_seq_len)": size, "Stream(max_seq_len)": own}
    check_combination(given, f"stream {stream.name!r}: ")
    return (own or size) // size


def check_pack_lengths(recipe: Recipe, batch_size: int) -> None:
    """Refuse device batches that do not consist of whole packs of one length.

    `batch_size` is the number of slots of a device batch in this world.
    """
    slots = [stream.slots_per_pack for stream in recipe.streams]
    if max(slots) == 1:
        return
    longest = recipe.streams[slots.index(max(slots))]
    multiple, turn, method = math.lcm(*slots), recipe.lane_turn, recipe.mixing.batching_method
    # A new run's lane_turn is its batch_size.
    size = recipe.global_batch_size if method == "per_stream" else turn
    sizes = [n for n in range(multiple, size + 1, multiple) if size % n == 0]
    given = {
        "Stream(max_seq_len)": max(slots) * recipe.packing.max_seq_len,
        "batching_method": method,
        "the run's first batch_size": turn,
        "batch_size": batch_size,
        "batch_sizes": " or ".join(map(str, sizes or [-(-turn // multiple) * multiple])),
        "the packs of one stream": size,
        SLOTS: multiple,
    }
    check_combination(given, f"stream {longest.name!r}: ")
    names = "Stream(max_seq_len)", "batching_method", "the run's first batch_size"
    whole = {name: given[name] for name in names}
    whole["global_batch_size"] = recipe.global_batch_size
    check_combination(whole, f"stream {longest.name!r}: ")


def check_within_epoch(sequence: PackSequence, position: int, saved_size: int) -> None:
    """Refuse a loaded state with a position after the epoch.

    The sequence begins there, or at its end; `saved_size` is the global batch size of the state.
    """
    slots = sequence.num_slots
    # With larger global batches, a state may be after padding that the last batch lacks here.
    if slots is not None and position > -(-slots // saved_size) * saved_size:
        raise ResumeError(
            f"the state's position {position} is after the epoch's {slots} "
            "packs; load what state_dict() or state_after(batch) returned, unchanged"
        )


def check_saving_worker(state: State, view: DeviceView) -> bool:
    """Return whether a state was saved in a worker; refuse it outside of that worker.

    A step must also take as many packs as there.
    """
    if (saved_in := state.get("worker")) is None:
        return False
    worker = worker_here()
    own = [worker.number, worker.num_workers]
    if not worker or saved_in != own:
        here = "worker {} of {}".format(*own) if worker else "the training process"
        is_pair = isinstance(saved_in, list) and len(saved_in) == 2
        there = "worker {} of {}".format(*saved_in) if is_pair else f"{saved_in!r}"
        raise ResumeError(
            f"the state was saved in {there:.80}, but is loaded in {here}; load it with as many "
            "workers, or save dataset.state_after(batch), which fits any number"
        )
    if state.get("window") != view.stride:
        # Workers may be at different steps: they can only resume with the same step size.
        raise ResumeError(
            f"the state was saved in a worker while a step of all ranks took "
            f"{state.get('window')!r:.80} packs, but batch_size={view.batch_size} and "
            f"{view.num_devices} ranks with batches of their own take {view.stride}; "
            "load it with as many, or save dataset.state_after(batch), which fits any number"
        )
    return True
