"""Models that are streamed unit by unit, beside the same models in memory."""

import copy
import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from nightly import nightly

import smartinf
from smartinf import _core, layer_major, layer_window, streamed_model, streaming, units
from smartinf.absent_parameter import Absent

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
import smartinf.hf  # noqa: E402 (needs transformers)

torch.set_num_threads(1)
VOCABULARY = 96
# Large enough for several of the devices' blocks, which are of 65536 elements.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Modules as small as a test's are streamed, too, but for norms."""
    monkeypatch.setattr(units, "_KEPT_BYTES", 1 << 10)
    monkeypatch.setattr(streaming, "_ENGINE_BYTES_MIN", 24 << 20)
    monkeypatch.setattr(streaming, "_STRIPE_BYTES", (4 << 16,))  # a slot is not the whole model


def llama(**more):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=2, **{"vocab_size": VOCABULARY} | SIZES | more)
    )


def tied_llama():
    return llama(tie_word_embeddings=True)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0,
            attn_pdrop=0,
        )
    )  # fmt: skip


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES
        )
    )


def qwen3():
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=32, **SIZES)
    )


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, num_local_experts=4, **SIZES)
    )


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES
        )
    )


def t5():
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip


def whisper():
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=16, max_source_positions=20,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


def batch_for(model, seed):
    generator = torch.Generator().manual_seed(seed)
    if model.config.model_type == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=model.dtype)
        return {"pixel_values": pixels, "labels": torch.randint(5, (2,), generator=generator)}
    tokens = torch.randint(VOCABULARY, (2, 12), generator=generator)
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(2, 16, 40, generator=generator, dtype=model.dtype), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def made(make, dtype=torch.float32):
    torch.manual_seed(5)
    return make().to(dtype).train()


def steps_of(model, optimizer, steps=3, first=0):
    """Losses and gradient norms."""
    seen = []
    for step in range(first, first + steps):
        loss = model(**batch_for(model, step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), optimizer.grad_norm))
    return seen


def adamw(model, **options):
    return smartinf.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0, subgroup_elements=65536, **options)


def plain_run(make, device, dtype=torch.float32, checkpointing=None, steps=3):
    model = made(make, dtype)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    optimizer = adamw(model, devices=[device], release_gradients=True)
    seen = steps_of(model, optimizer, steps)
    return seen, model, optimizer


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


MODELS = [tied_llama, gpt2, mixtral, vit, t5, *map(nightly, (llama, bert, qwen3, whisper))]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_streamed_model_trains_to_the_bits_of_one_in_memory(make, tmp_path):
    expected, plain, _ = plain_run(make, str(tmp_path / "plain"))
    model = smartinf.stream(made(make), [str(tmp_path / "a"), str(tmp_path / "b")], memory_budget="64MiB", keep=0)
    assert type(model).__name__ == type(plain).__name__
    assert isinstance(model, type(plain))
    assert any(isinstance(p, Absent) for p in model.parameters())
    optimizer = adamw(model)
    assert steps_of(model, optimizer) == expected
    same(weights_of(model), weights_of(plain))


@pytest.mark.parametrize(
    ("make", "reentrant"),
    [(llama, False), (gpt2, True), (mixtral, False), nightly(llama, True), nightly(gpt2, False), nightly(mixtral, True)],
)
def test_layers_that_are_computed_again_have_their_weights(make, reentrant, tmp_path):
    expected, plain, _ = plain_run(make, str(tmp_path / "plain"), checkpointing=reentrant)
    model = smartinf.stream(made(make), str(tmp_path / "a"), memory_budget="64MiB", keep=0)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert steps_of(model, adamw(model)) == expected
    same(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_under_torchs_own_checkpoint_has_its_weights(reentrant, tmp_path):
    def run(model, optimizer):
        seen = []
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).requires_grad_()
            for block in model:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant)
            x.square().sum().backward()
            optimizer.step()
            seen.append(optimizer.grad_norm)
        return seen

    def make():
        torch.manual_seed(1)
        return torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(3)])

    plain = make()
    expected = run(plain, adamw(plain, devices=[str(tmp_path / "plain")], release_gradients=True))
    model = smartinf.stream(make(), str(tmp_path / "a"), memory_budget="64MiB", keep=0, layers=[""])
    assert run(model, adamw(model)) == expected


