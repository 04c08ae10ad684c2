"""What `smartinf plan` says of models of transformers by their config.json alone: as many parameters as transformers
makes, for every architecture that it knows; and of one that it does not know, what to give instead.

Usage: plan_counts_test.py SMARTINF
"""
import json
import random
import re
import subprocess
import sys
import unittest

from small_models import FineTuneCase
from train_runs import SMARTINF

import torch
import transformers as t


def sizes(r, kv=True, wide=False):
    heads = r.choice([4, 8])
    head = r.choice([8, 16])
    some = {"hidden_size": heads * head, "num_attention_heads": heads, "num_hidden_layers": r.choice([3, 4]),
            "intermediate_size": r.choice([96, 160]), "vocab_size": r.choice([512, 1000]), "max_position_embeddings": 64}
    if kv:
        some["num_key_value_heads"] = r.choice([1, 2, heads])
    if wide:
        some["head_dim"] = r.choice([head, 2 * head])
    return some


def flag(r):
    return r.random() < 0.5


CAUSAL = {
    "llama": lambda r: t.LlamaConfig(**sizes(r, wide=True), attention_bias=flag(r), mlp_bias=flag(r), tie_word_embeddings=flag(r)),
    "smollm3": lambda r: t.SmolLM3Config(**sizes(r), attention_bias=flag(r), mlp_bias=flag(r), pad_token_id=0),
    "mistral": lambda r: t.MistralConfig(**sizes(r, wide=True)),
    "qwen2": lambda r: t.Qwen2Config(**sizes(r), tie_word_embeddings=flag(r)),
    "qwen3": lambda r: t.Qwen3Config(**sizes(r, wide=True), attention_bias=flag(r)),
    "qwen3_moe": lambda r: t.Qwen3MoeConfig(**sizes(r, wide=True), num_experts=r.choice([4, 6]), num_experts_per_tok=2,
                                           moe_intermediate_size=48, decoder_sparse_step=r.choice([1, 2]),
                                           mlp_only_layers=r.choice([[], [0], [1, 2]])),
    "qwen2_moe": lambda r: t.Qwen2MoeConfig(**sizes(r), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                                           shared_expert_intermediate_size=80, decoder_sparse_step=r.choice([1, 2]),
                                           qkv_bias=flag(r)),
    "gemma": lambda r: t.GemmaConfig(**sizes(r, wide=True)),
    "gemma2": lambda r: t.Gemma2Config(**sizes(r, wide=True), attention_bias=flag(r)),
    "gemma3_text": lambda r: t.Gemma3TextConfig(**sizes(r, wide=True), sliding_window=32),
    "phi": lambda r: t.PhiConfig(**sizes(r)),
    "phi3": lambda r: t.Phi3Config(**sizes(r), pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=flag(r)),
    "gpt_neox": lambda r: t.GPTNeoXConfig(**sizes(r, kv=False), attention_bias=flag(r), tie_word_embeddings=flag(r)),
    "gpt_oss": lambda r: t.GptOssConfig(**sizes(r, wide=True), num_local_experts=r.choice([4, 8]), num_experts_per_tok=2),
    "deepseek_v3": lambda r: t.DeepseekV3Config(
        **{**sizes(r), "num_key_value_heads": None}, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=32, n_shared_experts=r.choice([1, 2]), first_k_dense_replace=r.choice([0, 1, 2]),
        q_lora_rank=r.choice([None, 24]), kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12,
        attention_bias=flag(r)),
    "deepseek_v2": lambda r: t.DeepseekV2Config(
        **{**sizes(r), "num_key_value_heads": None}, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1, q_lora_rank=r.choice([None, 24]),
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12),
    "mixtral": lambda r: t.MixtralConfig(**sizes(r, wide=True), num_local_experts=r.choice([4, 8]), num_experts_per_tok=2),
    "falcon": lambda r: t.FalconConfig(
        hidden_size=64, num_attention_heads=8, num_hidden_layers=3, vocab_size=512, bias=flag(r),
        **r.choice([{"multi_query": True}, {"multi_query": False, "parallel_attn": False, "alibi": True},
                    {"new_decoder_architecture": True, "num_kv_heads": 2},
                    {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}])),
    "opt": lambda r: t.OPTConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, ffn_dim=r.choice([128, 200]),
                                 vocab_size=512, max_position_embeddings=64, word_embed_proj_dim=r.choice([64, 32]),
                                 do_layer_norm_before=flag(r), enable_bias=flag(r)),
    "bloom": lambda r: t.BloomConfig(hidden_size=64, n_head=4, n_layer=3, vocab_size=512),
    "mamba": lambda r: t.MambaConfig(hidden_size=r.choice([64, 72]), num_hidden_layers=3, vocab_size=512, state_size=r.choice([8, 16]),
                                     use_bias=flag(r), use_conv_bias=flag(r), expand=r.choice([2, 3]),
                                     time_step_rank=r.choice(["auto", 5])),
    "mamba2": lambda r: t.Mamba2Config(hidden_size=64, num_heads=8, head_dim=16, num_hidden_layers=3, vocab_size=512,
                                       state_size=16, n_groups=r.choice([1, 2]), use_bias=flag(r), use_conv_bias=flag(r),
                                       tie_word_embeddings=flag(r)),
    "jamba": lambda r: t.JambaConfig(**{**sizes(r), "num_hidden_layers": 8}, num_experts=r.choice([1, 4]), num_experts_per_tok=2,
                                     attn_layer_period=4, attn_layer_offset=r.choice([1, 2]), expert_layer_period=2,
                                     expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8, mamba_dt_rank=r.choice(["auto", 6])),
    "gpt2": lambda r: t.GPT2Config(n_embd=64, n_head=4, n_layer=3, vocab_size=512, n_positions=64, n_inner=r.choice([None, 100])),
    "olmo": lambda r: t.OlmoConfig(**sizes(r)),
    "olmo2": lambda r: t.Olmo2Config(**sizes(r)),
    "olmoe": lambda r: t.OlmoeConfig(**sizes(r), num_experts=4, num_experts_per_tok=2),
    "granite": lambda r: t.GraniteConfig(**sizes(r), tie_word_embeddings=flag(r)),
    "starcoder2": lambda r: t.Starcoder2Config(**sizes(r), use_bias=flag(r)),
    "llama4_text": lambda r: t.Llama4TextConfig(
        **sizes(r, wide=True), num_local_experts=r.choice([2, 4]), intermediate_size_mlp=112, num_experts_per_tok=1,
        interleave_moe_layer_step=r.choice([1, 2]), pad_token_id=0),
}
OTHERS = {
    "t5": (t.T5ForConditionalGeneration, lambda r: t.T5Config(
        d_model=64, d_kv=r.choice([16, 24]), d_ff=128, num_layers=3, num_decoder_layers=r.choice([2, 3]), num_heads=4, vocab_size=512,
        feed_forward_proj=r.choice(["relu", "gated-gelu"]), tie_word_embeddings=flag(r))),
    "bert": (t.BertForMaskedLM, lambda r: t.BertConfig(**sizes(r, kv=False))),
    "vit": (t.ViTForImageClassification, lambda r: t.ViTConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=3, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=r.choice([2, 10]), qkv_bias=flag(r))),
}


