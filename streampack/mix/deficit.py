"""Who is next among sources whose lengths nobody knows before they are read.

With shares 1/2, 1/4, 1/4, counted in samples; a deficit is what a source should have got by now,
less what it got::

    turn        0    1    2    3    4
    source      0    1    2    0    0  ...
    deficits   -.5   0   .5  ...          0 again after every fourth turn

In samples every amount is 1, so deadlines are known: of the sources that may be served without
running ahead by a whole sample, the one that would first be behind by one is next (earliest
deadline first). No source is ever off by a sample or more. In tokens the one with the largest
deficit is next: none is ever ahead of its share by more than its longest sample, nor behind by more
than one longest sample of each of the others. Integers only.

A source that ends leaves the others with their shares of the whole, and the count begins anew.

Cost: some 0.2 us a source and turn. State: one integer a source.
"""

from __future__ import annotations

from collections.abc import Sequence

from streampack.errors import ResumeError
from streampack.mix.apportion import scaled_shares
from streampack.types import State

__all__ = ["Deficits"]

SCALE = 1 << 30


class Deficits:
    """Chooses the source that is most behind its share.

    Args:
        amounts: What each source should get, relative to the others; 0 leaves it out.
        unit: "samples", where every amount served is 1, or "tokens".

    >>> turns = Deficits([2, 1, 1], "samples")
    >>> order = []
    >>> for _ in range(8):
    ...     order.append(turns.next())
    ...     turns.serve(order[-1], 1)
    >>> [order.count(source) for source in range(3)]
    [4, 2, 2]
    """

    def __init__(self, amounts: Sequence[int], unit: str) -> None:
        self._amounts = [int(amount) for amount in amounts]
        self._by_samples = unit == "samples"
        self._deficits = [0] * len(self._amounts)
        self._shares = self._shares_of_live()

    def _shares_of_live(self) -> list[int]:
        if not any(self._amounts):
            return [0] * len(self._amounts)
        return [int(share) for share in scaled_shares(self._amounts, SCALE)]

    def next(self) -> int | None:
        """Return the source to serve; None once all have ended."""
        best, best_key = None, 0
        for source, share in enumerate(self._shares):
            if not share:
                continue
            owed = self._deficits[source] + share
            if not self._by_samples:
                key = owed
            elif owed > 0:
                # Turns until it is behind by a whole sample, negated: the first deadline wins.
                key = (self._deficits[source] - SCALE) // share
            else:
                continue
            if best is None or key > best_key:
                best, best_key = source, key
        return best

    def serve(self, source: int, amount: int) -> None:
        """Note that `source` got `amount` samples or tokens."""
        for other, share in enumerate(self._shares):
            self._deficits[other] += share * amount
        self._deficits[source] -= SCALE * amount

    def end(self, source: int) -> None:
        """Leave `source` out from now on."""
        self._amounts[source] = 0
        self._deficits = [0] * len(self._amounts)
        self._shares = self._shares_of_live()

    def state_dict(self) -> State:
        """Return what is needed to go on, as plain integers."""
        return {"amounts": list(self._amounts), "deficits": list(self._deficits)}

    def load_state_dict(self, state: State) -> None:
        """Go on where the one stood whose state this is.

        Raises:
            ResumeError: If it is of another number of sources.
        """
        amounts = [int(amount) for amount in state["amounts"]]
        deficits = [int(deficit) for deficit in state["deficits"]]
        if not len(amounts) == len(deficits) == len(self._amounts):
            raise ResumeError(
                f"the state holds amounts of {len(amounts)} sources and deficits of "
                f"{len(deficits)}, but there are {len(self._amounts)}; load what state_dict() "
                "returned, unchanged"
            )
        self._amounts, self._deficits = amounts, deficits
        self._shares = self._shares_of_live()