def test_bfloat16_and_kept_units(tmp_path):
    expected, plain, _ = plain_run(llama, str(tmp_path / "plain"), torch.bfloat16)
    for keep, streamed in ((0, 5), (600_000, 3), ("1GiB", 1)):
        model = smartinf.stream(
            made(llama, torch.bfloat16), str(tmp_path / f"a{keep}"), memory_budget="64MiB", keep=keep
        )
        assert len(streamed_model.of(model.parameters()).stream.units) == streamed
        assert steps_of(model, adamw(model)) == expected
        same(weights_of(model), weights_of(plain))


@pytest.mark.parametrize(
    ("make", "files"),
    [
        *((llama, "shards"), (mixtral, "pickled"), (gpt2, "pickled"), (t5, "shards"), nightly(llama, "pickled")),
        *(nightly(mixtral, "shards"), nightly(gpt2, "shards"), nightly(t5, "pickled"), nightly(bert, "shards")),
        *(nightly(bert, "pickled"), nightly(whisper, "shards"), nightly(whisper, "pickled")),
    ],
)
def test_from_pretrained_reads_a_folder_onto_the_devices(make, files, tmp_path):
    """A pickled model has each of its tied weights under two names."""
    folder, auto_class = tmp_path / "folder", type(made(make))
    if files == "shards":
        made(make).save_pretrained(folder, max_shard_size="400KB")
    else:
        made(make).config.save_pretrained(folder)
        torch.save(made(make).state_dict(), folder / "pytorch_model.bin")
    plain = auto_class.from_pretrained(folder)
    model = smartinf.from_pretrained(folder, devices=tmp_path / "a", memory_budget="64MiB", keep=0, auto_class=auto_class)
    assert type(model).__name__ == type(plain).__name__
    assert not model.training
    same(weights_of(model), weights_of(plain))
    model.save_pretrained(tmp_path / "saved")
    same(weights_of(auto_class.from_pretrained(tmp_path / "saved")), weights_of(plain))
    batch = batch_for(plain, 0)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, plain(**batch).logits)


def test_a_folder_of_another_kind_of_model_names_its_class(tmp_path):
    made(t5).save_pretrained(tmp_path / "folder")
    with pytest.raises(smartinf.UsageError, match="auto_class=transformers.T5ForConditionalGeneration"):
        smartinf.from_pretrained(tmp_path / "folder", devices=tmp_path / "a")


def test_tied_weights_that_the_files_hold_twice_with_other_values_are_refused(tmp_path):
    model = made(tied_llama)
    model.config.save_pretrained(tmp_path / "folder")
    torch.save(dict(model.state_dict(), **{"lm_head.weight": model.lm_head.weight + 1}), tmp_path / "folder/pytorch_model.bin")
    with pytest.raises(smartinf.UsageError, match="config.json lm_head.weight would be tied .* tie_word_embeddings to false"):
        smartinf.from_pretrained(tmp_path / "folder", devices=tmp_path / "a", memory_budget="64MiB", keep=0)
    assert not (tmp_path / "a" / "weights").exists()


