"""A decode step of transformers, with smartinf.DeviceCache and with transformers' own DynamicCache in turn.

The model has random weights. Both caches get the same prompt, then a token each in turn; a round is one such pair. Prints a
JSON line for each round and the medians.
"""

import argparse
import json
import statistics
import time

import torch
import transformers

import smartinf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--beside", choices=("sdpa", "eager"), default="sdpa", help="attention")
    parser.add_argument("--format", choices=("bf16", "f32", "q8"))
    parser.add_argument("--device", nargs="+", help="directories; without: in memory")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    # SmolLM2 with 135 million parameters.
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=args.context + args.rounds + 2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    prompt = torch.randint(0, config.vocab_size, (args.rows, args.context))
    ours = smartinf.DeviceCache(model, args.device, format=args.format)
    caches = {args.beside: transformers.DynamicCache(config=config), "smartinf": ours}

    def step(name: str, tokens: torch.Tensor) -> float:
        model.set_attn_implementation(name)
        start = time.perf_counter()
        model(tokens, past_key_values=caches[name], logits_to_keep=1)
        return time.perf_counter() - start

    with torch.no_grad(), ours:
        print(json.dumps({"prompt_s": {name: step(name, prompt) for name in caches}}), flush=True)
        seconds: dict[str, list[float]] = {name: [] for name in caches}
        for number in range(args.rounds + 1):
            for name in caches:
                seconds[name].append(step(name, prompt[:, number : number + 1]))
            print(json.dumps({name: of[-1] for name, of in seconds.items()}), flush=True)
    medians = {name: statistics.median(of[1:]) for name, of in seconds.items()}
    print(json.dumps({"median_s": medians, "ratio": medians[args.beside] / medians["smartinf"]}))


if __name__ == "__main__":
    main()
