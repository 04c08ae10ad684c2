"""smartinf.DeviceCache in transformers' generate, beside transformers' own caches and attention."""

import copy
import gc
import os
import signal
import time

import pytest
import torch

import smartinf
from smartinf import streaming, units
from smartinf.errors import CorruptError, MemoryLimitError, NoSpaceError, UsageError

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)
VOCABULARY = 96
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def of(kind, **more):
    config = getattr(transformers, f"{kind}Config")(
        **{"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 256} | SIZES | TOKENS | more
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def llama():
    return of("Llama")


def gemma2():
    # Windows end within the prompt; scores are large enough for the cap to show.
    return of(
        "Gemma2", num_hidden_layers=4, head_dim=16, sliding_window=12, attn_logit_softcapping=2.0, query_pre_attn_scalar=4
    )


def mistral():
    return of("Mistral", sliding_window=40)


def qwen3():
    return of("Qwen3", head_dim=24)


def mixtral():
    return of("Mixtral", num_local_experts=4, sliding_window=None)


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, scale_attn_by_inverse_layer_idx=True,
            **TOKENS,
        )
    )  # fmt: skip


def made(make, dtype=torch.float32):
    torch.manual_seed(5)
    model = make()
    with torch.no_grad():
        for param in model.parameters():  # so that the next token depends on all before
            param.mul_(4) if param.dim() > 1 else None
    model.generation_config.use_cache = True
    return model.to(dtype).eval()


