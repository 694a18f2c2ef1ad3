"""LoRA here, in an environment that has PEFT: trained, evaluated, saved and resumed.

::

    python lora_job.py FOLDER  -->  FOLDER/seen.json    losses of a whole run and of a resumed one

Cost: half a minute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from streampack.hf import last_checkpoint
from tests.helpers.fine_tuning import make_dataset, make_model, make_samples, make_trainer


def make(folder: Path, out: str, *, checkpointing: bool = False, steps: int = 4) -> Any:
    model = make_model()
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    if checkpointing:
        model.enable_input_require_grads()
    return make_trainer(
        folder / out,
        model=get_peft_model(model, lora),
        train_dataset=make_dataset(folder / "train", make_samples(60)),
        eval_dataset=make_dataset(folder / "held-out", make_samples(41, 1)),
        max_steps=steps,
        lr_scheduler_type="constant",
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        gradient_checkpointing=checkpointing,
    )


def main() -> None:
    folder = Path(sys.argv[1])
    whole = make(folder, "whole")
    whole.train()
    checkpointed = make(folder, "checkpointed", checkpointing=True)
    checkpointed.train()
    make(folder, "resumed", steps=2).train()
    resumed = make(folder, "resumed")
    resumed.train(resume_from_checkpoint=last_checkpoint(folder / "resumed"))
    seen = {
        name: {
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
            "eval_loss": trainer.evaluate()["eval_loss"],
        }
        for name, trainer in (
            ("whole", whole),
            ("checkpointed", checkpointed),
            ("resumed", resumed),
        )
    }
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
