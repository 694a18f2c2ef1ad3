"""A user's script, which `make lint` checks with mypy --strict against the package.

Lines of the README and of the quick starts: what these pages pass must fit the types.
"""

from __future__ import annotations

from pathlib import Path

from streampack import (
    Chats,
    IterableStream,
    Order,
    PackedDataLoader,
    PackedIterableDataset,
    PackedStreamingDataset,
    Packing,
    Stream,
    chat_dataset,
    from_config,
)
from streampack.index import write_lengths
from streampack.report import write_report
from streampack.texts import ChatEncoder, ChatSamples, RowFormat
from streampack.write import WriteOptions, merge, verify, write_stream, write_texts


def prepare(tokenizer: object, folder: str, chats: list[dict[str, object]]) -> None:
    """Write streams, with text and with Path."""
    write_stream(([n] * 3 for n in range(5)), "data/web")
    write_stream([[1, 2]], Path(folder) / "more", tokens_dtype="uint16", size_limit="1mb")
    encode = ChatEncoder(tokenizer, train_on="each_response", ignore_fields=["id"])
    write_stream((sample for row in chats for sample in encode.samples(row)), "data/chats")
    rows = RowFormat(tokenizer=Path("t"), chat="messages", template_kwargs={"keep": True})
    write_texts(["a.jsonl"], "data/texts", WriteOptions(rows=rows))
    merge("data/texts")
    verify(Path("data/texts"))
    write_lengths("data/web")


def train(tokenizer: object, chats: list[dict[str, object]]) -> int:
    """Iterate, save and report."""
    packing = Packing(max_seq_len=2048, overflow="truncate", eos_id=2)
    streams = [
        Stream(local="data/web", proportion=0.9),
        Stream(Chats(chats, tokenizer, train_on="all"), proportion=0.1),
    ]
    dataset = PackedStreamingDataset(streams, packing=packing, order=Order(seed=1), batch_size=2)
    chat_dataset(chats, tokenizer, packing=packing, train_on="last_response", batch_size=1)
    source = IterableStream(ChatSamples(chats, ChatEncoder(tokenizer)), loss_mask="loss_mask")
    PackedIterableDataset([source], packing=packing)
    loader = PackedDataLoader(dataset, num_workers=2)
    total = 0
    for batch in loader:
        total += int((batch["labels"] >= 0).sum())
        loader.load_state_dict(loader.state_dict())
    write_report(dataset, "report.html", title="run")
    from_config("run.yaml")
    return total
