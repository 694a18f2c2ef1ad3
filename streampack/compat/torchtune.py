"""torchtune's `PackedDataset` and its collate function: same arguments, same items.

With max_seq_len=6 and samples of 5 and 3 tokens, both ways::

    split_across_pack=False    a a a a a .    b b b . . .
    split_across_pack=True     a a a a a b    b b . . . .      positions continue: 0 1 2 3 4 0 | 1 2

Packs are planned from lengths, in order, and filled on access. Strict behavior that streampack's
own datasets do not share: positions are the index in the sample modulo max_seq_len, so they wrap
inside a long sample; padding counts as one more sample in `seq_lens`; the last target before a cut
is kept.

Cost: about 0.2 us a sample to pack, then about 50 ns a token of lists, or 1 ns of arrays, for each
item accessed. Memory: a copy of the samples' tokens and labels, and 16 bytes for each.
Semantics: torchtune 0.6, `datasets/_packed.py` and `data/_collate.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from streampack._checks import read_count, read_integer
from streampack.batch.masks import dense_mask
from streampack.errors import ConfigError, DataError
from streampack.texts.source_traits import own_copy
from streampack.types import IGNORED

Pack = dict[str, Tensor]


class PackedDataset(Dataset[Pack]):
    """Packs a dataset greedily, in order, at construction: torchtune's class of this name.

    Args:
        ds: Samples with "tokens" and "labels", one label per token; iterated once.
        max_seq_len: Tokens in a pack.
        padding_idx: Token id of empty slots; labels there are -100.
        max_packs: Stop reading at this many packs; None packs all.
        split_across_pack: Whether samples are cut where a pack is full.

    Raises:
        ConfigError: A ValueError: a sample is longer than max_seq_len and may not be split.
        DataError: A sample has no tokens or labels, or different numbers of them.

    Items are dicts of int64 tensors: `tokens`, `labels` and `input_pos` of shape (max_seq_len,),
    and `seq_lens`, the number of tokens of each piece, with padding as the last piece.

    >>> samples = [{"tokens": [1, 2, 3], "labels": [2, 3, 4]}, {"tokens": [7, 8], "labels": [8, 9]}]
    >>> item = PackedDataset(samples, max_seq_len=4)[0]
    >>> item["tokens"].tolist(), item["seq_lens"].tolist()
    ([1, 2, 3, 0], [3, 1])
    """

    def __init__(
        self,
        ds: Iterable[Mapping[str, Any]],
        *,
        max_seq_len: int,
        padding_idx: int = 0,
        max_packs: int | None = None,
        split_across_pack: bool = False,
    ) -> None:
        if max_packs is not None:
            max_packs = read_integer("max_packs", max_packs, "None packs all", 0)
        self.ds = ds
        self.max_seq_len = read_count("max_seq_len", max_seq_len)
        self.padding_idx = padding_idx
        self.max_packs = max_packs
        self.split_across_pack = split_across_pack
        # Two lists instead of a list of pairs: 50,000 new tuples would make the garbage collector
        # scan all samples, which takes ten times as long as packing them.
        self._tokens: list[Sequence[int]] = []
        self._labels: list[Sequence[int]] = []
        # edges: start of each pack and end of the last one, as a sample and an offset in it.
        self._edges = [(0, 0)]
        self._pack()

    def _pack(self) -> None:
        all_tokens, all_labels = self._tokens, self._labels
        edges, size = self._edges, self.max_seq_len
        most = None if self.max_packs is None else self.max_packs + 1
        used = 0  # tokens of the open pack
        for number, sample in enumerate(self.ds):
            try:
                tokens, labels = sample["tokens"], sample["labels"]
            except KeyError as error:
                raise DataError(
                    f"sample {number} has no {error}, only {', '.join(map(repr, sample))}; "
                    "give dicts with tokens and labels"
                ) from error
            length = len(tokens)
            if length != len(labels):
                raise DataError(
                    f"sample {number}: {length} tokens, but {len(labels)} labels; "
                    "give one for each token"
                )
            # Copies: a dataset may reuse the same lists for every sample.
            all_tokens.append(_own_ids(tokens))
            all_labels.append(_own_ids(labels))
            used += length
            if used > size:
                used = self._close(number, length, used)
            # torchtune checks max_packs after each sample, so with 0 it still reads one.
            if len(edges) == most:
                return
        if used:
            edges.append((len(all_tokens), 0))

    def _close(self, number: int, length: int, used: int) -> int:
        """Close the packs that a sample fills or does not fit; return the open pack's tokens."""
        size = self.max_seq_len
        if not self.split_across_pack:
            if length > size:
                raise ConfigError(
                    f"Dataset sample is too long: sample {number} has {length} tokens, but "
                    f"max_seq_len={size}; set split_across_pack=True, or raise max_seq_len"
                )
            self._edges.append((number, 0))
            return length
        while used > size and len(self) != self.max_packs:
            used -= size
            self._edges.append((number, length - used))
        return used

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, idx: int | slice) -> Any:
        """Return a pack, or a list of packs for a slice; negative indices count from the end."""
        numbers = range(len(self))[idx]
        if isinstance(numbers, range):
            return list(map(self._item, numbers))
        return self._item(numbers)

    def _item(self, number: int) -> Pack:
        size = self.max_seq_len
        tokens = np.full(size, self.padding_idx, np.int64)
        labels = np.full(size, IGNORED, np.int64)
        positions = np.empty(size, np.int64)
        (first, start), (last, last_stop) = self._edges[number : number + 2]
        filled, seq_lens = 0, []
        for sample in range(first, last + (last_stop > 0)):
            own_tokens, own_labels = self._tokens[sample], self._labels[sample]
            stop = last_stop if sample == last else len(own_tokens)
            end = filled + stop - start
            tokens[filled:end] = np.asarray(own_tokens[start:stop])
            labels[filled:end] = np.asarray(own_labels[start:stop])
            positions[filled:end] = np.arange(start, stop) % size
            seq_lens.append(stop - start)
            filled, start = end, 0
        num_padding = size - filled
        after = int(positions[filled - 1]) + 1
        positions[filled:] = np.minimum(np.arange(after, after + num_padding), size - 1)
        if num_padding:
            seq_lens.append(num_padding)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "input_pos": torch.from_numpy(positions),
            "seq_lens": torch.tensor(seq_lens),
        }


def padded_collate_packed(batch: Sequence[Pack]) -> Pack:
    """Stack packs and build their block-causal mask: torchtune's function of this name.

    Args:
        batch: Items of `PackedDataset`.

    Returns:
        `tokens`, `labels`, `input_pos` of shape (B, S), and `mask`, bool of shape (B, S, S). As in
        torchtune's code, padding attends to the padding before it, too.

    >>> item = {name: torch.zeros(3) for name in ("tokens", "labels", "input_pos")}
    >>> padded_collate_packed([item | {"seq_lens": torch.tensor([2, 1])}])["mask"].int().tolist()
    [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]
    """
    stacked = {
        name: torch.stack([item[name] for item in batch])
        for name in ("tokens", "labels", "input_pos")
    }
    pieces = (item["seq_lens"] for item in batch)  # padding is the last one of a pack
    ids = torch.stack([torch.arange(len(one)).repeat_interleave(one) for one in pieces])
    return stacked | {"mask": dense_mask(ids, padding="causal")}


def _own_ids(ids: Any) -> Any:
    # `own_copy` looks at every element of a list. A tuple of numbers is faster, also than a list:
    # the garbage collector does not scan it again and again while the other samples are read.
    return tuple(ids) if type(ids) is list else own_copy(ids)
