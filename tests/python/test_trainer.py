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


def test_a_checkpoint_without_its_state_is_explained(tmp_path):
    run = trainer(llama(), tmp_path / "run", steps=8, changes={"save_total_limit": 2}, **ours(tmp_path / "d"))
    run.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-8" / "smartinf")
    # Other devices than those the state is on, and no copy of it in the folder.
    again = trainer(
        llama(), tmp_path / "run", steps=12, callbacks=[smartinf_callback()], **ours(tmp_path / "other")
    )
    with pytest.raises(smartinf.MismatchError, match=r"step 8 .* without the state.*in .*run: checkpoint-4\).*resume_from"):
        again.train(resume_from_checkpoint=True)


class Asks(transformers.TrainerCallback):
    """Asks for a checkpoint in the fourth step, by another way than Trainer's schedule, and ends the run."""

    def __init__(self, way):
        self.way = way

    def on_step_begin(self, args, state, control, **kwargs):
        if self.way == "SIGTERM" and state.global_step == 3:
            (jit,) = (c for c in self.trainer.callback_handler.callbacks if hasattr(c, "jit_manager"))
            jit.jit_manager.is_checkpoint_requested = True  # as some seconds after the signal

    def on_substep_end(self, args, state, control, **kwargs):
        if self.way == "between passes" and state.global_step == 3:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
            control.should_training_stop = True


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("SIGTERM", {}),
        ("SIGTERM", {"release_gradients": True, "overlap": "early"}),
        ("between passes", {"release_gradients": True}),
    ],
    ids=["sigterm", "sigterm-early", "between-passes"],
)
def test_a_checkpoint_has_the_state_whoever_asks_for_it(way, options, tmp_path):
    def run(folder, device, asks=None, **resumed):
        changes = {"save_steps": 100, "gradient_accumulation_steps": 2, "enable_jit_checkpoint": asks is not None}
        made = trainer(llama(), tmp_path / folder, steps=6, changes=changes, callbacks=filter(None, [asks]))
        if asks is not None:
            asks.trainer = made
        smartinf.hf.attach(made, devices=[str(tmp_path / device)], **options).train(**resumed)
        smartinf.hf.unwrap(made.optimizer).close()
        return losses(made)

    whole = run("whole", "d0")
    run("run", "d1", Asks(way))
    (folder,) = (tmp_path / "run").iterdir()
    # After the last backward of a released step neither this step nor the one before can be saved: it is made first.
    assert folder.name == ("checkpoint-4" if "overlap" in options else "checkpoint-3")
    moved = shutil.move(folder, tmp_path / folder.name)
    for device in ("d1", "d2"):
        assert run("again", device, resume_from_checkpoint=str(moved))[-2:] == whole[-2:]


@pytest.mark.parametrize("overlap", [None, "early"])
def test_a_backward_that_broke_off_is_forgotten(overlap, tmp_path):
    """Memory runs out in the third of four passes, and Trainer begins anew with a smaller batch."""

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            passes.append(gradient.shape[0])
            if len(passes) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return gradient

    def run(device):
        passes.clear()
        model = llama()
        model.model.layers[1].register_forward_hook(lambda module, given, out: Full.apply(out))
        changes = {"gradient_accumulation_steps": 4, "auto_find_batch_size": True, "save_strategy": "no"}
        made = trainer(model, tmp_path / "run", steps=3, changes=changes)
        if device is not None:
            smartinf.hf.attach(made, devices=[str(device)], release_gradients=True, overlap=overlap)
        made.train()
        assert passes[2] > passes[3]
        return losses(made)

    passes = []
    expected = run(None)
    assert run(tmp_path / "d") == pytest.approx(expected, rel=BAND)


def test_each_train_with_model_init_is_a_run_of_its_own(tmp_path):
    def twice(device, **options):
        args = arguments(tmp_path / "run", 2, save_strategy="no")
        made = transformers.Trainer(model_init=llama, args=args, train_dataset=Text())
        if device is not None:
            smartinf.hf.attach(made, devices=[str(device)], **options)
        seen = []
        for _ in range(2):
            made.train()
            seen += losses(made)[-2:]
        return seen

    expected = twice(None)
    assert expected[:2] == expected[2:]
    assert twice(tmp_path / "d", resume=False, release_gradients=True, overlap="early") == pytest.approx(expected, rel=BAND)
    with pytest.raises(smartinf.UsageError, match="resume=False"):
        twice(tmp_path / "d1", resume=True)
    with pytest.raises(smartinf.UsageError, match="resume=False"):
        twice(tmp_path / "d2")


def test_attach(tmp_path):
    class Own(transformers.Trainer):
        """Takes no more than most of TRL's trainers do."""

        def __init__(self, model, args, train_dataset):
            super().__init__(model, args, train_dataset=train_dataset)

    device = str(tmp_path / "d")
    made = Own(llama(), arguments(tmp_path / "run", 2), Text())
    for _ in range(2):  # the second time with what is meant
        assert smartinf.hf.attach(made, devices=[device], state_format="bf16") is made
    made.train()
    optimizer = smartinf.hf.unwrap(made.optimizer)
    assert type(optimizer) is smartinf.AdamW
    made.train()  # goes on with it
    assert optimizer._session.lineage.updates == 4
    with pytest.raises(smartinf.UsageError, match="has an optimizer already .*attach before train"):
        smartinf.hf.attach(made, devices=[device])
    optimizer.close()
    smartinf.hf.attach(made, devices=[device], state_format="bf16", resume=True).train()
    assert smartinf.hf.unwrap(made.optimizer)._session.lineage.updates == 6

    for given in ({"optimizers": (torch.optim.SGD(llama().parameters(), lr=1.0), None)}, {
        "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0})
    }):  # fmt: skip
        with pytest.raises(smartinf.UsageError, match="SGD"):
            smartinf.hf.attach(trainer(llama(), tmp_path / "run", **given), devices=[device])

    class Stubborn(transformers.Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

    stubborn = smartinf.hf.attach(Stubborn(llama(), arguments(tmp_path / "run", 1), train_dataset=Text()), devices=[device])
    with pytest.raises(smartinf.UsageError, match="has SGD.*makes its optimizer itself"):
        stubborn.train()


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

    with pytest.raises(smartinf.UsageError, match=r"learning_rate=5e-05 there, lr=0.001 here.*hf.attach"):
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