@pytest.mark.parametrize("auto_class", [None, transformers.LlamaForCausalLM])
def test_from_pretrained_takes_the_types_that_transformers_takes(auto_class, tmp_path, monkeypatch):
    """The embedding has more than 1 MiB in float32 and less in bfloat16: it is a unit of its own by its type."""
    monkeypatch.setattr("smartinf.units._KEPT_BYTES", 1 << 20)
    config = transformers.LlamaConfig(
        vocab_size=6000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "folder")
    maker = auto_class or transformers.AutoModelForCausalLM
    for i, given in enumerate([{}, {"dtype": "auto"}, {"dtype": "bfloat16"}, {"dtype": torch.float32}, {"torch_dtype": "auto"}]):
        plain = maker.from_pretrained(tmp_path / "folder", **given)
        model = smartinf.from_pretrained(
            tmp_path / "folder", devices=tmp_path / str(i), memory_budget="128MiB", keep=0, auto_class=auto_class, **given
        )
        assert model.dtype == plain.dtype
        assert model.config.dtype == plain.config.dtype
        same(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("files", ["one", "shards", "pickled"])
def test_from_pretrained_takes_the_type_of_the_files_where_the_folder_names_none(files, tmp_path):
    folder = tmp_path / "folder"
    made(llama).to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB" if files == "shards" else "1GB")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    if files == "pickled":
        torch.save(dict(weights_of(transformers.AutoModelForCausalLM.from_pretrained(folder))), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    for i, given in enumerate([{}, {"dtype": "auto"}, {"dtype": None}, {"dtype": torch.float32}]):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, **given)
        model = smartinf.from_pretrained(folder, devices=tmp_path / str(i), memory_budget="64MiB", keep=0, **given)
        assert model.dtype == plain.dtype == (torch.float32 if i == 3 else torch.bfloat16)
        assert model.config.dtype == plain.config.dtype
        same(weights_of(model), weights_of(plain))


def test_a_new_head_is_made_and_streamed(tmp_path):
    made(llama).save_pretrained(tmp_path / "folder")
    model = smartinf.from_pretrained(
        tmp_path / "folder", devices=tmp_path / "a", memory_budget="64MiB", keep=0,
        auto_class=transformers.AutoModelForSequenceClassification, num_labels=3,
    )  # fmt: skip
    model.config.pad_token_id = 0
    tokens = torch.randint(VOCABULARY, (2, 12))
    optimizer = adamw(model)
    before = weights_of(model)
    model(input_ids=tokens, labels=torch.tensor([0, 2])).loss.backward()
    optimizer.step()
    assert not torch.equal(before["score.weight"], model.state_dict()["score.weight"])


def test_generate_and_evaluate_between_steps(tmp_path):
    _, plain, _ = plain_run(llama, str(tmp_path / "plain"))
    model = smartinf.stream(made(llama), str(tmp_path / "a"), memory_budget="64MiB", keep=0)
    optimizer = adamw(model)
    steps_of(model, optimizer)
    prompt = torch.tensor([[1, 2, 3, 4]])
    for each in (model, plain):
        each.eval()
    given = [m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, plain)]
    assert torch.equal(*given)
    model.train()
    steps_of(model, optimizer, 1, first=3)


def test_resume_in_the_middle_on_other_devices(tmp_path):
    expected, plain, _ = plain_run(llama, str(tmp_path / "plain"), steps=4)
    model = smartinf.stream(made(llama), str(tmp_path / "a"), memory_budget="64MiB", keep=0)
    optimizer = adamw(model)
    seen = steps_of(model, optimizer, 2)
    optimizer.save_checkpoint(tmp_path / "checkpoint")
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    with pytest.raises(smartinf.UsageError, match="closed"):
        model(**batch_for(model, 0))
    with pytest.raises(smartinf.UsageError, match="discard the state that holds the model's own weights"):
        adamw(model, resume=False)

    again = smartinf.stream(made(llama), [str(tmp_path / "b"), str(tmp_path / "c")], memory_budget="64MiB", keep=0)
    optimizer = adamw(again)
    optimizer.load_state_dict(state)
    optimizer.load_checkpoint(tmp_path / "checkpoint")
    assert seen + steps_of(again, optimizer, 2, first=2) == expected
    same(weights_of(again), weights_of(plain))
    optimizer.close()

    third = smartinf.stream(made(llama), [str(tmp_path / "b"), str(tmp_path / "c")], memory_budget="64MiB", keep=0)
    with adamw(third) as unsaid, pytest.raises(smartinf.UsageError, match="resume"):
        steps_of(third, unsaid, 1)
    adamw(third, resume=True)
    same(weights_of(third), weights_of(plain))


@pytest.mark.parametrize("first", [nightly(0), nightly(600_000), "all", "plain", "before"])
def test_any_budget_resumes_any_state(first, tmp_path, monkeypatch):
    """Processes one after another, each with other bytes of weights that stay in memory. "plain": a model that is not
    streamed, whose gradients all fit in memory. "before": the order that there was until version 0.1, with what stays in
    memory in front."""
    expected, plain, _ = plain_run(llama, str(tmp_path / "plain"), torch.bfloat16, steps=6)
    seen = []
    for step, keep in enumerate((first, 0, 600_000, "all", 300_000, "plain")):
        model = made(llama, torch.bfloat16)
        with monkeypatch.context() as before:
            if keep == "before":
                before.setattr(streamed_model.StreamedModel, "place", lambda self, p: self.stream.index_of(p, -1))
                keep = 600_000
            if keep == "all":
                model = smartinf.stream(model, tmp_path / "a", memory_budget="1GiB")
            elif keep != "plain":
                model = smartinf.stream(model, tmp_path / "a", memory_budget="64MiB", keep=keep)
            optimizer = adamw(model, devices=str(tmp_path / "a"), release_gradients=True, resume=True)
        in_memory = streamed_model.of(model.parameters()).stream if keep != "plain" else None
        assert (in_memory is None) == (keep in ("all", "plain"))
        seen += steps_of(model, optimizer, 1, first=step)
        optimizer.close()
    assert seen == expected
    same(weights_of(model), weights_of(plain))


