"""Remedies in messages about plans, loaders, states and iterables, applied as written.

The regular expressions match options and values rather than prose.
"""

from __future__ import annotations

import ast
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from streampack import (
    Buffers,
    Chats,
    IterableStream,
    Mixing,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    TokenFiles,
    World,
)
from streampack.index.lengths import write_lengths
from streampack.texts import ChatEncoder
from tests.helpers.iterables import Again
from tests.helpers.remedies import PACKING, ROWS, Remedy, mds, packed
from tests.helpers.words import words

State = dict[str, Any]

# Planned runs.


def planned(folder: Path, **options: Any) -> PackedStreamingDataset:
    options = {"packing": PACKING, **options}
    return PackedStreamingDataset([Stream(local=mds(folder))], **options)


def saved(folder: Path, steps: int = 1, **options: Any) -> State:
    loader = PackedDataLoader(planned(folder, **options))
    for _ in islice(loader, steps):
        pass
    return loader.state_dict()


def resume(folder: Path, state: State, **options: Any) -> int:
    """Resume a planned run up to the end of its epoch; return its steps."""
    loader = PackedDataLoader(planned(folder, **options))
    loader.load_state_dict(state)
    steps = len(list(loader))
    assert steps
    return steps


def unchanged(folder: Path, *_: str) -> int:
    return resume(folder, saved(folder))


def served(dataset: Any) -> Any:
    """Take a batch from a worker of torch's DataLoader."""
    return next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))


def without(state: State, key: str) -> State:
    return {name: value for name, value in state.items() if name != key}


def asked_by_accelerate(rank: int) -> State:
    """Return the state that accelerate's save_state gets from one of two ranks of iterables."""
    world = World(rank=rank, num_ranks=2)
    loader = PackedDataLoader(
        PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, world=world)
    )
    names: dict[str, Any] = {"__name__": "accelerate.checkpointing", "loader": loader}
    exec("state = loader.state_dict()", names)
    return names["state"]


def saved_by_rank(index: str) -> list[State]:
    """Save the state of each rank under its process_index, and load it on the same rank."""
    assert index == "process_index"
    loaders = [
        PackedDataLoader(
            PackedIterableDataset(
                [IterableStream(ROWS)], packing=PACKING, world=World(rank=rank, num_ranks=2)
            )
        )
        for rank in range(2)
    ]
    states = {rank: loader.state_dict() for rank, loader in enumerate(loaders)}
    for rank, loader in enumerate(loaders):
        loader.load_state_dict(states[rank])
    return list(states.values())


STATES = {
    "a state of rank 0 for all": Remedy(
        lambda _: asked_by_accelerate(1),
        r"save loader\.state_dict\(\) of every rank under accelerator\.(\w+), and load ",
        lambda _, index: saved_by_rank(index),
    ),
    "a batch size that does not divide the position": Remedy(
        lambda folder: resume(folder, saved(folder, 3), batch_size=2),
        r"position 3 .*batch_size=2; set batch_size to (\d+) or (\d+)",
        lambda folder, *sizes: [
            resume(folder, saved(folder, 3), batch_size=int(size)) for size in sizes
        ],
    ),
    "another number of lanes": Remedy(
        lambda folder: resume(folder, saved(folder), order=Order(num_lanes=2)),
        r"num_lanes=1, .*=2; .*: set (\d+), or omit it",
        lambda folder, lanes: [
            resume(folder, saved(folder), order=Order(num_lanes=int(lanes))),
            unchanged(folder),
        ],
    ),
    "a dataset iterated in workers": Remedy(
        lambda folder: (served(dataset := planned(folder)), dataset.state_dict()),
        r"dataset\.(state_after)\(batch\) .*loader\.(state_dict)\(\)",
        lambda folder, after, of_loader: [
            resume(folder, getattr(dataset := planned(folder), after)(served(dataset))),
            resume(folder, getattr(PackedDataLoader(planned(folder)), of_loader)()),
        ],
    ),
}


EPOCHS = {
    "an epoch of samples that are all dropped": Remedy(
        lambda folder: list(planned(folder, packing=Packing(max_seq_len=2, overflow="drop"))),
        r"max_seq_len=2.* raise max_seq_len, or set overflow to (\w+) or (\w+)$",
        lambda folder, *ways: [
            list(planned(folder, packing=Packing(max_seq_len=4, overflow="drop"))),
            *(list(planned(folder, packing=Packing(max_seq_len=2, overflow=w))) for w in ways),
        ],
    ),
    "an epoch without a whole batch": Remedy(
        lambda folder: list(
            planned(folder, mixing=Mixing(epoch_end="drop", global_batch_size=100))
        ),
        r"global_batch_size=100; lower it, raise epoch_size, or set epoch_end='(\w+)'$",
        lambda folder, end: [
            list(planned(folder, mixing=Mixing(epoch_end="drop", global_batch_size=1))),
            list(planned(folder, mixing=Mixing(epoch_end=end, global_batch_size=100))),
            packed(
                [Stream(local=mds(folder), proportion=1)],
                mixing=Mixing(epoch_end="drop", global_batch_size=100, epoch_size=2000),
            ),
        ],
    ),
    **{
        f"{name} that is too small": Remedy(
            lambda folder, name=name: list(
                PackedDataLoader(planned(folder, buffers=Buffers(**{name: 1})))
            ),
            rf"{name}=1\) .*set {name} to at least (\d+)",
            lambda folder, least, name=name: list(
                PackedDataLoader(planned(folder, buffers=Buffers(**{name: int(least)})))
            ),
        )
        for name in ("worker_tokens", "worker_bytes", "rank_tokens")
    },
}

