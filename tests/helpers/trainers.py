"""Small trainings by Lightning and by transformers, whose imports take seconds: a module of its own for that."""

from __future__ import annotations

import copy
import functools
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ntk_laplace as ntkl

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
lightning_callback = ntkl.callbacks.lightning.EvidenceCallback
huggingface_callback = ntkl.callbacks.huggingface.EvidenceCallback


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, x.prod(1, keepdim=True)


class Regression(lightning.LightningModule):
    """Dropout draws random numbers, and batch normalization has buffers; the first layer stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Recorder(lightning.Callback):
    """The network after each epoch, in eval mode."""

    def __init__(self) -> None:
        self.networks: list[nn.Module] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.networks.append(copy.deepcopy(pl_module).eval())


def train(*callbacks: Any, epochs: int = 4, loader: DataLoader | None = None, **options: Any) -> nn.Module:
    options = {"logger": False, "enable_checkpointing": False} | options
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=list(callbacks), accelerator="cpu",
                                enable_progress_bar=False, enable_model_summary=False, **options)
    module = Regression()
    torch.manual_seed(2)
    trainer.fit(module, loader or DataLoader(TensorDataset(*data()), 5, shuffle=True))
    return module


class Sentences(Dataset):
    """Tokens and labels, as mappings of one example."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.tokens = torch.randint(2, 30, (16, 6), generator=generator)
        self.labels = torch.randint(3, (16,), generator=generator)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


class Snapshots(transformers.TrainerCallback):
    """The network after each epoch, in eval mode."""

    def __init__(self) -> None:
        self.networks: list[nn.Module] = []

    def on_epoch_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        self.networks.append(copy.deepcopy(keywords["model"]).eval())


def trainer_of(folder: Path, **options: Any) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=8, num_labels=3, **sizes)
    torch.manual_seed(5)
    model = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=4, gradient_accumulation_steps=2, use_cpu=True,
        learning_rate=2e-2, report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )
    return transformers.Trainer(model, arguments, train_dataset=Sentences(), callbacks=[Snapshots()])