def test_a_state_of_large_subgroups_is_opened_with_a_small_budget(tmp_path, monkeypatch):
    expected, _, _ = plain_run(llama, str(tmp_path / "plain"), steps=2)
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="256MiB", keep=0)
    with smartinf.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0, subgroup_elements=1 << 19) as optimizer:
        seen = steps_of(model, optimizer, 1)
    monkeypatch.setattr(streaming, "_ENGINE_BYTES_MIN", 10 << 20)
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="16MiB", keep=0)
    optimizer = smartinf.AdamW(model.named_parameters(), lr=1e-2, max_grad_norm=1.0, resume=True)
    assert seen + steps_of(model, optimizer, 1, first=1) == expected


def test_what_another_process_kept_in_memory_takes_none_in_this_one(tmp_path, monkeypatch):
    """Of a state in the order of before the parameters that stay in memory now lie between those that are streamed."""
    with monkeypatch.context() as before:
        before.setattr(streamed_model.StreamedModel, "place", lambda self, p: self.stream.index_of(p, -1))
        adamw(smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep="1GiB")).close()
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    optimizer = adamw(model, resume=True)
    layout = optimizer._session.layout
    kept = [name for name, stays in zip(layout.names, layout.kept, strict=True) if stays]
    assert kept == ["model.norm.weight"] and layout.kept_spans[0][0] > 2 * 65536
    steps_of(model, optimizer, 2)
    assert layout.flat[: layout.kept_spans[0][0] // 2].count_nonzero() == 0  # memory that nobody writes to is not taken


def test_lora_over_a_frozen_streamed_base(tmp_path):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(6)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    plain = adapted(made(llama))
    expected = steps_of(plain, adamw(plain, devices=[tmp_path / "plain"]))
    base = smartinf.stream(made(llama), str(tmp_path / "a"), memory_budget="64MiB", keep=0)
    model = adapted(base)
    optimizer = smartinf.AdamW(
        [p for p in model.named_parameters() if p[1].requires_grad], lr=1e-2, max_grad_norm=1.0
    )
    assert steps_of(model, optimizer) == expected
    model.save_pretrained(tmp_path / "adapters")
    assert sorted(os.listdir(tmp_path / "adapters"))[:2] == ["README.md", "adapter_config.json"]
    with pytest.raises(smartinf.UsageError, match="written"):
        model.merge_and_unload()


ADAPTERS = {
    "dora": (llama, {"target_modules": ["q_proj", "lm_head"], "use_dora": True}),
    "modules_to_save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"]}),
    "experts": (mixtral, {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "first values": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "pissa"}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_other_kinds(kind, tmp_path):
    """What they read of the base, and copy of it. First values that change the base come before it is streamed."""
    peft = pytest.importorskip("peft")
    make, options = ADAPTERS[kind]

    def adapted(model):
        torch.manual_seed(6)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, **{"init_lora_weights": False} | options))
        return model, [p for p in model.named_parameters() if p[1].requires_grad]

    def streamed(model):
        return smartinf.stream(model, tmp_path / "a", memory_budget="64MiB", keep=0)

    plain, trained = adapted(made(make))
    expected = steps_of(plain, smartinf.AdamW(trained, lr=1e-2, max_grad_norm=1.0, devices=tmp_path / "plain"))
    if kind == "first values":
        with pytest.raises(smartinf.UsageError, match="to be written.*adapters that begin with a part of it"):
            adapted(streamed(made(make)))
        model, _ = adapted(made(make))
        model = streamed(model)
        trained = [p for p in model.named_parameters() if p[1].requires_grad]
    else:
        model, trained = adapted(streamed(made(make)))
    assert steps_of(model, smartinf.AdamW(trained, lr=1e-2, max_grad_norm=1.0, devices=tmp_path / "b")) == expected
    with torch.no_grad():
        assert model(**batch_for(model, 9)).loss == plain(**batch_for(plain, 9)).loss


def many_experts():
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=2,
            moe_intermediate_size=256, decoder_sparse_step=1, **SIZES,
        )
    )  # fmt: skip


