// smartinf generate: what a model puts behind a text.
#include <algorithm>
#include <charconv>
#include <memory>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/units.h"
#include "smartinf/train/generator.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/generate_flags.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/state_places.h"
#include "apps/smartinf/text_codec.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using Tokens = std::vector<int64_t>;

Status wrong(std::string what, std::string advice) {
  return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
}

}  // namespace

Result<uint64_t> bytes_of(const char* flag, const std::string& text) {
  if (text.empty()) return uint64_t{0};
  Result<uint64_t> bytes = base::parse_bytes(text);
  if (!bytes.ok()) return std::move(bytes).status().with_context(flag);
  return bytes;
}

Result<train::GeneratorOptions> generator_options(const GenerateFlags& flags) {
  train::GeneratorOptions options;
  if (is_run_folder(flags.from)) {
    SI_ASSIGN_OR_RETURN(config::LoadedRecipe loaded, load_run(flags.from));
    if (!flags.checkpoint.empty()) {
      SI_RETURN_IF_ERROR(use_checkpoint(flags.checkpoint, loaded.recipe));
    }
    options.options = std::move(loaded.recipe.options);
    options.updater = std::move(loaded.recipe.updater);
  } else {
    options.options.model.from = flags.from;
    options.options.model.ignored_keys = flags.ignored_keys;
    options.options.train.run.clear();
  }
  if (!flags.type.empty()) options.type = *base::enum_from_name<base::DataType>(flags.type);
  options.accelerator = flags.accelerator;
  options.threads = flags.threads;
  SI_ASSIGN_OR_RETURN(options.host_bytes, bytes_of("--memory", flags.memory));
  SI_ASSIGN_OR_RETURN(options.accelerator_bytes,
                      bytes_of("--accelerator-memory", flags.accelerator_memory));
  return options;
}

namespace {

/// "1,2,3".
Result<Tokens> numbers_of(const std::string& text) {
  Tokens tokens;
  const char* at = text.data();
  const char* const end = at + text.size();
  while (at < end) {
    int64_t token = 0;
    const auto [behind, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (behind != end && *behind != ',')) {
      return wrong(fmt::format("--prompt-tokens: '{}' is not a list of numbers", text),
                   "For example: --prompt-tokens 1,2,3");
    }
    tokens.push_back(token);
    at = behind == end ? end : behind + 1;
  }
  return tokens;
}

Status check_prompt(const Tokens& prompt, size_t number, const model::Architecture& model) {
  if (prompt.empty()) {
    return wrong(fmt::format("prompt {} is empty", number),
                 "The model needs a token to begin with.");
  }
  for (const int64_t token : prompt) {
    if (token >= 0 && token < int64_t{model.vocabulary}) continue;
    return wrong(fmt::format("prompt {} has token {}, and the model has {} tokens", number, token,
                             model.vocabulary),
                 "Use the tokenizer that the model was trained with.");
  }
  if (model.positions == 0 || prompt.size() < model.positions) return Status();
  return wrong(fmt::format("prompt {} has {} tokens, and the model knows {} positions", number,
                           prompt.size(), model.positions),
               "Make it shorter.");
}

// Shows a text that grows, each part of it once.
class GrowingText {
 public:
  /// The text so far. last: nothing follows. A last character that may still change waits.
  void show(std::string_view text, bool last) {
    constexpr std::string_view kIncomplete = "\xef\xbf\xbd";
    if (!last && text.ends_with(kIncomplete)) return;
    if (text.starts_with(said_)) {
      fmt::print("{}{}", text.substr(said_.size()), last ? "\n" : "");
    } else if (last) {
      fmt::print("\n{}\n", text);
    } else {
      return;
    }
    std::fflush(stdout);
    said_ = text;
  }

 private:
  std::string said_;
};

class Generation {
 public:
  explicit Generation(const GenerateFlags& flags)
      : flags_(flags), numbers_(!flags.prompt_tokens.empty()) {}

  Status open() {
    SI_ASSIGN_OR_RETURN(train::GeneratorOptions options, generator_options(flags_));
    SI_ASSIGN_OR_RETURN(generator_, train::Generator::open(std::move(options)));
    const model::Architecture& model = generator_->source().architecture;
    if (!numbers_) {
      SI_ASSIGN_OR_RETURN(codec_, TextCodec::open(generator_->text_form()));
    }
    for (const std::string& text : numbers_ ? flags_.prompt_tokens : flags_.prompts) {
      SI_ASSIGN_OR_RETURN(Tokens prompt,
                          numbers_ ? numbers_of(text) : codec_->encode(text, flags_.chat));
      SI_RETURN_IF_ERROR(check_prompt(prompt, prompts_.size() + 1, model));
      prompts_.push_back(std::move(prompt));
    }
    std::vector<uint64_t> lengths;
    for (const Tokens& prompt : prompts_) {
      const uint64_t wanted = prompt.size() + flags_.tokens;
      lengths.push_back(model.positions == 0 ? wanted
                                             : std::min<uint64_t>(wanted, model.positions));
      if (lengths.back() < wanted) cut_ = true;
    }
    positions_ = *std::ranges::max_element(lengths);
    return generator_->load(lengths);
  }