# Loaders.


def two_at_a_time(loader: Any) -> None:
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    next(first)


def one_after_the_other(loader: Any) -> None:
    assert list(loader)
    assert list(loader)


LOADERS = {
    "two iterations of a loader with workers": Remedy(
        lambda folder: two_at_a_time(PackedDataLoader(planned(folder), num_workers=1)),
        r"end one before the next, or make a (PackedDataLoader) for each$",
        lambda folder, _: [
            one_after_the_other(PackedDataLoader(planned(folder), num_workers=1)),
            both(*(PackedDataLoader(planned(folder), num_workers=1) for _ in range(2))),
        ],
    ),
    "torch's loader that would stack batches": Remedy(
        lambda folder: next(iter(DataLoader(planned(folder), batch_size=2, num_workers=1))),
        r"batch_size=2 .*batch_size=(None)\)",
        lambda folder, _: served(planned(folder, batch_size=2)),
    ),
}


def both(first: Any, second: Any) -> None:
    assert len(list(zip(first, second, strict=True)))


# Iterables.


def flow(*streams: IterableStream, **options: Any) -> int:
    return packed(list(streams), **options)


def online(num_workers: int = 0, **options: Any) -> PackedDataLoader:
    dataset = PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, **options)
    return PackedDataLoader(dataset, num_workers=num_workers)


def saved_online(**options: Any) -> State:
    loader = online(**options)
    next(iter(loader))
    return loader.state_dict()


def resume_online(state: State, **options: Any) -> None:
    loader = online(**options)
    loader.load_state_dict(state)
    assert list(loader)


def bad_rows(most: int) -> IterableStream:
    return IterableStream([[1], [], [2], [], [3]], on_bad_row=most)


def ranked(num_ranks: int, state: State | None = None) -> PackedIterableDataset:
    world = World(rank=0, num_ranks=num_ranks)
    dataset = PackedIterableDataset([IterableStream(ROWS)], packing=PACKING, world=world)
    if state is not None:
        dataset.load_state_dict(state)
    next(iter(dataset))
    return dataset


RESUMED = {
    "a state of other workers": Remedy(
        lambda _: resume_online(saved_online(), num_workers=1),
        r"num_workers=0, .*num_workers=1; .*with num_workers=(\d+)$",
        lambda _, number: resume_online(saved_online(), num_workers=int(number)),
    ),
    "another number of ranks": Remedy(
        lambda _: ranked(1, ranked(2).state_dict()),
        r" 0 of (\d+), .* 0 of 1; ",
        lambda _, ranks: ranked(int(ranks), ranked(2).state_dict()),
    ),
}
ONCE = r"; pass a list, .* __iter__ that makes a new generator$"
ITERABLES = {
    "a generator in epochs of a size": Remedy(
        lambda _: flow(IterableStream(iter(ROWS), proportion=1), mixing=Mixing(epoch_size=50)),
        rf"epoch_size=50 .*{ONCE}",
        lambda _: [
            flow(IterableStream(source, proportion=1), mixing=Mixing(epoch_size=50))
            for source in (ROWS, Again(ROWS))
        ],
    ),
    "more bad samples than allowed": Remedy(
        lambda _: flow(bad_rows(1)),
        r"(on_bad_row)=1 ",
        lambda _, __: flow(bad_rows(2)),
    ),
    "a generator in a second epoch": Remedy(
        lambda _: one_after_the_other(
            PackedIterableDataset([IterableStream(iter(ROWS))], packing=PACKING)
        ),
        r"; pass something that can be iterated again: .* __iter__ that makes a new generator$",
        lambda _: [
            one_after_the_other(PackedIterableDataset([IterableStream(source)], packing=PACKING))
            for source in (ROWS, Again(ROWS))
        ],
    ),
}


# Conversations.

PROMPT = "{% if add_generation_prompt %}<|assistant|> {% endif %}"
PLAIN = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} {% endfor %}" + PROMPT
ALWAYS_ASKS = PLAIN.removesuffix(PROMPT) + "<|assistant|> "
SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "text"}]