def model_of(kind, seed):
    """Without values, on the meta device. Every second seed leaves out what is as transformers has it by default."""
    r = random.Random(seed)
    maker, make = OTHERS.get(kind) or (None, CAUSAL[kind])
    config = make(r)
    with torch.device("meta"):
        model = maker(config) if maker else t.AutoModelForCausalLM.from_config(config)
    model.config.architectures = [type(model).__name__]
    return model


# Published sizes, from the configurations of the published models.
PUBLISHED = {
    "Mixtral 8x7B": (46_702_792_704, dict(
        model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2)),
    "Qwen3 30B A3B": (30_532_122_624, dict(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, mlp_only_layers=[], decoder_sparse_step=1)),
    "gpt-oss 20b": (20_914_757_184, dict(
        model_type="gpt_oss", vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24,
        num_attention_heads=64, num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4)),
    "DeepSeek V3": (671_026_404_352, dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432,
        moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128,
        n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)),
    "Llama 3 8B": (8_030_261_248, dict(
        model_type="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8)),
    "Qwen3 8B": (8_190_735_360, dict(
        model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128)),
    "Falcon 7B": (6_921_720_704, dict(
        model_type="falcon", vocab_size=65024, hidden_size=4544, num_hidden_layers=32, num_attention_heads=71,
        multi_query=True, parallel_attn=True, bias=False)),
}


class PlanCounts(FineTuneCase):
    def plan(self, config, *words, name="config.json"):
        path = self.folder / name
        path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        done = subprocess.run([SMARTINF, "plan", str(path), "--batch", "1", "--json", *words], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    def test_every_architecture_has_as_many_parameters_as_in_transformers(self):
        for kind in [*CAUSAL, *OTHERS]:
            for seed in range(4):
                model = model_of(kind, seed)
                config = model.config.to_json_string(use_diff=seed % 2 == 1)
                with self.subTest(kind, config=config):
                    self.assertEqual(model.config.model_type, kind)
                    plan = self.plan(config)
                    self.assertIsInstance(plan, dict, plan)
                    self.assertEqual(plan["parameters"], sum(p.numel() for p in model.parameters()))

    def test_a_key_that_is_missing_counts_as_in_transformers_or_is_refused(self):
        ignored = {"model_type", "architectures", "transformers_version"}
        size = re.compile("size|dim|heads|layers|expert|width|d_|n_|step|rank|bias|tie|position|expand|kernel|dense|multi")
        for kind in [*CAUSAL, *OTHERS]:
            config = {key: value for key, value in json.loads(model_of(kind, 0).config.to_json_string(use_diff=False)).items()
                      if key != "time_step_limit"}  # mamba2: holds infinity, which transformers does not read again
            for key in sorted(key for key in config if size.search(key) and key not in ignored):
                rest = {name: value for name, value in config.items() if name != key}
                plan = self.plan(rest)
                if not isinstance(plan, dict) or key in ("vocab_size", "pad_token_id"):
                    continue
                maker = OTHERS[kind][0] if kind in OTHERS else t.AutoModelForCausalLM.from_config
                try:
                    with torch.device("meta"):
                        model = maker(t.AutoConfig.for_model(**{k: v for k, v in rest.items() if k != "architectures"}))
                except Exception:  # transformers refuses sizes that do not fit each other
                    continue
                with self.subTest(kind, missing=key):
                    self.assertEqual(plan["parameters"], sum(p.numel() for p in model.parameters()))

    def test_published_models_have_their_published_size(self):
        for name, (parameters, config) in PUBLISHED.items():
            with self.subTest(name):
                self.assertEqual(self.plan(config)["parameters"], parameters)

    def test_a_mixture_of_experts_computes_with_some_and_stores_all(self):
        _, config = PUBLISHED["Qwen3 30B A3B"]
        sparse, dense = (self.plan(dict(config, num_experts_per_tok=n), "--with", "python", "--gpu", "H200",
                                   "--accumulation", "16") for n in (8, 128))
        self.assertEqual(sparse["parameters"], dense["parameters"])
        self.assertEqual(sparse["device_bytes"], dense["device_bytes"])
        forward = [next(option["forward_s"] for option in plan["options"] if option["option"] == plan["recommended"])
                   for plan in (sparse, dense)]
        self.assertLess(forward[0], 0.6 * forward[1])

    def test_words_for_infinity_are_read(self):
        model = model_of("mamba2", 0)
        config = json.dumps(dict(model.config.to_dict(), time_step_limit=[0.0, float("inf")]), default=str)
        self.assertIn("Infinity", config)
        self.assertEqual(self.plan(config)["parameters"], sum(p.numel() for p in model.parameters()))

    def test_what_is_not_known_is_refused_with_what_to_give(self):
        model = model_of("llama", 0)
        parameters = sum(p.numel() for p in model.parameters())
        folder = self.folder / "unknown"
        folder.mkdir()
        config = json.loads(model.config.to_json_string(use_diff=False))
        said = self.plan(dict(config, model_type="seed_oss"), name="unknown/config.json")
        self.assertIn('model_type is "seed_oss"', said)
        self.assertIn("--parameters", said)
        # What it says to run prints the number.
        line = re.search(r'python3 -c "(.*)"', said).group(1)
        self.assertIn(str(folder), line)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        printed = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True).stdout
        self.assertEqual(int(printed), parameters)
        plan = self.plan(dict(config, model_type="seed_oss"), "--parameters", printed.strip())
        self.assertEqual(plan["parameters"], parameters)
        self.assertNotIn("smartinf train", [use["with"] for use in plan["uses"]])
        self.assertIn("follow from its config.json", self.plan(config, "--parameters", "5"))
        for kind, say in (("llama", {"num_hidden_layers": 0}), ("llama", {"num_hidden_layers": 10**9}),
                          ("llama", {"hidden_size": "x"}), ("mixtral", {"num_local_experts": -1})):
            said = self.plan(dict(json.loads(model_of(kind, 0).config.to_json_string()), **say))
            self.assertIn(next(iter(say)), said)

    def test_a_folder_is_planned_and_trained_from_the_recipe(self):
        from small_models import COMMON, WIDE_HEADS, make
        folder = self.folder / "model"
        for name, config in (("qwen3", t.Qwen3Config(**{**WIDE_HEADS, "vocab_size": 256})),
                             ("mixtral", t.MixtralConfig(**{**COMMON, "vocab_size": 256}, num_local_experts=3))):
            with self.subTest(name):
                model = make(config, folder)
                recipe = self.folder / f"{name}.toml"
                done = subprocess.run([SMARTINF, "plan", str(folder), "--seq", "32", "--batch", "2", "--devices", "1",
                                       "--recipe", str(recipe), "--json"], capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done)
                self.assertEqual(json.loads(done.stdout)["parameters"], sum(p.numel() for p in model.parameters()))
                self.assertIn(f'from = "{folder}"', recipe.read_text())
                self.train(str(recipe), "run_" + name, "--data.paths", str(self.corpus), "--train.steps", "1",
                           "--train.accelerator", "cpu", "--train.sample_tokens", "0", "--train.validate_every", "0",
                           "--data.validation_share", "0", *self.devices("run_" + name, 1))
                self.assertEqual([step for step, _ in self.losses("run_" + name)], [1])

    def test_train_is_offered_for_what_it_takes_from_a_folder(self):
        """By the trainer's own reader: every architecture of small_models; and not the others."""
        from small_models import CONFIGS
        for name, config in CONFIGS.items():
            with self.subTest(name):
                plan = self.plan(config.to_json_string(use_diff=False))
                self.assertEqual(plan["with"], "smartinf train", plan["result"])
        for kind in ("phi3", "gpt_oss", "falcon", "bert", "mamba2"):
            with self.subTest(kind):
                uses = [use["with"] for use in self.plan(model_of(kind, 0).config.to_json_string())["uses"]]
                self.assertNotIn("smartinf train", uses)
                self.assertIn("Python, streamed", uses)


if __name__ == "__main__":
    unittest.main()
