"""The real Trainer, Accelerate and peft with our optimizer."""

import pathlib
import shutil

import pytest
import torch

import smartinf

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import smartinf.hf  # noqa: E402 (needs transformers)

torch.set_num_threads(1)  # models so small gain nothing from more, and wait for them
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


def arguments(folder, steps=STEPS, **changes):
    options = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 4,
        "save_total_limit": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **(options | changes))


def trainer(model, folder, dataset=None, steps=STEPS, callbacks=(), changes=None, **kwargs):
    return transformers.Trainer(
        model=model,
        args=arguments(folder, steps, **(changes or {})),
        train_dataset=dataset or Text(),
        callbacks=list(callbacks),
        **kwargs,
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
    assert optimizer._session.lineage.updates == 3
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


def test_a_checkpoint_goes_back_to_torch(tmp_path):
    """Trained with ours to step 4, converted, trained on with torch's AdamW: torch's own losses."""
    from smartinf.__main__ import main

    reference = trainer(llama(), tmp_path / "reference", steps=6)
    reference.train()
    first = trainer(
        llama(), tmp_path / "run", steps=6, callbacks=[smartinf_callback()], **ours(tmp_path / "d")
    )
    first.args.save_total_limit = 2
    first.train()
    smartinf.hf.unwrap(first.optimizer).close()
    shutil.rmtree(tmp_path / "d")  # neither devices nor model are needed
    folder = tmp_path / "run" / "checkpoint-4"
    assert main(["torch-state", str(folder), "--out", str(folder / "optimizer.pt")]) == 0
    again = trainer(llama(), tmp_path / "run", steps=6)
    again.train(resume_from_checkpoint=str(folder))
    assert losses(again) == pytest.approx(losses(reference), rel=BAND)


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


@pytest.mark.parametrize("build", [llama, lora])
def test_hf_optimizer_is_what_training_arguments_say(build, tmp_path):
    args = arguments(tmp_path / "run", learning_rate=3e-4, adam_beta2=0.95, adam_epsilon=1e-6)
    model = build()
    theirs = transformers.Trainer(model=model, args=args, train_dataset=Text()).create_optimizer()
    run = transformers.Trainer(
        model=model,
        args=args,
        train_dataset=Text(),
        **smartinf.hf.optimizer(args, devices=[str(tmp_path / "d")], memory_budget="256MiB"),
    )
    made = run.create_optimizer()
    assert type(made) is smartinf.AdamW
    assert made.defaults["betas"] == (0.9, 0.95)
    assert made.max_grad_norm is None  # Trainer clips whole gradients itself
    assert len(made.param_groups) == len(theirs.param_groups) == 2
    for group, expected in zip(made.param_groups, theirs.param_groups, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in expected["params"]]
        for key in ("lr", "betas", "eps", "weight_decay"):
            assert group[key] == expected[key], key
    names = {name for name, param in model.named_parameters() if param.requires_grad}
    assert set(made._session.layout.names) == names
    assert sum(isinstance(c, smartinf.hf.CheckpointCallback) for c in run.callback_handler.callbacks) == 1


@pytest.mark.parametrize(
    ("build", "release", "reentrant", "overlaps"),
    [
        (llama, False, None, ["late"]),
        (llama, True, True, ["late", "early"]),
        (llama, True, False, ["early", "auto"]),
        (lora, True, None, ["late", "early"]),
    ],
    ids=["held", "reentrant", "non-reentrant", "lora"],
)
def test_overlapped_updates_have_the_same_losses(build, release, reentrant, overlaps, tmp_path):
    """Accumulated, computed again in backward, evaluated in the middle, saved and resumed."""
    changes = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.9}
    changes |= {"save_total_limit": 2, "logging_steps": 1}
    if reentrant is not None:
        changes |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}

    def trained(overlap, device, steps=6, **resumed):
        args = arguments(tmp_path / f"run{overlap}", steps, **changes)
        made = transformers.Trainer(
            model=build(),
            args=args,
            train_dataset=Text(),
            eval_dataset=Text(),
            **smartinf.hf.optimizer(
                args, devices=[str(tmp_path / device)], overlap=overlap, release_gradients=release
            ),
        )
        made.train(**resumed)
        return made

    def seen(made):
        log = made.state.log_history
        return [[entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm", "eval_loss")]

    expected = trained(None, "d")
    for overlap in overlaps:
        run = trained(overlap, f"d{overlap}")
        assert seen(run) == seen(expected)
        weights = run.model.state_dict()
        for name, value in expected.model.state_dict().items():
            assert torch.equal(weights[name], value), name
        if build is llama:
            kept = type(run.model).from_pretrained(tmp_path / f"run{overlap}" / "checkpoint-6").state_dict()
            for name, value in weights.items():
                assert torch.equal(kept[name], value), name
        if overlap != "auto":
            assert smartinf.hf.unwrap(run.optimizer).overlap == overlap
        smartinf.hf.unwrap(run.optimizer).close()
    again = trained(
        overlaps[-1], "other", resume_from_checkpoint=str(tmp_path / f"run{overlaps[-1]}" / "checkpoint-4")
    )
    assert seen(again) == seen(expected)


def test_hf_optimizer_asks_a_subclass_what_decays(tmp_path):
    class Own(transformers.Trainer):
        def get_decay_parameter_names(self, model):
            return ["lm_head.weight"]

    args = arguments(tmp_path / "run")
    with Own(
        model=llama(), args=args, **smartinf.hf.optimizer(args, devices=[str(tmp_path / "d")])
    ).create_optimizer() as made:
        assert made.param_groups[0]["param_names"] == ["lm_head.weight"]


def test_hf_optimizer_refuses_what_training_arguments_decide(tmp_path):
    args = arguments(tmp_path)
    for option, field in (
        ({"lr": 1e-4}, "learning_rate"),
        ({"betas": (0.9, 0.95)}, "adam_beta1"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"accumulation_steps": 4}, "gradient_accumulation_steps"),
    ):
        with pytest.raises(smartinf.UsageError, match=f"{field}.* in TrainingArguments"):
            smartinf.hf.optimizer(args, devices=[str(tmp_path / "d")], **option)
    with pytest.raises(smartinf.UsageError, match="adafactor"):
        smartinf.hf.optimizer(arguments(tmp_path, optim="adafactor"), devices=[str(tmp_path / "d")])
    # Lion's betas are no Adam's.
    smartinf.hf.optimizer(
        args, devices=[str(tmp_path / "d")], optimizer_class=smartinf.Lion, betas=(0.95, 0.98)
    )


class Reporter(transformers.TrainerCallback):
    """Stands where those of report_to stand."""

    norms = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            Reporter.norms.append(logs["grad_norm"])


def test_released_gradients_are_clipped_summed_and_logged_as_by_trainer(tmp_path, monkeypatch):
    changes = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    reference = trainer(llama(), tmp_path / "reference", steps=4, changes=changes)
    reference.train()
    monkeypatch.setattr(transformers.trainer, "get_reporting_integration_callbacks", lambda _: [Reporter])
    Reporter.norms.clear()
    args = arguments(tmp_path / "run", 4, **changes)
    run = transformers.Trainer(
        model=llama(),
        args=args,
        train_dataset=Text(),
        **smartinf.hf.optimizer(args, devices=[str(tmp_path / "d")], release_gradients=True),
    )
    run.train()
    assert losses(run) == pytest.approx(losses(reference), rel=BAND)

    def norms(trained):
        return [entry["grad_norm"] for entry in trained.state.log_history if "grad_norm" in entry]

    assert min(norms(reference)) > 0.5  # all are clipped
    assert norms(run) == pytest.approx(norms(reference), rel=1e-3)
    assert Reporter.norms == norms(run)


def test_training_arguments_are_not_ignored_in_silence(tmp_path, caplog):
    """Trainer hands optimizer_cls_and_kwargs nothing of them."""
    device = str(tmp_path / "d")

    def train(kwargs, **changes):
        trainer(
            llama(), tmp_path / "run", steps=1, changes=changes, optimizer_cls_and_kwargs=(smartinf.AdamW, kwargs)
        ).train()

    with pytest.raises(smartinf.UsageError, match=r"learning_rate=5e-05 there, lr=0.001 here.*hf.optimizer"):
        train({"devices": [device]}, learning_rate=5e-5)
    with pytest.raises(smartinf.UsageError, match=r"adam_beta2=\(0.9, 0.95\) there, betas=\(0.9, 0.999\) here"):
        train({"devices": [device], "lr": 5e-3}, adam_beta2=0.95)
    released = {"devices": [device], "lr": 5e-3, "release_gradients": True}
    with pytest.raises(smartinf.UsageError, match="max_grad_norm=1.0 in TrainingArguments, max_grad_norm=None"):
        train(released)
    with pytest.raises(smartinf.UsageError, match="gradient_accumulation_steps=2"):
        train(released | {"max_grad_norm": 1.0}, gradient_accumulation_steps=2)
    with pytest.raises(smartinf.UsageError, match="clipped twice"):
        train({"devices": [device], "lr": 5e-3, "max_grad_norm": 2.0})
    assert not (tmp_path / "d").exists()  # all before anything was made

    model = llama()
    made = smartinf.AdamW(model.parameters(), devices=[device])
    trainer(model, tmp_path / "run", steps=1, optimizers=(made, None)).train()
    assert "learning_rate=0.005 there, lr=0.001 here" in caplog.text


def test_a_second_trainer_is_told_who_holds_the_devices(tmp_path):
    def make():
        args = arguments(tmp_path / "run", 1)
        return transformers.Trainer(
            model=llama(),
            args=args,
            train_dataset=Text(),
            **smartinf.hf.optimizer(args, devices=[str(tmp_path / "d")], resume=True),
        )

    first = make()
    first.train()
    with pytest.raises(smartinf.DeviceError, match="another optimizer of this process.*hf.unwrap"):
        make().train()
    smartinf.hf.unwrap(first.optimizer).close()
    make().train()
