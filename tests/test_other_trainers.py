"""Losses, samplers and networks with Lightning, the Trainer of Hugging Face, and peft."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nearfar as nf

EPOCHS, STEPS = 2, 3
LABELS = torch.arange(24) % 4
POINTS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.arange(24)


def sampler():
    return nf.data.sampling.create("groups", LABELS, classes=4, per_class=2, steps=STEPS, seed=3)


class Model(nn.Module):
    """A network and its loss, which note the rows of each batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.network, self.loss = nn.Linear(6, 4), nf.losses.ProxyAnchor(num_classes=4, dim=4)
        self.seen = []

    def forward(self, inputs, labels, rows):
        self.seen.append(rows.tolist())
        return {"loss": nf.distributed.global_loss(self.loss, self.network(inputs), labels)}


def optimizer(module):
    return torch.optim.SGD(nf.losses.param_groups(module, lr=1e-3), momentum=0.9)


@pytest.fixture(scope="module")
def plain():
    """The model of an ordinary loop."""
    model = Model()
    updates = optimizer(model)
    for epoch in range(EPOCHS):
        for batch in sampler().epoch(epoch):
            updates.zero_grad()
            model(POINTS[batch], LABELS[batch], ROWS[batch])["loss"].backward()
            updates.step()
    return model


def check(model, plain):
    assert model.seen == plain.seen
    assert len(model.seen) == EPOCHS * STEPS
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-7)
    assert not torch.equal(plain.loss.proxies, Model().loss.proxies)


def test_lightning_trains_as_an_ordinary_loop(plain, tmp_path):
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, number):
            return self.model(*batch)["loss"]

        def configure_optimizers(self):
            return optimizer(self)

    module = Module()
    loader = DataLoader(TensorDataset(POINTS, LABELS, ROWS), batch_sampler=sampler().batches())
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", enable_model_summary=False, default_root_dir=tmp_path, **quiet
    )
    trainer.fit(module, loader)
    check(module.model, plain)


def test_hugging_face_trains_as_an_ordinary_loop(plain, tmp_path):
    from transformers import Trainer, TrainingArguments

    class MetricTrainer(Trainer):
        def get_train_dataloader(self):
            def collate(rows):
                columns = map(torch.stack, zip(*rows, strict=True))
                return dict(zip(("inputs", "labels", "rows"), columns, strict=True))

            return DataLoader(self.train_dataset, batch_sampler=sampler().batches(), collate_fn=collate)

    model = Model()
    arguments = TrainingArguments(
        str(tmp_path), num_train_epochs=EPOCHS, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        lr_scheduler_type="constant", max_grad_norm=0.0, remove_unused_columns=False,
    )  # fmt: skip
    data = TensorDataset(POINTS, LABELS, ROWS)
    MetricTrainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer(model), None)).train()
    check(model, plain)


def test_adapters_of_peft_are_merged_into_what_is_saved(tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    network = nf.networks.create("mlp", in_dim=6, hidden=(8, 8), dim=4)
    plain = network.eval()(torch.eye(6))
    adapted = get_peft_model(network, LoraConfig(r=2, target_modules=r"backbone\.layers\.\d", init_lora_weights=False))
    inputs = torch.randn(5, 6)
    expected = adapted.eval()(inputs)
    before = {key: value.clone() for key, value in adapted.state_dict().items()}
    nf.networks.save(adapted, tmp_path)
    again = nf.networks.load(tmp_path)
    torch.testing.assert_close(again(inputs), expected)
    assert not torch.allclose(again(torch.eye(6)), plain, atol=1e-3), "the adapters changed nothing"
    assert all(torch.equal(value, before[key]) for key, value in adapted.state_dict().items())