  Status run(std::stop_token stop) {
    for (const std::string& line : generator_->describe()) note(line);
    if (cut_)
      note(fmt::format("length: the model knows {} positions, and a text ends there", positions_));
    train::DecodeOptions options;
    options.tokens = flags_.tokens;
    options.positions = positions_;
    options.sampling = flags_.sampling;
    options.end_tokens = generator_->source().end_tokens;
    options.stop = std::move(stop);
    for (sample_ = 0; sample_ < flags_.samples; ++sample_) {
      options.sampling.seed = flags_.sampling.seed + sample_;
      SI_RETURN_IF_ERROR(run_sample(options));
    }
    return Status();
  }

 private:
  /// All prompts once.
  Status run_sample(const train::DecodeOptions& options) {
    // The prompts of a conversation are not shown, only the answers.
    shown_ = flags_.chat ? std::vector<Tokens>(prompts_.size()) : prompts_;
    made_.assign(prompts_.size(), {});
    ended_.assign(prompts_.size(), false);
    growing_ = GrowingText();
    if (shows_growth()) SI_RETURN_IF_ERROR(show_growth(/*last=*/false));
    const uint64_t begin_ns = base::now_ns();
    uint64_t count = 0;  // without those that end a text
    Status shown;
    Status generated = generator_->generate(prompts_, options, [&](size_t prompt, int64_t token) {
      ended_[prompt] = std::ranges::find(options.end_tokens, token) != options.end_tokens.end();
      if (ended_[prompt]) return;
      ++count;
      made_[prompt].push_back(token);
      shown_[prompt].push_back(token);
      if (shows_growth() && shown.ok()) shown = show_growth(/*last=*/false);
    });
    const double seconds = base::seconds_since(begin_ns);
    // The tokens that there are when it was stopped are shown as well.
    if (generated.ok() || generated.code() == ErrorCode::kCancelled) {
      SI_RETURN_IF_ERROR(shows_growth() ? show_growth(/*last=*/true) : show_all(options));
    }
    SI_RETURN_IF_ERROR(generated);
    const double rate = static_cast<double>(count) / std::max(seconds, 1e-9);
    note(fmt::format("{} tokens in {}, {} tokens/s", count, base::format_seconds(seconds),
                     rate < 100 ? fmt::format("{:.3g}", rate) : fmt::format("{:.0f}", rate)));
    return shown;
  }

  bool shows_growth() const { return prompts_.size() == 1 && flags_.samples == 1 && !flags_.json; }
  void note(const std::string& line) const {
    if (!flags_.json) fmt::print(stderr, "{}\n", line);
  }

  Result<std::string> text_of(const Tokens& tokens) {
    if (!numbers_) return codec_->decode(tokens);
    return fmt::format("{}", fmt::join(tokens, " "));
  }

  Status show_growth(bool last) {
    SI_ASSIGN_OR_RETURN(const std::string text, text_of(shown_.front()));
    growing_.show(text, last);
    return Status();
  }

  /// Why prompt i got no more tokens.
  std::string_view stop_of(size_t i, const train::DecodeOptions& options) const {
    if (ended_[i]) return "end";
    const uint64_t tokens = made_[i].size();
    if (tokens == options.tokens) return "tokens";
    return prompts_[i].size() + tokens >= options.positions ? "positions" : "interrupt";
  }

