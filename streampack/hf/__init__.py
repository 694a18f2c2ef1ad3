"""transformers' Trainer on packs: `PackedTrainer`, and a mix-in for your own Trainers.

Cost: importing this imports transformers, about 5 s.
"""

from streampack.hf.checkpoints import last_checkpoint
from streampack.hf.trainer import PackedTrainer, PackedTrainerMixin

__all__ = ["PackedTrainer", "PackedTrainerMixin", "last_checkpoint"]
