"""torchdata's max_token_bucketize: batches of similar length, padded to their longest.

Releases from 0.9 on have no datapipes, so an older one is installed in a separate folder, which
`make bench-peers` adds to the path of this process. It drops samples with more tokens than a batch.

Cost: about 6 µs per sample.
"""

from __future__ import annotations

import time

from torchdata.datapipes.iter import IterableWrapper

from peers.task import Case, Measured, Task, samples

PACKAGES = ("torchdata",)


def plan(task: Task) -> Measured:
    """Batches of up to batch_size * max_seq_len slots; which samples, no padding done."""
    arrays = samples(task, task.max_seq_len)
    most = task.batch_size * task.max_seq_len
    pipe = IterableWrapper(arrays, deepcopy=False)
    begin = time.perf_counter()
    pipe = pipe.max_token_bucketize(
        max_token_count=most, max_len=task.max_seq_len, include_padding=True
    )
    batches = list(pipe)
    seconds = time.perf_counter() - begin
    slots = sum(len(batch) * max(map(len, batch)) for batch in batches)
    tokens = sum(sum(map(len, batch)) for batch in batches)
    return Measured(tokens=tokens, seconds=seconds, slots=slots)


CASES = {"max_token_bucketize": Case(kind="plan", work=plan)}
