"""PyTorch Lightning: the optimizer comes from configure_optimizers, its state is saved beside the .ckpt.

    python examples/lightning_module.py DEVICE_FOLDER OUTPUT_FOLDER [STEPS] [CHECKPOINT.ckpt]

Lightning keeps the optimizer's small state dict in the .ckpt file; two hooks add the state itself.
"""

import os
import sys

import lightning
import torch

import smartinf


class Shift(lightning.LightningModule):
    def __init__(self, device):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
        self.device_folder = device
        self.saved = None

    def training_step(self, batch, _):
        # Made from the step's number, since a plain DataLoader begins anew when training is resumed.
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(self.global_step))
        loss = torch.nn.functional.mse_loss(self.model(x), x.roll(1, dims=1))
        self.print(f"step {self.global_step} loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self):
        optimizer = smartinf.AdamW(self.named_parameters(), lr=3e-3, devices=[self.device_folder])
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint):
        folder = os.path.join(self.trainer.default_root_dir, f"smartinf-{self.global_step}")
        self.optimizers(use_pl_optimizer=False).save_checkpoint(folder, replace=True)
        checkpoint["smartinf"] = folder

    def on_load_checkpoint(self, checkpoint):
        self.saved = checkpoint["smartinf"]

    def on_train_start(self):
        if self.saved is not None:
            self.optimizers(use_pl_optimizer=False).load_checkpoint(self.saved)


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=int(sys.argv[3]) if len(sys.argv) > 3 else 20,
        default_root_dir=sys.argv[2],
        gradient_clip_val=1.0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    resume = sys.argv[4] if len(sys.argv) > 4 else None
    trainer.fit(Shift(sys.argv[1]), torch.utils.data.DataLoader(range(1000)), ckpt_path=resume)
    trainer.save_checkpoint(os.path.join(sys.argv[2], "last.ckpt"))
