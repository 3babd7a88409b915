"""A Lightning callback that speeds a module's step up while it is fitted, and a small module that uses it.

pip install lightning
python examples/torch/lightning_callback.py
"""

from __future__ import annotations

import argparse

import lightning
import torch
from kernel_pytorch.functional import cross_entropy
from kernel_pytorch.optim import AdamW
from torch import Tensor, nn
from torch.utils.data import DataLoader

import kernel_pytorch


class Optimize(lightning.Callback):
    """Optimises `module.model` for training, on the first batch's shapes; after the fit the model is as it was.

    Args:
        budget_seconds, options: of kernel_pytorch.optimize.
    """

    def __init__(self, budget_seconds: float = 20.0, **options: object) -> None:
        self.options = {"goal": "train", "budget_seconds": budget_seconds, **options}
        self.result = None

    def on_train_batch_start(self, trainer, module, batch, batch_index) -> None:
        if self.result is None:  # here the model is on its device, and so is the batch
            inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
            self.result = kernel_pytorch.optimize(module.model, inputs, **self.options)
            module.print(self.result.report)

    def teardown(self, trainer, module, stage) -> None:  # after an exception too
        if self.result is not None:
            self.result.restore()


class Classifier(lightning.LightningModule):
    """Whether the largest number of a sequence stands in its first half."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.Sequential(nn.Linear(2, width), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
        self.head = nn.Linear(width, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        x, target = batch
        loss = cross_entropy(self.head(self.model(x).mean(1)), target)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), 3e-3)


def samples(count: int, seed: int, length: int = 16) -> list[tuple[Tensor, Tensor]]:
    values = torch.rand(count, length, generator=torch.Generator().manual_seed(seed))
    places = torch.linspace(-1, 1, length).expand(count, -1)
    targets = (values.argmax(1) < length // 2).long()
    return list(zip(torch.stack((values, places), -1), targets))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--budget", type=float, default=10.0)
    words = parser.parse_args()
    torch.manual_seed(0)
    module, callback = Classifier(), Optimize(words.budget)
    trainer = lightning.Trainer(
        max_steps=words.steps, callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples(2048, seed=0), batch_size=32, shuffle=True))
    x, target = map(torch.stack, zip(*samples(1024, seed=1)))
    with torch.no_grad():
        right = module.head(module.model(x).mean(1)).argmax(1) == target
    print(
        f"{float(right.float().mean()):.1%} of new samples are right after {trainer.global_step} steps (50 %: a guess)"
    )


if __name__ == "__main__":
    main()