  Status show_all(const train::DecodeOptions& options) {
    for (size_t i = 0; i < shown_.size(); ++i) {
      if (!flags_.json) {
        SI_ASSIGN_OR_RETURN(const std::string text, text_of(shown_[i]));
        const std::string sample =
            flags_.samples == 1 ? "" : fmt::format(", sample {}", sample_ + 1);
        fmt::print("{}prompt {}{}:\n{}\n", i + sample_ == 0 ? "" : "\n", i + 1, sample, text);
        std::fflush(stdout);
        continue;
      }
      using Json = nlohmann::ordered_json;
      Json line{
          {"prompt_tokens", prompts_[i]}, {"tokens", made_[i]}, {"stop", stop_of(i, options)}};
      if (flags_.samples > 1) line["sample"] = sample_ + 1;
      if (!numbers_) {
        SI_ASSIGN_OR_RETURN(line["text"], codec_->continuation(prompts_[i], made_[i]));
      }
      fmt::print("{}\n", line.dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    return Status();
  }

  const GenerateFlags& flags_;
  const bool numbers_;  // tokens are given and shown as numbers
  std::unique_ptr<train::Generator> generator_;
  std::optional<TextCodec> codec_;
  std::vector<Tokens> prompts_;
  std::vector<Tokens> made_;   // behind each
  std::vector<Tokens> shown_;  // of these and the prompts
  std::vector<bool> ended_;    // by an end token
  uint64_t sample_ = 0;
  uint64_t positions_ = 0;
  bool cut_ = false;
  GrowingText growing_;
};

int run_generate(const GenerateFlags& flags) {
  if (!flags.batch.empty()) return run_batch(flags);
  if (!flags.out.empty() || flags.fresh || flags.keep || !flags.cache.empty() ||
      !flags.cache_format.empty()) {
    return report(wrong("--out, --fresh, --keep, --cache and --cache-format are of a file of "
                        "prompts",
                        "Add --batch FILE."),
                  kExitUsage);
  }
  if (flags.prompts.empty() == flags.prompt_tokens.empty()) {
    return report(wrong(flags.prompts.empty() ? "there is no prompt"
                                              : "--prompt and --prompt-tokens are both given",
                        "Add --prompt TEXT, or numbers with --prompt-tokens 1,2,3."),
                  kExitUsage);
  }
  if (const Status status = train::validate(flags.sampling); !status.ok()) {
    return report(status, kExitUsage);
  }
  if (flags.samples > 1 && flags.sampling.temperature == 0) {
    return report(wrong(fmt::format("--samples is {}, but --temperature is 0, and all of them "
                                    "would be the same",
                                    flags.samples),
                        "Add --temperature, e.g. 0.7, or leave --samples out."),
                  kExitUsage);
  }
  const Interrupt interrupt("stopping; press Ctrl-C again to stop at once");
  Generation generation(flags);
  Status status = generation.open();
  if (status.ok()) status = generation.run(interrupt.token());
  if (status.ok()) return kExitDone;
  return report(status, status.code() == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailed);
}

void add_batch_flags(CLI::App& command, GenerateFlags& flags) {
  constexpr const char* kGroup = "A file of prompts";
  command
      .add_option(
          "--batch", flags.batch,
          "File of prompts to answer many at once, a JSON object on each line: a request "
          "in OpenAI's batch form, or {\"id\", \"prompt\" | \"messages\" | \"tokens\", "
          "\"max_tokens\", \"temperature\", \"top_p\", \"top_k\", \"seed\", \"stop\"}. What "
          "a line leaves out the other flags say. Run again, the command goes on where it "
          "was interrupted")
      ->type_name("FILE")
      ->group(kGroup);
  command
      .add_option("--out", flags.out,
                  "File that the answers are written to as they are ready; FILE.journal beside it "
                  "is what an interrupted job goes on from")
      ->type_name("FILE")
      ->group(kGroup);
  command
      .add_option("--sequences", flags.sequences,
                  "Largest number of prompts that are answered at once; fewer where there is no "
                  "memory for their keys and values [64]")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 16))
      ->type_name("N")
      ->group(kGroup);
  command
      .add_option("--save-every", flags.save_every_s,
                  "Time of which a power cut takes the tokens, at most; a kill takes none [60s]")
      ->transform(
          CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"min", 60}, {"h", 3600}},
                                CLI::AsNumberWithUnit::CASE_SENSITIVE))
      ->type_name("TIME")
      ->group(kGroup);
  command
      .add_flag("--fresh", flags.fresh,
                "Start over: delete the answers and the journal that are there, and the keys and "
                "values in --cache")
      ->group(kGroup);
  command
      .add_flag("--keep", flags.keep,
                "Keep the journal, and keys and values in --cache, when all is answered")
      ->group(kGroup);
  command
      .add_option("--cache", flags.cache,
                  "Folder on a drive, or device of another machine, that keeps keys and values and "
                  "does the work on them; may be repeated [in memory]")
      ->allow_extra_args(false)
      ->type_name("DIR|grpc://HOST:PORT/NAME")
      ->group(kGroup);
  command
      .add_option(
          "--cache-format", flags.cache_format,
          "How keys and values are kept; q8 takes half of bf16's bytes, and the answers are "
          "others [that of the weights' type]")
      ->check(CLI::IsMember(base::enum_name_list<kernels::CacheFormat>()))
      ->type_name("bf16|f32|q8")
      ->group(kGroup);
  command
      .add_option(
          "--rated-endurance", flags.rated_endurance,
          "Bytes that may be written to each drive of --cache in its lifetime, from its data "
          "sheet (600TB): the job says what share it has written [as the run's recipe]")
      ->type_name("SIZE")
      ->group(kGroup);
  add_remote_flags(command, flags.remote);
}

}  // namespace