def chat_tokenizer(template: str | None = PLAIN) -> Any:
    from transformers import (
        PreTrainedTokenizerFast,
    )  # takes seconds, and only the rows about chats need it

    return PreTrainedTokenizerFast(tokenizer_object=words(), chat_template=template)


def encoded(said: Any = SAID, template: str | None = PLAIN, **options: Any) -> None:
    sample = ChatEncoder(chat_tokenizer(template), **options)(said)
    assert sample["loss_mask"].any()


CHATS = {
    "a tokenizer without a template": Remedy(
        lambda _: encoded(template=None),
        r"set tokenizer\.(chat_template), pass (chat_template)=, or use ",
        lambda _, attribute, option: [
            setattr(tokenizer := chat_tokenizer(None), attribute, PLAIN),
            ChatEncoder(tokenizer)(SAID),
            encoded(template=None, **{option: PLAIN}),
            encoded(template=PLAIN),
        ],
    ),
    "a generation prompt that ends every text": Remedy(
        lambda _: encoded(template=ALWAYS_ASKS),
        r"pass (chat_template)= with one that prints it only if add_generation_prompt is true$",
        lambda _, option: encoded(template=ALWAYS_ASKS, **{option: PLAIN}),
    ),
    "a text as a conversation": Remedy(
        lambda _: encoded("a text"),
        r"messages such as (\{.*\})$",
        lambda _, message: encoded([ast.literal_eval(message), *SAID]),
    ),
}


def of_rows(rows: Any, folder: Path, **options: Any) -> int:
    return packed([Stream(TokenFiles(rows, local=folder / "cache"), **options)])


def of_chats(folder: Path, **options: Any) -> int:
    rows = [{"messages": SAID}, {"messages": [{"role": "bot", "content": "a"}]}]
    return packed([Stream(Chats(rows, chat_tokenizer(), local=folder / "cache", **options))])


STREAMS_OF_ROWS = {
    "a bad row": Remedy(
        of_chats,
        r"^rows, row 1: .*; set (on_bad_row)='(\w+)' to skip such rows$",
        lambda folder, option, value: of_chats(folder, **{option: value}),
    ),
    "rows that can be read only once": Remedy(
        lambda folder: of_rows(iter(ROWS), folder),
        r"make a (list) of a generator, or pass what has no end to (PackedIterableDataset)$",
        lambda folder, *_: [of_rows(list(iter(ROWS)), folder), flow(IterableStream(ROWS))],
    ),
    "a checkpoint that is not complete": Remedy(
        lambda folder: checkpoint(folder, folder / "checkpoint-4"),
        r"has no readable streampack.json: .*; resume from (\S+)$",
        lambda folder, last: checkpoint(folder, last),
    ),
    "no checkpoint that is complete": Remedy(
        lambda folder: checkpoint(folder / "other", True),
        r"omit it to begin, or pass streampack\.hf\.(\w+)\(\.\.\.\), which may be None$",
        lambda folder, name: [checkpoint(folder / "other", None), last_of(name, folder / "other")],
    ),
}


def last_of(name: str, folder: Path) -> str | None:
    return getattr(import_module("streampack.hf"), name)(folder)


def checkpoint(folder: Path, resume: Any) -> str | None:
    """Find a checkpoint in a folder with a complete one and an incomplete one."""
    for name in ("checkpoint-2/streampack.json", "checkpoint-2/trainer_state.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if folder.name != "other":
            (folder / name).write_text("{}")
    (folder / "checkpoint-4").mkdir(exist_ok=True)
    (folder / "checkpoint-4" / "trainer_state.json").write_text("{}")
    return import_module("streampack.hf.checkpoints").find_checkpoint(folder, resume)


# Length files.


LENGTHS = {
    "a folder without a stream": Remedy(
        lambda folder: write_lengths(folder),
        r"give an MDS stream: ",
        lambda folder: write_lengths(mds(folder)),
    ),
}


def stepped(steps: Any, **options: Any) -> None:
    assert list(online(steps=steps, **options))


STEPS = {
    "ranks without a process group": Remedy(
        lambda _: stepped("equal", world=World(num_ranks=2)),
        r"init_process_group .*set steps to a number, such as steps=(\d+)$",
        lambda _, steps: stepped(int(steps), world=World(num_ranks=2)),
    ),
}

GROUPS = {
    "states": STATES,
    "epochs": EPOCHS,
    "loaders": LOADERS,
    "resumed": RESUMED,
    "iterables": ITERABLES,
    "steps": STEPS,
    "chats": CHATS,
    "rows": STREAMS_OF_ROWS,
    "lengths": LENGTHS,
}
TABLE = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("remedy", TABLE.values(), ids=TABLE)
def test_what_a_message_of_a_run_says_to_do_works(remedy: Remedy, tmp_path: Path):
    remedy.check(tmp_path)
