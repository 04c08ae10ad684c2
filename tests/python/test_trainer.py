"""The real Trainer, Accelerate and peft with our optimizer."""

import pathlib
import shutil

import pytest
import torch

import smartinf

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import smartinf.hf  # noqa: E402 (needs transformers)

VOCABULARY = 128  # bytes of English text
STEPS = 12
# Losses of two runs that differ in rounding only part slowly.
BAND = 1e-4


class Text(torch.utils.data.Dataset):
    """Windows of a real text, as bytes: this file."""

    def __init__(self):
        text = pathlib.Path(__file__).read_bytes()
        self.tokens = torch.tensor([min(byte, VOCABULARY - 1) for byte in text])

    def __len__(self):
        return 64

    def __getitem__(self, i):
        window = self.tokens[i * 16 : i * 16 + 32]
        return {"input_ids": window, "labels": window}


class Synthetic(Text):
    def __getitem__(self, i):
        window = (torch.arange(32) * (i % 7 + 1) + i) % VOCABULARY
        return {"input_ids": window, "labels": window}


def llama():
    torch.manual_seed(5)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def bert():
    torch.manual_seed(5)
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def lora():
    peft = pytest.importorskip("peft")
    model = llama()
    torch.manual_seed(6)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )


def trainer(model, folder, dataset=None, steps=STEPS, callbacks=(), **kwargs):
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=5e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        save_steps=4,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=11,
    )
    return transformers.Trainer(
        model=model, args=args, train_dataset=dataset or Text(), callbacks=list(callbacks), **kwargs
    )


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def ours(device):
    return {"optimizer_cls_and_kwargs": (smartinf.AdamW, {"lr": 5e-3, "devices": [str(device)]})}


@pytest.mark.parametrize(
    ("build", "dataset"), [(llama, Text), (bert, Synthetic), (lora, Text)], ids=["llama", "bert", "lora"]
)
def test_same_losses_as_torchs_adamw_and_after_resume(build, dataset, tmp_path):
    reference = trainer(build(), tmp_path / "reference", dataset())
    reference.train()
    expected = losses(reference)
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]

    callback = smartinf_callback()
    whole = trainer(build(), tmp_path / "whole", dataset(), callbacks=[callback], **ours(tmp_path / "d0"))
    whole.train()
    assert losses(whole) == pytest.approx(expected, rel=BAND)

    # Stopped after step 9, the devices are ahead of the last checkpoint (8) when it is resumed.
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 9

    first = trainer(
        build(), tmp_path / "run", dataset(), callbacks=[smartinf_callback(), Stop()], **ours(tmp_path / "d1")
    )
    first.train()
    smartinf.hf.unwrap(first.optimizer).close()
    folders = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert len(folders) == 1  # save_total_limit
    moved = tmp_path / "elsewhere" / folders[0]
    shutil.move(tmp_path / "run" / folders[0], moved)
    again = trainer(
        build(),
        tmp_path / "run2",
        dataset(),
        callbacks=[smartinf_callback(resume_from=str(moved))],
        **ours(tmp_path / "d1"),
    )
    again.train(resume_from_checkpoint=str(moved))
    resumed_at = int(folders[0].split("-")[1])
    # The same bits went on, so the losses are the very same.
    assert losses(again)[resumed_at:] == losses(whole)[resumed_at:]


def smartinf_callback(**kwargs):
    import smartinf.hf

    return smartinf.hf.CheckpointCallback(**kwargs)


def test_optimizers_argument(tmp_path):
    model = llama()
    optimizer = smartinf.AdamW(model.named_parameters(), lr=5e-3, devices=[str(tmp_path / "d")])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    run = trainer(model, tmp_path / "run", optimizers=(optimizer, schedule), steps=3)
    run.train()
    assert optimizer._lineage.updates == 3
    assert optimizer.param_groups[0]["lr"] < 5e-3


def test_a_checkpoint_without_the_callback_is_explained(tmp_path):
    run = trainer(llama(), tmp_path / "run", steps=5, **ours(tmp_path / "d"))
    run.train()
    (folder,) = (tmp_path / "run").glob("checkpoint-*")
    # Other devices than those the state is on, and no copy of it in the folder.
    again = trainer(
        llama(), tmp_path / "run", steps=8, callbacks=[smartinf_callback()], **ours(tmp_path / "other")
    )
    with pytest.raises(smartinf.MismatchError, match="CheckpointCallback"):
        again.train(resume_from_checkpoint=str(folder))


def test_accelerate(tmp_path):
    import accelerate

    import smartinf.hf

    def batches():
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(
                torch.randn(24, 10, generator=torch.Generator().manual_seed(1))
            ),
            batch_size=4,
        )

    def start(device):
        torch.manual_seed(2)
        model = torch.nn.Linear(10, 10)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = smartinf.AdamW(model.parameters(), lr=1e-2, devices=[str(device)])
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
        smartinf.hf.register(accelerator, optimizer)
        return accelerator, model, optimizer, loader

    def train(accelerator, model, optimizer, loader):
        for (x,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return model.weight.detach().clone()

    accelerator, model, optimizer, loader = start(tmp_path / "a")
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(tmp_path / "state"))
    expected = train(accelerator, model, optimizer, loader)
    accelerator, model, optimizer, loader = start(tmp_path / "b")
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(train(accelerator, model, optimizer, loader), expected)