void add_generate(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("generate", kGenerateSummary);
  auto flags = std::make_shared<GenerateFlags>();
  command
      ->add_option("from", flags->from,
                   "Folder of a run, whose last committed weights are used, or of a model")
      ->required()
      ->type_name("RUN|DIR");
  command
      ->add_option("--prompt", flags->prompts,
                   "Text to continue; may be repeated, for several texts")
      ->allow_extra_args(false)
      ->type_name("TEXT");
  command
      ->add_option("--prompt-tokens", flags->prompt_tokens,
                   "Tokens to continue, as numbers: 1,2,3; the result is numbers, too")
      ->allow_extra_args(false)
      ->type_name("LIST");
  command
      ->add_option("--checkpoint", flags->checkpoint,
                   "Checkpoint to read in place of the run's devices, as for smartinf export")
      ->type_name("DIR");
  command->add_flag("--chat", flags->chat,
                    "Put each prompt into the model's chat template as the user's words");
  command->add_option("--tokens", flags->tokens, "Largest number of new tokens [128]")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 24))
      ->type_name("N");
  command
      ->add_option(
          "--samples", flags->samples,
          "Number of texts for each prompt, each drawn with a seed one higher than the one "
          "before [1]")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 20))
      ->type_name("N");
  command
      ->add_option(
          "--temperature", flags->sampling.temperature,
          "Number that divides the logits before a token is drawn; 0: always the likeliest token "
          "[0]")
      ->type_name("NUMBER");
  command
      ->add_option("--top-k", flags->sampling.top_k,
                   "Number of likeliest tokens to draw from; 0: all [0]")
      ->type_name("N");
  command
      ->add_option("--top-p", flags->sampling.top_p,
                   "Probability that the likeliest tokens to draw from have together [1]")
      ->type_name("NUMBER");
  command->add_option("--seed", flags->sampling.seed, "Seed of the random numbers [1]")
      ->type_name("N");
  command
      ->add_option("--memory", flags->memory,
                   "Memory of the host for the whole process; weights that do not fit are read for "
                   "every token [what is free]")
      ->type_name("SIZE");
  command
      ->add_option("--accelerator-memory", flags->accelerator_memory,
                   "Memory of the GPU [what is free]")
      ->type_name("SIZE");
  command->add_option("--accelerator", flags->accelerator, "Processor that computes [auto]")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->type_name("auto|cpu|cuda");
  command->add_option("--threads", flags->threads, "Threads that compute; 0: all cores [0]")
      ->check(CLI::Range(0u, 4096u))
      ->type_name("N");
  command
      ->add_option("--type", flags->type,
                   "Type of weights and compute [the run's; of a folder in f32: f32, else bf16]")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->type_name("f32|bf16");
  command
      ->add_option("--ignored-keys", flags->ignored_keys,
                   "Keys of config.json that you know to change nothing")
      ->delimiter(',')
      ->type_name("LIST");
  command->add_flag("--json", flags->json,
                    "Print one JSON object for each prompt: its tokens, the new ones, their text, "
                    "and what stopped it (end, tokens, positions, interrupt); with --batch one now "
                    "and then that says how far the job has come");
  add_batch_flags(*command, *flags);
  command->footer(
      "Text becomes tokens by the tokenizer in the model's folder, for which python3 needs the\n"
      "packages tokenizers and transformers; SMARTINF_PYTHON names another Python.\n\n"
      "Examples:\n"
      "  smartinf generate runs/quickstart --prompt 'def main' --temperature 0.7\n"
      "  smartinf generate models/mine --prompt 'Once' --prompt 'Never' --tokens 50\n"
      "  smartinf generate runs/chat --chat --prompt 'Who are you?' --memory 8GB\n"
      "  smartinf generate models/mine --batch prompts.jsonl --out answers.jsonl\n"
      "  smartinf generate models/mine --batch prompts.jsonl --out answers.jsonl --cache /nvme/kv");
  command->callback([flags, &run] { run = [flags] { return run_generate(*flags); }; });
}

}  // namespace smartinf::apps
