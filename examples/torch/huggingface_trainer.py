"""Fine-tunes a language model with Hugging Face's Trainer: `optimize` speeds its step up, AdamW is this package's.

    pip install transformers accelerate peft
    python examples/torch/huggingface_trainer.py --steps 60     # a small Llama on this project's license
    python examples/torch/huggingface_trainer.py --lora         # adapters alone, by peft
    python examples/torch/huggingface_trainer.py --model NAME --text FILE

`optimize` changes only how layers compute: what the Trainer saves are checkpoints of the plain model.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from kernel_pytorch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import kernel_pytorch

ROOT = Path(__file__).resolve().parents[2]


def load(name: str | None, text: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model and the text's tokens."""
    if name is not None:
        tokens = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), tokens
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config), torch.tensor([min(byte, 127) for byte in text.encode()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name of the Hub; by default a small Llama without weights")
    parser.add_argument("--text", type=Path, default=ROOT / "LICENSE")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds that `optimize` may take")
    words = parser.parse_args()

    model, tokens = load(words.model, words.text.read_text())
    if words.lora:
        from peft import LoraConfig, get_peft_model  # not needed without --lora

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    starts = range(0, len(tokens) - words.length, words.length // 2)
    dataset = [{"input_ids": (part := tokens[i : i + words.length]), "labels": part} for i in starts]

    device = next(model.parameters()).device
    sample = {name: value.expand(words.batch, -1).to(device) for name, value in dataset[0].items()}
    result = kernel_pytorch.optimize(model, sample, goal="train", budget_seconds=words.budget)
    print(result.report)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(parameter.numel() for parameter in trained)
    print(f"training {count:,} of {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    optimizer = AdamW(trained, words.rate, weight_decay=0.01)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=words.steps, per_device_train_batch_size=words.batch, logging_steps=10,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device.type == "cpu", max_grad_norm=1.0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=dataset, optimizers=(optimizer, None))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        model.save_pretrained(folder)
        saved = ", ".join(sorted(path.name for path in Path(folder).iterdir()))
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end; saved {saved}")
    result.restore()


if __name__ == "__main__":
    main()
