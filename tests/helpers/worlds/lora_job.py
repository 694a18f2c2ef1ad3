"""LoRA and QLoRA, in an environment that has PEFT and bitsandbytes: trained, saved and resumed.

::

    python lora_job.py FOLDER  -->  FOLDER/seen.json    losses of whole runs and of resumed ones
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from streampack.hf import last_checkpoint
from tests.helpers.fine_tuning import make_dataset, make_model, make_samples, make_trainer


def make(folder: Path, kind: str, out: str, steps: int = 4) -> Any:
    model = make_model(hidden_size=64)  # bitsandbytes packs blocks of 32
    if kind == "qlora":
        model.save_pretrained(folder / "model")
        model = LlamaForCausalLM.from_pretrained(
            folder / "model",
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            device_map="cpu",
        )
        model = prepare_model_for_kbit_training(model)
    if kind == "checkpointed":
        model.enable_input_require_grads()
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    return make_trainer(
        folder / f"{kind}-{out}",
        model=get_peft_model(model, lora),
        train_dataset=make_dataset(folder / "train", make_samples(60)),
        eval_dataset=make_dataset(folder / "held-out", make_samples(41, 1)),
        max_steps=steps,
        lr_scheduler_type="constant",
        learning_rate=0.01,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        gradient_checkpointing=kind != "lora",
    )


def seen_by(trainer: Any) -> dict[str, Any]:
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return {"losses": losses, "eval_loss": trainer.evaluate()["eval_loss"]}


def main() -> None:
    folder = Path(sys.argv[1])
    seen: dict[str, Any] = {}
    for kind in ("lora", "checkpointed", "qlora"):
        whole = make(folder, kind, "whole")
        whole.train()
        make(folder, kind, "resumed", steps=2).train()
        resumed = make(folder, kind, "resumed")
        resumed.train(resume_from_checkpoint=last_checkpoint(folder / f"{kind}-resumed"))
        seen[kind] = {"whole": seen_by(whole), "resumed": seen_by(resumed)}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
