"""Every key that a configuration class of transformers knows, in the config.json of every model_type
that smartinf knows: left out, and with another value. What comes out is what transformers computes, or a
refusal that names the key. So a key of one class in the file of another changes here what it changes there.
SMARTINF_TEST_ALL=1: all model_types, not four of them.

Usage: config_keys_test.py SMARTINF OUTPUTS_OF_FOLDER
"""
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

OUTPUTS = str(pathlib.Path(sys.argv.pop(2)).resolve())

from small_models import CONFIGS

import safetensors.torch
import torch
import transformers

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=4, max_position_embeddings=32, n_embd=16, n_layer=2, n_head=4,
             n_positions=32, sliding_window=5, moe_intermediate_size=8, num_local_experts=3, num_experts=3,
             num_experts_per_tok=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, query_pre_attn_scalar=24,
             bos_token_id=1, eos_token_id=2)
ROPE = {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0}
# What makes a difference, where it makes one; of other keys that are true or false the opposite is tried.
OTHERS = dict(
    hidden_act=["gelu"], hidden_activation=["silu"], activation_function=["gelu"], num_key_value_heads=[4, None],
    head_dim=[8], rms_norm_eps=[0.1], layer_norm_epsilon=[0.1], pad_token_id=[3, -1, None], eos_token_id=[[1, 2], -1],
    bos_token_id=[-1], rope_parameters=[ROPE, None], rope_scaling=[ROPE], rope_theta=[300.0],
    rope_local_base_freq=[300.0], sliding_window=[3, None], max_window_layers=[1],
    layer_types=[["full_attention", "sliding_attention"], ["sliding_attention"] * 2],
    sliding_window_pattern=[2], _sliding_window_pattern=[2], attn_logit_softcapping=[0.5, None],
    final_logit_softcapping=[0.5, None], query_pre_attn_scalar=[3], num_experts_per_tok=[1], num_local_experts=[4],
    num_experts=[4], moe_intermediate_size=[12], intermediate_size=[20], n_inner=[20], n_head=[2],
    num_attention_heads=[2], n_embd=[32], hidden_size=[32], n_layer=[1], num_hidden_layers=[1], n_positions=[40],
    max_position_embeddings=[40], vocab_size=[70], partial_rotary_factor=[0.5], router_jitter_noise=[0.1],
    decoder_sparse_step=[2], mlp_only_layers=[[1]], initializer_range=[0.5], pretraining_tp=[2],
    attention_dropout=[0.0], summary_type=["last"], original_max_position_embeddings=[8], unk_token_id=[0],
    rope_interleaved=[True], is_llama_config=[True], _model_name_or_path=["a"], torch_dtype=["float32"],
    is_causal=[False], output_hidden_states=[True], chunk_size_feed_forward=[2], embedding_multiplier=[2.0])
# What transformers computes with and smartinf does not.
REFUSED = {("gpt2", key) for key in ("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention")} | {
    (kind, "is_causal") for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "mixtral",
                                     "qwen3_moe")} | {
    (kind, "use_bidirectional_attention") for kind in ("gemma2", "gemma3_text")} | {
    (kind, "output_router_logits") for kind in ("mixtral", "qwen3_moe")} | {
    ("mixtral", "router_jitter_noise"), ("qwen3_moe", "decoder_sparse_step"), ("qwen3_moe", "mlp_only_layers")}


def knows(config):
    return {field.name for field in dataclasses.fields(config)}


class ConfigKeys(unittest.TestCase):
    def cases(self, config, every_key):
        """Of each case its key and config.json's contents."""
        fields = knows(type(config))
        plain = config.to_dict()
        named = fields | set(config.attribute_map.values()) | {"model_type"}
        plain = {key: SIZES.get(key, value) for key, value in plain.items() if key in named}
        if "layer_types" in plain:
            plain["layer_types"] = ["sliding_attention" if config.model_type.startswith("gemma") else "full_attention",
                                    "full_attention"]
        yield "model_type", plain
        sizes = set(SIZES) - {"sliding_window", "head_dim", "query_pre_attn_scalar", "eos_token_id", "bos_token_id"}
        for key in sorted(fields & set(plain) - sizes):
            yield key, {k: v for k, v in plain.items() if k != key}
        for key in sorted(every_key | set(OTHERS)):
            others = OTHERS.get(key, [not plain[key]] if isinstance(plain.get(key), bool) else [True])
            for other in others if key in OTHERS or key not in self.not_tried else []:
                yield key, plain | {key: other}

    # Texts and tables of names, which no class computes with.
    not_tried = {"architectures", "transformers_version", "id2label", "label2id", "problem_type", "dtype",
                 "summary_activation", "summary_first_dropout", "router_aux_loss_coef", "norm_topk_prob",
                 "embd_pdrop", "resid_pdrop", "attn_pdrop", "chunk_size_feed_forward", "is_encoder_decoder"}

    def there(self, folder, tokens):
        """What transformers computes, its weights saved in the folder; None where it refuses."""
        text = (folder / "config.json").read_text()
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager",
                                                                  dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            model.save_pretrained(folder)
            logits = model.train()(tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        except Exception:
            return None
        finally:
            (folder / "config.json").write_text(text)
        embedding = model.get_input_embeddings().weight
        return logits.detach(), embedding.grad, next(n for n, p in model.named_parameters() if p is embedding)

    def test_keys_change_what_they_change_in_transformers(self):
        tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(2))
        tokens[0, :4] = torch.tensor([3, 63, 0, 3])
        kinds = {config.model_type: config for config in CONFIGS.values()}
        every_key = set().union(*(knows(type(config)) for config in kinds.values()))
        if not os.environ.get("SMARTINF_TEST_ALL"):
            kinds = {kind: kinds[kind] for kind in ("llama", "mistral", "gemma3_text", "gpt2")}
        with tempfile.TemporaryDirectory() as name:
            top = pathlib.Path(name)
            safetensors.torch.save_file({"tokens": tokens}, top / "in.safetensors")
            expected, refused = {}, set()
            for kind, config in kinds.items():
                for i, (key, contents) in enumerate(self.cases(config, every_key)):
                    folder = top / f"{kind}-{i}"
                    folder.mkdir()
                    (folder / "config.json").write_text(json.dumps(contents))
                    expected[folder] = kind, key, contents, self.there(folder, tokens)
            subprocess.run([OUTPUTS, "-", "f32", str(top / "in.safetensors"), "out"], check=True, text=True,
                           input="".join(f"{folder}\n" for folder in expected))
            for folder, (kind, key, contents, there) in expected.items():
                error = folder / "out.txt"
                if there is None:
                    continue
                with self.subTest(kind=kind, key=key, value=contents.get(key, "left out")):
                    if error.exists():
                        self.assertIn(key, error.read_text())
                        refused.add((kind, key))
                        continue
                    here = safetensors.torch.load_file(folder / "out")
                    logits, gradient, embedding = there
                    for ours, theirs in ((here["logits"], logits), (here[embedding], gradient)):
                        self.assertEqual(ours.shape, theirs.shape)
                        self.assertLess((ours - theirs).abs().max().item() / theirs.abs().max().item(), 1e-4)
            self.assertEqual(refused, {(kind, key) for kind, key in REFUSED if kind in kinds})
            self.assertLess(sum(there is None for *_, there in expected.values()), len(expected) / 5)


if __name__ == "__main__":
    unittest.main()