def texts(*lengths, seed=1, longest=None):
    """Prompts of these lengths, padded on the left."""
    longest = longest or max(lengths)
    ids = torch.randint(2, VOCABULARY, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def generate(model, inputs, cache=None, tokens=44, attention="sdpa", **more):
    """(all tokens, the new ones' logits)."""
    if isinstance(cache, smartinf.DeviceCache):
        attention = "smartinf"
    model.set_attn_implementation(attention)
    torch.manual_seed(7)
    out = model.generate(
        **inputs, **{"past_key_values": cache, "max_new_tokens": tokens, "do_sample": False, "output_logits": True,
        "return_dict_in_generate": True} | more
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits, 1)


def place(folder):
    """A directory whose drive need not be measured."""
    folder.mkdir()
    (folder / "smartinf.tuning").write_text(
        "io_bytes = 1048576\nio_depth = 4\nread_bytes_per_second = 1e9\nwrite_bytes_per_second = 1e9\n", encoding="ascii"
    )
    return str(folder)


@pytest.fixture
def places(tmp_path):
    return [place(tmp_path / name) for name in ("kv0", "kv1")]


def same(made_here, wanted, tolerance=2e-4):
    assert torch.equal(made_here[0], wanted[0])
    torch.testing.assert_close(made_here[1], wanted[1], rtol=tolerance, atol=tolerance)


def equal(first, second):
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def left_over(folder):
    return sorted(set(os.listdir(folder)) - {"smartinf.tuning"})


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (llama, "eager"),
        (llama, "sdpa"),
        (gemma2, "eager"),  # transformers' sdpa knows no softcap
        (mistral, "sdpa"),
        (qwen3, "sdpa"),
        (mixtral, "eager"),
        (gpt2, "eager"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(make, attention):
    model = made(make)
    inputs = texts(21, 9)
    wanted = generate(model, inputs, attention=attention)
    assert len(wanted[0].unique()) > 20  # it is no loop of a few tokens
    same(generate(model, inputs, smartinf.DeviceCache(model)), wanted)


@pytest.mark.parametrize("make", [llama, gemma2])
def test_the_same_bits_in_memory_and_on_devices(make, places):
    model, inputs = made(make), texts(70, 33, 9, 64)
    wanted = generate(model, inputs, smartinf.DeviceCache(model))
    equal(generate(model, inputs, smartinf.DeviceCache(model, threads=3)), wanted)
    for devices in (places[0], places):
        with smartinf.DeviceCache(model, devices, memory="4MB", max_length=128) as cache:
            equal(generate(model, inputs, cache), wanted)
            assert cache.traffic()["read"] > 0
            cache.reset()
            equal(generate(model, inputs, cache), wanted)
        assert not left_over(places[0]) and not left_over(places[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_formats(dtype, places):
    model, inputs = made(llama, dtype), texts(40, 7)
    found = {}
    for name in ("bf16", "f32", "q8", None):
        found[name] = generate(model, inputs, smartinf.DeviceCache(model, format=name))
    equal(found[None], found["bf16" if dtype == torch.bfloat16 else "f32"])
    assert not torch.equal(found["q8"][1], found["f32"][1])
    with smartinf.DeviceCache(model, [{"path": places[1], "bandwidth": 1e9}], format="q8", max_length=96) as cache:
        equal(generate(model, inputs, cache), found["q8"])


def test_a_padded_row_is_that_text_alone():
    model, lengths = made(mistral), (50, 3, 31)
    inputs = texts(*lengths)
    together = generate(model, inputs, smartinf.DeviceCache(model))
    for row, length in enumerate(lengths):
        alone = {name: given[row : row + 1, -length:] for name, given in inputs.items()}
        tokens, logits = generate(model, alone, smartinf.DeviceCache(model))
        same((tokens[:, length:], logits), (together[0][row : row + 1, max(lengths) :], together[1][row : row + 1]))


def test_sampling():
    model, inputs = made(qwen3), texts(12, 5)
    draw = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 2}
    wanted = generate(model, inputs, **draw)
    assert not torch.equal(wanted[0][0], wanted[0][1])
    assert torch.equal(generate(model, inputs, smartinf.DeviceCache(model), **draw)[0], wanted[0])


@pytest.mark.parametrize("lengths", [(40,), (40, 12)])
def test_a_chat_goes_on(lengths, places):
    """A second prompt, whose shorter rows are padded within the text, and whose first rows were padded before it."""
    model, first, second = made(llama), texts(*lengths), texts(*lengths[::-1], seed=2, longest=41)

    def chat(cache):
        tokens = generate(model, first, cache, tokens=5)[0]
        answered = torch.ones(len(lengths), 5, dtype=torch.long)
        mask = torch.cat([first["attention_mask"], answered, second["attention_mask"]], 1)
        return generate(
            model, {"input_ids": torch.cat([tokens, second["input_ids"]], 1), "attention_mask": mask}, cache, tokens=30
        )

    wanted = chat(transformers.DynamicCache(config=model.config))
    here = chat(smartinf.DeviceCache(model))
    same(here, wanted)
    with smartinf.DeviceCache(model, places) as cache:
        equal(chat(cache), here)


def test_a_prompt_in_chunks():
    model, inputs = made(mistral), texts(70, 20)
    same(generate(model, inputs, smartinf.DeviceCache(model), prefill_chunk_size=32), generate(model, inputs))


def test_rows_leave():
    model, inputs = made(llama), texts(34, 20, 40)
    cache = smartinf.DeviceCache(model)
    wanted = generate(model, inputs, cache, tokens=3)[0]
    later, mask = torch.tensor([[5], [6]]), torch.cat([inputs["attention_mask"], torch.ones(3, 3, dtype=torch.long)], 1)
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        places = mask.cumsum(1) - 1
        dynamic = model(wanted[:, :-1], attention_mask=mask[:, :-1], position_ids=places[:, :-1]).past_key_values
        rows = [2, 0]
        dynamic.batch_select_indices(torch.tensor(rows))
        further = {"attention_mask": mask[rows], "position_ids": places[rows, -1:]}
        want = model(later, past_key_values=dynamic, **further).logits
        model.set_attn_implementation("smartinf")
        cache.batch_select_indices(torch.tensor(rows))
        torch.testing.assert_close(model(later, past_key_values=cache, **further).logits, want, rtol=1e-4, atol=1e-4)
        assert cache.batch_size == 2 and cache.get_seq_length() == 43
        cache.batch_select_indices(torch.tensor([False, True]))
        assert cache.batch_size == 1


def test_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_KEPT_BYTES", 1 << 10)
    monkeypatch.setattr(streaming, "_ENGINE_BYTES_MIN", 24 << 20)
    model, inputs = made(llama), texts(30, 8)
    wanted = generate(model, inputs, smartinf.DeviceCache(model))
    model.save_pretrained(tmp_path / "model")
    streamed = smartinf.from_pretrained(tmp_path / "model", devices=[str(tmp_path / "weights")], keep=0)
    with smartinf.DeviceCache(streamed, place(tmp_path / "kv")) as cache:
        equal(generate(streamed.eval(), inputs, cache), wanted)


def test_peft():
    peft = pytest.importorskip("peft")
    model, inputs = made(llama), texts(30, 8)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()
    wanted = generate(adapted, inputs)
    cache = smartinf.DeviceCache(adapted)
    same(generate(adapted, inputs, cache), wanted)
    with adapted.disable_adapter():
        cache.reset()
        same(generate(adapted, inputs, cache), generate(adapted, inputs))


# ---- What is refused, and what goes wrong.


@pytest.mark.parametrize(
    ("said", "more"),
    [
        ("no beam search: use num_beams=1", {"num_beams": 2}),
        ("no assisted decoding: use generate", {"prompt_lookup_num_tokens": 2}),
        ("no attention weights: use model.set_attn", {"output_attentions": True}),
    ],
)
def test_ways_to_generate_that_are_refused(said, more):
    model = made(llama)
    more |= {"output_logits": False, "return_dict_in_generate": "output_attentions" in more}
    with pytest.raises(UsageError, match=said):
        generate(model, texts(8), smartinf.DeviceCache(model), **more)


def test_one_goes_with_the_other():
    model = made(llama)
    cache = smartinf.DeviceCache(model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UsageError, match=r"attention is 'sdpa'.*set_attn_implementation\(\"smartinf\"\)"):
        model.generate(**texts(8), past_key_values=cache)
    for more in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        with pytest.raises(UsageError, match="works with no other cache, static or dynamic, nor without one"):
            generate(model, texts(8), attention="smartinf", **more)
    other = made(llama)
    other.set_attn_implementation("eager")
    with pytest.raises(UsageError, match="an earlier call has failed within the model, or its attention was another"):
        other.generate(**texts(8), past_key_values=cache)  # while `model` has the right one


def test_models_that_are_refused():
    model = made(llama)
    model.set_attn_implementation("smartinf")
    cache = smartinf.DeviceCache(model)
    for other, said in ((qwen3, r"values \[1, 2, 8, 24\].*made for 2 layers with 2 heads of 8"), (gpt2, r"2 heads of 8")):
        with pytest.raises(UsageError, match=said):
            generate(made(other), texts(8), cache)
        cache.reset()
    more = of("Llama", num_attention_heads=8, head_dim=8).eval()
    with pytest.raises(UsageError, match="8 heads of queries"):
        generate(more, texts(8), cache)
    sinks = of("GptOss", head_dim=8, num_local_experts=2).eval()
    with pytest.raises(UsageError, match="no attention with s_aux: use transformers' DynamicCache"):
        generate(sinks, texts(8), smartinf.DeviceCache(sinks))
    twice = of("DiffLlama").eval()
    with pytest.raises(UsageError, match="no attention of two parts"):
        generate(twice, texts(8), smartinf.DeviceCache(twice))
    capped = made(gemma2)
    cache = smartinf.DeviceCache(capped)
    capped.model.layers[0].self_attn.attn_logit_softcapping = 3.0
    with pytest.raises(UsageError, match="a softcap of 3.0, and the cache was made for 2.0"):
        generate(capped, texts(8), cache)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(UsageError, match="no encoder beside the decoder"):
        smartinf.DeviceCache(t5)
    hybrid = transformers.PreTrainedConfig(layer_types=["linear_attention"], num_hidden_layers=1, num_attention_heads=2)
    t5.config = hybrid
    with pytest.raises(UsageError, match="no layers of .*LinearAttentionLayer.*DynamicCache"):
        smartinf.DeviceCache(t5)
    with pytest.raises(UsageError, match="model=Linear: give a model of transformers"):
        smartinf.DeviceCache(torch.nn.Linear(2, 2))


def test_calls_that_are_refused(places):
    model, inputs = made(llama), texts(8, 4)
    model.set_attn_implementation("smartinf")
    for options, said in (
        ({"format": "q4"}, "unknown format 'q4'.*bf16, f32, q8"),
        ({"memory": "much"}, "memory='much' is not a size"),
        ({"max_length": 0}, "max_length=0 is no number of tokens"),
        ({"threads": 0}, "threads=0 is no number of threads"),
        ({"remote": {"cert": "x"}}, "remote has no 'cert'"),
    ):
        with pytest.raises(UsageError, match=said):
            smartinf.DeviceCache(model, **options)
    cache = smartinf.DeviceCache(model)
    with pytest.raises(UsageError, match="no gradients: use torch.no_grad"):
        model(**inputs, past_key_values=cache)
    with torch.no_grad():
        with pytest.raises(UsageError, match=r"call reset\(\), and give the whole text again"):
            model(**inputs, past_key_values=cache)
        cache.reset()
        model(**inputs, past_key_values=cache)
        for refused in (lambda: cache.crop(-1), lambda: cache.batch_repeat_interleave(2), lambda: copy.deepcopy(cache)):
            with pytest.raises(UsageError, match="a DeviceCache has no"):
                refused()
        with pytest.raises(UsageError, match="a row can stay once only"):
            cache.batch_select_indices(torch.tensor([0, 0]))
        with pytest.raises(UsageError, match="a batch of 1 on a cache of 2 rows"):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        with pytest.raises(UsageError, match="mask of layer 0 is not that of a text that is continued"):
            model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)  # and where the padding is, nobody said
        cache.reset()
        upwards = torch.ones(2, 1, 8, 8, dtype=torch.bool).triu()
        with pytest.raises(UsageError, match="mask of layer 0"):
            model(inputs["input_ids"], attention_mask=upwards, past_key_values=cache)
        model.train()
        model.model.layers[0].self_attn.attention_dropout = 0.5
        cache.reset()
        with pytest.raises(UsageError, match=r"no dropout: use model.eval\(\)"):
            model(**inputs, past_key_values=cache)
    windowed = made(mistral)
    with pytest.raises(UsageError, match="no padding inside of a text or behind it, with windows"):
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
        generate(windowed, inputs, smartinf.DeviceCache(windowed))
    cache.close()
    cache.close()
    with pytest.raises(UsageError, match="the cache is closed"):
        cache.traffic()


def test_too_little_room(places):
    model, inputs = made(llama), texts(30, 20)
    with pytest.raises(UsageError, match="a text of 33 tokens, and the cache has room for 32"):
        generate(model, inputs, smartinf.DeviceCache(model, max_length=32))
    # A block is 32 tokens of 2 heads of 8 in f32, and as much for values: 4096 bytes in each of 2 layers.
    cache = smartinf.DeviceCache(model, memory=4 * 8192)
    with pytest.raises(UsageError, match="room for 64"):
        generate(model, inputs, cache)
    with pytest.raises(MemoryLimitError, match="need 16.0 KiB.*and 8.00 KiB of") as raised:
        generate(model, texts(5, 5, 5), smartinf.DeviceCache(model, memory=5 * 8192, max_length=64))
    assert "for row 3 of 3, of up to 64 tokens: give max_length=" in raised.value.__notes__[0]
    with smartinf.DeviceCache(model, places[0], max_length=1 << 40) as cache:
        with pytest.raises(NoSpaceError, match="need.*free") as raised:
            generate(model, inputs, cache)
        assert "for row 1 of 2" in raised.value.__notes__[0]
        assert cache.batch_size == -1
    assert not left_over(places[0])


def test_a_damaged_block(places):
    model = made(llama)
    model.set_attn_implementation("smartinf")
    with smartinf.DeviceCache(model, places[0], max_length=96) as cache, torch.no_grad():
        model(**texts(70), past_key_values=cache)
        blocks = 2 * 2 * 4096
        deadline = time.monotonic() + 30
        while cache.traffic()["written"] < blocks and time.monotonic() < deadline:
            time.sleep(0.01)
        with open(os.path.join(places[0], "smartinf.cache"), "r+b") as file:
            file.seek(128 << 10)
            file.write(bytes(4096))
        one = torch.ones(1, 1, dtype=torch.long)
        with pytest.raises(CorruptError, match="kv0.*layer 0") as raised:
            model(one, past_key_values=cache)
        assert "give the whole text again" in raised.value.__notes__[0]
        with pytest.raises(UsageError, match=r"call reset\(\)"):
            model(one, past_key_values=cache)
        cache.reset()
        model(**texts(70), past_key_values=cache)
        model(one, past_key_values=cache)


def test_two_caches_of_one_device(places):
    model = made(llama)
    cache = smartinf.DeviceCache(model, places[0])
    with pytest.raises(smartinf.DeviceError, match="kv0"):
        smartinf.DeviceCache(model, places[::-1])
    assert not left_over(places[1])
    generate(model, texts(40), cache, tokens=2)
    pid = os.fork()
    if pid == 0:
        try:
            cache.reset()
        except UsageError as error:
            os._exit(0 if "the process that this one was forked from" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    cache.reset()
    generate(model, texts(40), cache, tokens=2)
    del cache
    gc.collect()
    assert not left_over(places[0])


def test_what_a_killed_process_leaves(places):
    model = made(llama)
    pid = os.fork()
    if pid == 0:
        try:
            cache = smartinf.DeviceCache(model, places[0])
            generate(model, texts(70), cache, tokens=3)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert left_over(places[0])
    with smartinf.DeviceCache(model, places) as cache:
        equal(generate(model, texts(40), cache), generate(model, texts(40), smartinf.DeviceCache(model)))
    assert not left_over(places[0])


@pytest.mark.nightly  # another import of transformers
def test_a_process_of_its_own(places, processes):
    """transformers is imported, and the name is registered, with the class; the end leaves nothing."""
    code = """
        import sys, torch, smartinf
        assert "transformers" not in sys.modules
        smartinf.DeviceCache
        import transformers
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=128, attn_implementation="smartinf")
        model = transformers.LlamaForCausalLM(config)
        cache = smartinf.DeviceCache(model, sys.argv[1])
        model.generate(torch.ones(1, 70, dtype=torch.long), past_key_values=cache, max_new_tokens=3)
    """
    ended = processes.run(code, places[0])
    assert ended.returncode == 0, ended.stderr
    assert not left_over(places[0])