def test_one_slot_is_as_large_as_the_embedding_and_the_others_as_a_block(tmp_path, caplog):
    """The embedding is the head as well: 19 MiB, of which three slots would not fit."""

    def make():
        return llama(tie_word_embeddings=True, vocab_size=40_000)

    expected, plain, _ = plain_run(make, str(tmp_path / "plain"))
    with caplog.at_level("INFO", "smartinf"):
        model = smartinf.stream(made(make), tmp_path / "a", memory_budget="72MiB", keep=0)
    assert "through slots of 20 MiB" in caplog.text
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = adamw(model)
    assert steps_of(model, optimizer) == expected
    same(weights_of(model), weights_of(plain))
    with pytest.raises(smartinf.UsageError, match="the largest of 19.6 MiB and the others of up to 577 KiB"):
        smartinf.stream(made(make), tmp_path / "b", memory_budget="60MiB")


@pytest.mark.parametrize("sizes", [[60, 10, 10, 10, 1], [10, 10, 10], [60, 10, 10, 10, 60], [5, 60, 10]])
def test_the_plan_keeps_to_the_budget(sizes):
    sizes = [size << 20 for size in sizes]
    seen = set()
    for budget in range(60 << 20, 500 << 20, 3 << 20):
        try:
            plan = streaming._plan(sizes, budget, None, ["a"])
        except smartinf.UsageError:
            continue
        left = budget - plan.engine_bytes - plan.gradient_bytes
        needed = [sum(sizes[:n]) + sum(_core.slot_sizes(sizes[n:], 3)) for n in range(len(sizes))] + [sum(sizes)]
        assert needed[plan.kept_units] <= left
        assert plan.kept_units >= len(sizes) - 1 or needed[plan.kept_units + 1] > left
        seen.add(plan.kept_units)
    assert len(seen) > 1 and len(sizes) in seen


def test_only_experts_that_were_chosen_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_window, "_GAP_ELEMENTS", 1 << 16)  # a file has a block's experts between the others
    plain = made(many_experts)
    plain.save_pretrained(tmp_path / "folder")
    model = smartinf.from_pretrained(tmp_path / "folder", devices=tmp_path / "a", memory_budget="64MiB", keep=0)
    token = torch.tensor([[7]])
    with torch.no_grad():
        assert torch.equal(model(token).logits, plain(token).logits)
    model.train(), plain.train()
    optimizer = adamw(model)
    before = optimizer.traffic()["read"]["state"]
    with torch.no_grad():
        assert torch.equal(model(token).logits, plain(token).logits)
    read = optimizer.traffic()["read"]["state"] - before
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert 0 < read < weights / 2  # 2 of 16 experts, and what is no expert
    expected = steps_of(plain, adamw(plain, devices=[tmp_path / "plain"], release_gradients=True))
    assert steps_of(model, optimizer) == expected
    same(weights_of(model), weights_of(plain))


def test_no_file_of_weights_is_left_behind(tmp_path):
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    assert (tmp_path / "a" / "weights").exists()
    adamw(model)
    assert not (tmp_path / "a" / "weights").exists()
    code = (
        "import sys, torch, smartinf; from transformers import LlamaConfig, LlamaForCausalLM;"
        "model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2));"
        "smartinf.stream(model, sys.argv[1], keep=0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True)
    assert os.listdir(tmp_path / "b") == []


def test_part_of_the_model_is_frozen(tmp_path):
    def make():
        model = made(llama)
        for name, param in model.named_parameters():
            param.requires_grad_("mlp" not in name and "embed" not in name)
        return model

    expected, plain, _ = plain_run(make, str(tmp_path / "plain"))
    model = smartinf.stream(make(), str(tmp_path / "a"), memory_budget="64MiB", keep=0)
    assert steps_of(model, adamw(model)) == expected
    same(weights_of(model), weights_of(plain))


def test_layer_major_has_the_bits_of_batch_by_batch(tmp_path):
    def batches(model, step):
        return [batch_for(model, 10 * step + k) for k in range(3)]

    for make in (llama, mixtral):
        one = smartinf.stream(made(make), tmp_path / f"{make.__name__}-a", memory_budget="64MiB", keep=0)
        by_batch = adamw(one, accumulation_steps=3)
        expected = []
        for step in range(3):
            for batch in batches(one, step):
                loss = one(**batch).loss / 3
                loss.backward()
                expected.append(loss.item())
            by_batch.step()
            expected.append(by_batch.grad_norm)
        model = smartinf.stream(made(make), tmp_path / f"{make.__name__}-b", memory_budget="64MiB", keep=0)
        optimizer = adamw(model, accumulation_steps=3)
        seen = []
        for step in range(3):
            seen += [loss.item() for loss in layer_major.forward_backward(model, batches(model, step))]
            optimizer.step()
            seen.append(optimizer.grad_norm)
        assert seen == expected


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        window = (torch.arange(16) * (i % 7 + 1) + i) % VOCABULARY
        return {"input_ids": window, "labels": window}


@pytest.mark.parametrize("layerwise", [False, True])
def test_trainer_trains_a_streamed_model(layerwise, tmp_path):
    class Streamed(smartinf.hf.StreamedTrainer, transformers.Trainer):
        pass

    def run(model, kind, folder, **options):
        args = transformers.TrainingArguments(
            str(folder), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            report_to=[], save_steps=2, disable_tqdm=True, use_cpu=True, learning_rate=1e-2, seed=3,
            max_grad_norm=1.0,
        )  # fmt: skip
        trainer = kind(model, args, train_dataset=Windows(), **smartinf.hf.optimizer(args, **options))
        trainer.train()
        return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]

    plain = made(llama)
    expected = run(plain, transformers.Trainer, tmp_path / "o1", devices=[tmp_path / "plain"], release_gradients=True)
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    assert run(model, Streamed if layerwise else transformers.Trainer, tmp_path / "o2") == expected
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "o2" / "checkpoint-4")
    same(weights_of(loaded), weights_of(plain))


