"""TRL's trainers with smartinf.hf.attach(): the losses of torch's AdamW, of all weights and of adapters."""

import pytest
import torch
from nightly import nightly

import smartinf

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
import datasets  # noqa: E402 (TRL has it)
import peft  # noqa: E402 (the same)
import tokenizers  # noqa: E402 (transformers has it)

import smartinf.hf  # noqa: E402 (needs transformers)

torch.set_num_threads(1)
VOCABULARY = 4000  # the head's weights are not those that a device updates together with the last layer's
WORDS = ["<pad>", "<eos>", *map(str, range(VOCABULARY - 2))]
ROWS = range(8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A small Llama with a head for words, and one with a head for a number: trainers look for a reference model in a
    folder."""
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1,
    )  # fmt: skip
    made = {}
    for kind in (transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification):
        torch.manual_seed(5)
        made[kind] = tmp_path_factory.mktemp("model")
        kind(config).save_pretrained(made[kind])
        tokenizer.save_pretrained(made[kind])
    return made


def data(name):
    if name == "SFT":
        return [{"text": " ".join(str(n + k) for k in range(8))} for n in ROWS]
    if name in ("DPO", "Reward"):
        return [{"prompt": f"{n} {n + 1}", "chosen": f" {n + 2} {n + 3}", "rejected": f" {n} {n}"} for n in ROWS]
    if name == "KTO":
        return [{"prompt": f"{n}", "completion": f" {n + 1} {n + 2}", "label": n % 2 == 0} for n in ROWS]
    return [{"prompt": f"{n} {n + 1}"} for n in ROWS]


def trainer(name, folders, out, lora, passes):
    kind = transformers.LlamaForSequenceClassification if name == "Reward" else transformers.LlamaForCausalLM
    options = {"GRPO": {"num_generations": 2, "max_completion_length": 4}, "Distillation": {"max_completion_length": 4}}
    options["RLOO"] = options["GRPO"]
    args = getattr(trl, f"{name}Config")(
        str(out), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=passes, learning_rate=5e-3,
        weight_decay=0.1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
        gradient_checkpointing=False, **options.get(name, {}),
    )  # fmt: skip
    given = {"args": args, "train_dataset": datasets.Dataset.from_list(data(name))}
    given["processing_class"] = transformers.AutoTokenizer.from_pretrained(folders[kind])
    if name in ("GRPO", "RLOO"):
        # Two completions hardly ever have the same.
        given["reward_funcs"] = lambda completions, **_: [sum(map(ord, text)) % 97 / 97 for text in completions]
    if name == "Distillation":
        given["teacher_model"] = kind.from_pretrained(folders[kind])
        with torch.no_grad():
            given["teacher_model"].lm_head.weight.mul_(2.0)
    if lora:
        task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        given["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type=task)
    return getattr(trl, f"{name}Trainer")(model=kind.from_pretrained(folders[kind]), **given)


# Each change: every trainer once, and each way with several.
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *(("SFT", False), ("KTO", False), ("GRPO", False), ("DPO", True), ("Reward", True), ("Distillation", True)),
        *(nightly("SFT", True), nightly("KTO", True), nightly("GRPO", True), nightly("DPO", False)),
        *(nightly("Reward", False), nightly("Distillation", False), nightly("RLOO", False), ("RLOO", True)),
    ],
)
def test_losses_are_those_of_torchs_adamw(name, lora, folders, tmp_path):
    passes = 2 if lora else 1
    options = {"release_gradients": True, "overlap": "early" if lora else "late"}

    def run(attached):
        made = trainer(name, folders, tmp_path / "out", lora, passes)
        if attached:
            smartinf.hf.attach(made, devices=[str(tmp_path / "device")], **options)
        made.train()
        if attached:
            assert type(smartinf.hf.unwrap(made.optimizer)) is smartinf.AdamW
        return [entry[key] for entry in made.state.log_history if "loss" in entry for key in ("loss", "grad_norm")]

    expected = run(False)
    assert len(expected) == 4
    assert any(expected[1::2])  # there are gradients
    assert run(True) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_overlap_waits_for_the_head(folders, tmp_path):
    """These losses multiply by its weight themselves. The drive is so slow that nobody has new weights by chance."""
    released = {"release_gradients": True}
    overlaps = [{"overlap": "late"}, *(released | {"overlap": overlap} for overlap in ("late", "early", "auto"))]
    runs = []
    for i, options in enumerate([None, *overlaps]):
        made = trainer("DPO", folders, tmp_path / "out", False, 1)
        if options is not None:
            device = {"path": str(tmp_path / f"device{i}"), "bandwidth": 2e7}
            smartinf.hf.attach(made, devices=[device], **options)
        made.train()
        runs.append([entry["loss"] for entry in made.state.log_history if "loss" in entry])
    assert len(runs[0]) == 2
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["SFT", "GRPO", nightly("RLOO")])
def test_a_streamed_model_under_streamed_trainer(name, folders, tmp_path, monkeypatch):
    """Completions of a batch are made when its turn comes, by trainers that count their batches."""

    def run(streamed):
        made = trainer(name, folders, tmp_path / "out", False, 2)
        if streamed:
            smartinf.stream(made.model, [str(tmp_path / "device")], memory_budget="128MiB", keep=0)
            smartinf.hf.attach(made)
        made.train()
        return [entry[key] for entry in made.state.log_history if "loss" in entry for key in ("loss", "grad_norm")]

    expected = run(False)
    plain = getattr(trl, f"{name}Trainer")
    monkeypatch.setattr(trl, f"{name}Trainer", type(plain.__name__, (smartinf.hf.StreamedTrainer, plain), {}))
    assert run(True) == pytest.approx(expected, rel=1e-4, abs=1e-5)
