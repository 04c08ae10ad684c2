"""Models of transformers' own making, random and small, of every architecture; for tests.

Whoever imports it ends with 77, and says why, where a Python package is missing.
"""
import pathlib
import sys

from train_runs import StreamCase

try:
    import safetensors.torch
    import torch
    import transformers
except ImportError as missing:
    print(f"skipped: {missing}; scripts/setup.sh installs what is missing")
    sys.exit(77)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

COMMON = dict(vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
              num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False)
WIDE_HEADS = dict(COMMON, head_dim=16)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16)

CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON),
    "llama_tied_biases": transformers.LlamaConfig(**dict(WIDE_HEADS, tie_word_embeddings=True), attention_bias=True,
                                                  mlp_bias=True),
    "llama3_rope": transformers.LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "linear_rope": transformers.LlamaConfig(**COMMON, rope_parameters=dict(
        rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "yarn_rope": transformers.LlamaConfig(**COMMON, rope_parameters=YARN),
    "yarn_rope_mscale": transformers.LlamaConfig(**COMMON, rope_parameters=dict(
        YARN, mscale=0.7, mscale_all_dim=0.4, beta_fast=16, beta_slow=2)),
    "mistral": transformers.MistralConfig(**WIDE_HEADS, sliding_window=7),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen2_window": transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=9,
                                             max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**WIDE_HEADS),
    "gemma2": transformers.Gemma2Config(**dict(WIDE_HEADS, tie_word_embeddings=True), sliding_window=8,
                                        query_pre_attn_scalar=24, attn_logit_softcapping=5.0,
                                        final_logit_softcapping=3.0),
    "gemma3": transformers.Gemma3TextConfig(**dict(WIDE_HEADS, tie_word_embeddings=True), sliding_window=8,
                                            query_pre_attn_scalar=24,
                                            layer_types=["sliding_attention", "full_attention",
                                                         "sliding_attention"]),
    "gpt2": transformers.GPT2Config(vocab_size=199, n_embd=48, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0.0,
                                    embd_pdrop=0.0, attn_pdrop=0.0),
    "mixtral": transformers.MixtralConfig(**COMMON, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**WIDE_HEADS, num_experts=6, num_experts_per_tok=3,
                                             moe_intermediate_size=40, norm_topk_prob=True),
    "qwen3_moe_plain_shares": transformers.Qwen3MoeConfig(**WIDE_HEADS, num_experts=6, num_experts_per_tok=2,
                                                          moe_intermediate_size=40, norm_topk_prob=False),
}


def make(config, folder, dtype=torch.float32):
    """A model with weights of everyday size in every tensor, norms and biases included, saved."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


def read(folder):
    """All tensors of a folder's files, by name."""
    tensors = {}
    for file in sorted(pathlib.Path(folder).glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def make_tokenizer(folder, corpus):
    """One of 300 tokens with a chat template, saved."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train([str(corpus)], trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<user>", "<model>", "<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}<model>{% generation %}"
        "{{ m.content }}<end>{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}")
    fast.save_pretrained(folder)
    return fast


class FineTuneCase(StreamCase):
    """Runs from a folder, and the same steps by torch."""

    def fine_tune(self, folder, run, *flags, steps=1, code=0, env=None, timeout=300):
        recipe = pathlib.Path(self.recipe(steps=steps))
        text = recipe.read_text()
        recipe.write_text(f'[model]\nfrom = "{folder}"\n\n' + text[text.index("[data]"):])
        return self.train(str(recipe), run, "--train.warmup_steps", "1", "--train.lr_floor", "1", *flags, code=code,
                          env=env, timeout=timeout)

    # The same eight sequences in every step, in any order.
    SAME_BATCH = ("--data.validation_share", "0", "--train.micro_batch", "8", "--train.accumulation", "1",
                  "--train.precision", "f32", "--train.clip_norm", "0", "--train.weight_decay", "0.01",
                  "--train.warmup_steps", "0", "--optimizer.beta1", "0.9", "--optimizer.beta2", "0.99",
                  "--optimizer.eps", "1e-8")

    def rows(self):
        """The corpus' sequences, and what follows each of their tokens."""
        tokens = torch.frombuffer(bytearray(self.corpus.read_bytes()), dtype=torch.uint8).long()
        rows = torch.stack([tokens[32 * i:32 * i + 33] for i in range(8)])
        return rows[:, :-1], rows[:, 1:]

    def curve(self, model, steps, lr, inputs, targets, **options):
        """Losses of torch's own AdamW, every step over all of them."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": [p for p in parameters if p.ndim > 1]},
                  {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
        losses = []
        for _ in range(steps):
            logits = model(inputs, **options).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def same_curves(self, run, there):
        here = [loss for _, loss in self.losses(run)]
        self.assertEqual(len(here), len(there))
        apart = max(abs(a - b) / b for a, b in zip(here, there, strict=True))
        self.assertLess(apart, 1e-4)
        self.assertLess(there[-1], 0.95 * there[0], "the model has learnt something")