def test_trainer_resumes_a_streamed_model_on_another_device(tmp_path):
    def trainer(device, **more):
        model = smartinf.stream(made(llama), tmp_path / device, memory_budget="64MiB", keep=0)
        args = transformers.TrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=2, logging_steps=1, report_to=[], save_steps=2,
            disable_tqdm=True, use_cpu=True, learning_rate=1e-2, seed=3, max_steps=4, lr_scheduler_type="constant",
        )  # fmt: skip
        return transformers.Trainer(model, args, train_dataset=Windows(), **smartinf.hf.optimizer(args))

    first = trainer("a")
    first.train()
    losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
    expected = weights_of(first.model)
    again = trainer("b")
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == losses
    same(weights_of(again.model), expected)


def test_a_state_dict_reads_one_tensor_at_a_time(tmp_path):
    model, plain = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0), made(llama)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    same(torch.load(tmp_path / "weights.pt"), plain.state_dict())
    with pytest.raises(smartinf.UsageError, match=r"clone\(\)"):
        model.state_dict()["lm_head.weight"].data_ptr()


def test_what_is_not_possible_is_refused_by_name(tmp_path):
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    weight = model.model.layers[1].mlp.up_proj.weight
    assert "model.layers.1.mlp.up_proj.weight" in repr(weight)
    assert weight.shape == (256, 128)
    with torch.no_grad():
        assert weight.norm() > 0
        for write in (weight.zero_, lambda: weight.copy_(torch.ones(256, 128)), lambda: weight.data.zero_()):
            with pytest.raises(smartinf.UsageError, match=r"model.layers.1.mlp.up_proj.weight .* to be written"):
                write()
        torch._foreach_mul_([torch.ones(1)], 0)
        writes = [
            lambda: torch._foreach_mul_([weight], 0),
            lambda: weight.__setitem__(0, 0),
            lambda: weight.data.__setitem__(0, 0),
            lambda: torch.nn.init.normal_(weight),
            lambda: weight.__imul__(2),
        ]
        for write in writes:
            with pytest.raises(smartinf.UsageError, match="to be written"):
                write()
    lost = weight.square().sum()  # reading is fine
    with pytest.raises(smartinf.UsageError, match=r"layers.1.mlp.up_proj.weight .* gradient would be lost"):
        lost.backward()
    with pytest.raises(smartinf.UsageError, match=r"memory_budget is 1 MiB, and at least"):
        smartinf.stream(made(llama), tmp_path / "b", memory_budget=1 << 20)
    trained = made(llama)
    optimizer = adamw(trained, devices=tmp_path / "c")
    with pytest.raises(smartinf.UsageError, match="stream the model first"):
        smartinf.stream(trained, tmp_path / "b")
    optimizer.close()
    for refused in (
        lambda: copy.deepcopy(model),
        lambda: model.load_state_dict({}),
        lambda: model.resize_token_embeddings(100),
        lambda: model.half(),
        lambda: smartinf.stream(model, tmp_path / "b"),
        lambda: smartinf.stream(made(llama), tmp_path / "b", memory_budget="1MiB"),
        lambda: smartinf.stream(made(llama), tmp_path / "b", layers="model.blocks"),
        lambda: smartinf.stream(made(llama), []),
        lambda: adamw(model, overlap="early"),
        lambda: adamw(model, compress=0.1),
    ):
        with pytest.raises(smartinf.UsageError):
            refused()


