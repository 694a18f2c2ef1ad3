"""Batches that torch's DataLoader refuses to stack, as it would with any batch_size but None.

It does not tell a dataset its batch_size, but its collate function looks up what to do by type.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn

from torch.utils import _pytree as pytree
from torch.utils.data._utils.collate import default_collate_fn_map

from streampack.errors import ConfigError

UNBATCHED = "DataLoader(dataset, batch_size=None)"


class WholeBatch(dict[str, Any]):
    """A batch that torch does not stack with others. Copies and pickles of it are plain dicts.

    >>> import copy, pickle
    >>> batch = WholeBatch({"epoch": 3})
    >>> batch, type(copy.copy(batch)).__name__, type(pickle.loads(pickle.dumps(batch))).__name__
    ({'epoch': 3}, 'dict', 'dict')
    """

    __slots__ = ()

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def check_not_of_trainer(fetcher: object) -> None:
    """Refuse what in torch's DataLoader iterates a dataset, if it stacks for transformers' Trainer.

    Trainer's collate functions know no types, and take the batches apart before they stack.
    """
    collate = getattr(fetcher, "collate_fn", None)
    if str(getattr(collate, "__module__", "")).partition(".")[0] == "transformers":
        raise ConfigError(
            "transformers' Trainer would stack the whole batches of a packed dataset; use "
            "streampack.hf.PackedTrainer in its place, which takes the same arguments"
        )


def whole(batch: Any) -> Any:
    """Return a batch as a `WholeBatch` if it is a dict."""
    if type(batch) is not dict:
        return batch
    _register()
    return WholeBatch(batch)


@cache
def _register() -> None:
    """Tell torch's default_collate to refuse the class, and pytree to treat it as a dict."""
    default_collate_fn_map[WholeBatch] = _refuse_to_stack
    pytree.register_pytree_node(
        WholeBatch,
        lambda batch: (list(batch.values()), list(batch)),
        lambda values, names: dict(zip(names, values, strict=True)),
    )


def _refuse_to_stack(
    batches: list[WholeBatch],
    *,
    collate_fn_map: object = None,  # noqa: ARG001 - torch passes it
) -> NoReturn:
    raise ConfigError(
        f"torch's DataLoader has batch_size={len(batches)} and would stack whole batches; use "
        f"{UNBATCHED}, and set the batch_size of the dataset"
    )
