"""A Lightning callback that renews running statistics before averaged weights are evaluated, and when training ends.

Run, in a clone: pip install . lightning scikit-learn && python examples/lightning_averages.py
"""

from itertools import islice

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from balnorm import BalNormConv2d, param_groups, update_stats


class RenewStatistics(Callback):
    """Give the weights that are about to be evaluated statistics of their own.

    List it after the callback that averages: EMAWeightAveraging, WeightAveraging or StochasticWeightAveraging. It reads
    a few batches of the training set, in each process. A loader with persistent_workers starts again when it is read,
    so with such a loader, validate at the end of an epoch and not within it.
    """

    def __init__(self, batches=20):
        self.batches = batches

    def on_validation_epoch_start(self, trainer, pl_module):
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.renew(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        self.renew(trainer, pl_module)

    def renew(self, trainer, pl_module):
        def forward(module, batch):
            images, _ = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
            with trainer.precision_plugin.forward_context():
                module(images)

        update_stats(islice(trainer.train_dataloader, self.batches), pl_module, forward=forward)


# What follows is any training with Lightning.


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            BalNormConv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            BalNormConv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )

    def forward(self, images):
        return self.network(images)

    def training_step(self, batch, _):
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(param_groups(self, weight_decay=1e-4), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    L.seed_everything(0)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    train = DataLoader(TensorDataset(images[:1500], labels[:1500]), 50, shuffle=True)
    test = DataLoader(TensorDataset(images[1500:], labels[1500:]), 297)

    callbacks = [EMAWeightAveraging(decay=0.95), RenewStatistics()]
    trainer = L.Trainer(max_epochs=5, callbacks=callbacks, accelerator="cpu", logger=False, enable_checkpointing=False)
    model = Digits()
    trainer.fit(model, train, test)
    print(f"test accuracy {trainer.validate(model, test)[0]['accuracy']:.1%}")