def test_a_forward_or_backward_that_fails_leaves_the_model_usable(tmp_path):
    expected, _, _ = plain_run(llama, str(tmp_path / "plain"))
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    optimizer = adamw(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[VOCABULARY + 5]]))
    output = model(**batch_for(model, 0))

    def fail(_):
        raise ArithmeticError

    output.logits.register_hook(lambda gradient: gradient)
    broken = model.model.layers[0].register_full_backward_hook(lambda *_: fail(_))
    with pytest.raises(ArithmeticError):
        model(**batch_for(model, 0)).loss.backward()
    broken.remove()
    optimizer.zero_grad()
    assert steps_of(model, optimizer) == expected


def test_two_graphs_in_flight_and_retain_graph(tmp_path):
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    plain = made(llama)
    gradients = []
    for each in (model, plain):
        first, second = each(**batch_for(each, 0)).loss, each(**batch_for(each, 1)).loss
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        gradients.append({name: p.grad.clone() for name, p in each.named_parameters()})
    same(*gradients)


@pytest.mark.parametrize("whole", [False, nightly(True)])
def test_compiled_blocks(whole, tmp_path):
    def compiled(model):
        torch._dynamo.reset()
        for layer in model.model.layers:
            if whole:
                layer.compile(backend="aot_eager")
            else:
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
        return model

    plain = compiled(made(llama))
    expected = steps_of(plain, adamw(plain, devices=[tmp_path / "plain"], release_gradients=True))
    model = compiled(smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0))
    assert steps_of(model, adamw(model)) == expected
    same(weights_of(model), weights_of(plain))


def test_another_optimizer_is_refused(tmp_path):
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    for other in (torch.optim.SGD, torch.optim.AdamW):
        model(**batch_for(model, 0)).loss.backward()
        with pytest.raises(smartinf.UsageError, match="cannot train model.embed_tokens.weight"):
            other(model.parameters(), lr=0.1).step()
    optimizer = adamw(model)
    with pytest.raises(smartinf.UsageError, match="has an optimizer already"):
        adamw(model, devices=tmp_path / "b")
    with pytest.raises(smartinf.UsageError, match="add_param_group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    del optimizer
    gc.collect()
    before = weights_of(model)
    optimizer = adamw(model, resume=True)
    same(weights_of(model), before)


def test_a_kept_parameter_may_be_written_between_steps(tmp_path):
    plain = made(llama)
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    seen = []
    for each, options in ((plain, {"devices": tmp_path / "plain", "release_gradients": True}), (model, {})):
        optimizer = adamw(each, **options)
        steps = steps_of(each, optimizer, 1)
        with torch.no_grad():
            each.model.norm.weight.mul_(0.5)
        seen.append(steps + steps_of(each, optimizer, 2, first=1))
    assert seen[0] == seen[1]


def test_backward_after_step_needs_its_own_weights(tmp_path):
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)
    model.model.norm.weight.requires_grad_(False)
    optimizer = adamw(model)
    first, second = model(**batch_for(model, 0)).loss, model(**batch_for(model, 1)).loss
    second.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"was updated by step\(\) since this forward"):
        first.backward()


class Positions(torch.nn.Module):
    """Returns a view of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(600, 128))

    def forward(self, count):
        return self.weight[:count]


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.positions = Positions()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(128, 128 * 5) for _ in range(4))
        self.down = torch.nn.ModuleList(torch.nn.Linear(128 * 5, 128) for _ in range(4))

    def forward(self, x):
        x = x + self.positions(len(x))
        for up, down in zip(self.blocks, self.down, strict=True):
            x = x + down(up(x).relu())
        return x


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_what_a_module_returns_of_its_weights_stays(with_optimizer, tmp_path):
    plain, model = Wide(), smartinf.stream(Wide(), tmp_path / "a", memory_budget="64MiB", keep=0, layers=["blocks", "down"])
    if with_optimizer:
        adamw(model)
        model.zero_grad()
    x = torch.randn(64, 128)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


class Scaled(Wide):
    """The model itself has a weight, too."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(600, 128))

    def forward(self, x):
        return super().forward(x) * self.scale[: len(x)]


