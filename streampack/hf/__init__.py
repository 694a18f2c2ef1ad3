"""transformers' Trainer on packs: `PackedTrainer`, and a mix-in for Trainers of your own.

::

    trainer       args --> batch size, steps, format; evaluation; the leak check
    batches       what Trainer iterates over, and where epochs end
    checkpoints   the loader's state of every rank, in every checkpoint of Trainer
    held_out      held-out samples one by one, for predictions and metrics

Cost: importing this imports transformers, about 5 s.
"""

from streampack.hf.checkpoints import last_checkpoint
from streampack.hf.trainer import PackedTrainer, PackedTrainerMixin

__all__ = ["PackedTrainer", "PackedTrainerMixin", "last_checkpoint"]