def test_a_model_with_a_weight_of_its_own(tmp_path):
    plain, model = Scaled(), smartinf.stream(Scaled(), tmp_path / "a", memory_budget="64MiB", keep=0, layers=["blocks", "down"])
    seen = []
    for each, devices in ((plain, {"devices": tmp_path / "plain", "release_gradients": True}), (model, {})):
        optimizer = adamw(each, **devices)
        for step in range(2):
            each(torch.randn(64, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            seen.append(optimizer.grad_norm)
    assert seen[:2] == seen[2:]


def test_an_interrupted_forward_leaves_nothing_behind(tmp_path):
    model = smartinf.stream(made(llama), tmp_path / "a", memory_budget="64MiB", keep=0)

    def interrupt(*_):
        raise KeyboardInterrupt

    for _ in range(4):
        hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**batch_for(model, 0))
        hook.remove()
    plain = made(llama)
    assert torch.equal(model(**batch_for(model, 0)).loss, plain(**batch_for(plain, 0)).loss)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_failure_while_a_model_is_written_leaves_it_as_it_was(tmp_path, monkeypatch):
    model, count = made(llama), [0]
    original = streaming._WeightsWriter.write

    def write(self, param):
        count[0] += 1
        if count[0] == 10:
            raise KeyboardInterrupt
        original(self, param)

    monkeypatch.setattr(streaming._WeightsWriter, "write", write)
    with pytest.raises(KeyboardInterrupt):
        smartinf.stream(model, tmp_path / "a", memory_budget="64MiB", keep=0)
    same(weights_of(model), weights_of(made(llama)))
    assert os.listdir(tmp_path / "a") == []


def test_a_streamed_model_may_change_its_folder(tmp_path, monkeypatch):
    """Nothing of another model is deleted, and the optimizer's state comes beside the weights."""
    for name in ("a", "b/dev"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b/dev/weights").write_bytes(b"SIWEIGHT of another model")
    monkeypatch.chdir(tmp_path / "a")
    model = smartinf.stream(made(llama), "dev", memory_budget="64MiB", keep=0)
    monkeypatch.chdir(tmp_path / "b")
    optimizer = adamw(model)
    steps_of(model, optimizer, 1)
    optimizer.close()
    del model, optimizer
    gc.collect()
    assert os.listdir(tmp_path / "b/dev") == ["weights"]
    assert "weights" not in os.listdir(tmp_path / "a/dev")


def test_a_folder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in (tmp_path / "none", "~/none", "m/none", "a/b/c"):
        with pytest.raises(smartinf.UsageError, match="there is no such folder"):
            smartinf.from_pretrained(path, devices=tmp_path / "a")


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path):
    (tmp_path / "weights").write_text("my own weights")
    with pytest.raises(smartinf.UsageError, match="in the way"):
        smartinf.stream(made(llama), tmp_path, memory_budget="64MiB", keep=0)
    assert (tmp_path / "weights").read_text() == "my own weights"


def test_weights_of_another_model_stay_as_they_were_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("smartinf.process_memory._DROP_EVERY", 1)
    made(llama).save_pretrained(tmp_path / "folder")
    teacher = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    with torch.no_grad():
        for param in teacher.parameters():
            param.add_(1.0)
    before = weights_of(teacher)
    smartinf.from_pretrained(tmp_path / "folder", devices=tmp_path / "a", memory_budget="64MiB", keep=0)
    same(weights_of(teacher), before)


def test_layer_major_passes_weights_twice_a_step(tmp_path):
    read = []
    for together in (False, True):
        model = smartinf.stream(made(llama), tmp_path / f"a{together}", memory_budget="64MiB", keep=0)
        optimizer = adamw(model, accumulation_steps=8)
        batches = [batch_for(model, k) for k in range(8)]
        before = optimizer.traffic()["read"]["state"]
        if together:
            layer_major.forward_backward(model, batches)
        else:
            for batch in batches:
                (model(**batch).loss / 8).backward()
        read.append(optimizer.traffic()["read"]["state"] - before)
    # A small model's units share many of the devices' blocks, so less is saved than 7 of 8 passes.
    assert read[1] < 0.6 * read[0]
