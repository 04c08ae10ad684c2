// smartinf generate --batch: answers a file of prompts; run again, it goes on.
#include <algorithm>
#include <array>
#include <bit>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/checksum.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/enum_names.h"
#include "smartinf/base/file.h"
#include "smartinf/base/traffic.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/device_key_value_store.h"
#include "smartinf/engine/key_value_store.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/engine/memory.h"
#include "smartinf/model/architecture.h"
#include "smartinf/plan/inference_memory.h"
#include "smartinf/storage/erase.h"
#include "smartinf/storage/store.h"
#include "smartinf/train/batch/batch_job.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/generate_flags.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/progress.h"
#include "apps/smartinf/text_codec.h"

namespace smartinf::apps {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;
using train::BatchProgress;

/// One tokenizer for the whole job, or the next one where a text has ended it.
class LineCoder final : public train::TextCoder {
 public:
  LineCoder(train::TextForm form, bool chat) : form_(std::move(form)), chat_(chat) {}

  Status open() {
    SI_ASSIGN_OR_RETURN(codec_, TextCodec::open(form_));
    // Only one that answers has started.
    const Status answers = codec_->encode("a").status();
    return answers.code() == ErrorCode::kFailedPrecondition ? answers : Status();
  }

  Result<std::vector<int64_t>> encode(const train::PromptLine& line) override {
    Result<std::vector<int64_t>> tokens =
        line.messages.empty() ? codec_->encode(line.text, chat_)
                              : codec_->encode_messages(nlohmann::json::parse(line.messages));
    if (tokens.status().code() != ErrorCode::kFailedPrecondition) return tokens;
    SI_RETURN_IF_ERROR(open());
    return Status(ErrorCode::kInvalidArgument, std::move(tokens).status().what());
  }
  Result<std::string> decode(std::span<const int64_t> tokens) override {
    return codec_->decode(tokens);
  }
  Result<std::string> continuation(std::span<const int64_t> prompt,
                                   std::span<const int64_t> made) override {
    return codec_->continuation(prompt, made);
  }

 private:
  train::TextForm form_;
  bool chat_;
  std::optional<TextCodec> codec_;
};

/// What all of a tokenizer's files say.
Result<uint64_t> tokenizer_digest(const train::TextForm& form) {
  uint64_t digest = 0;
  const auto add = [&](std::string_view text) {
    digest = base::checksum(std::as_bytes(std::span(text)), digest + 1);
  };
  if (form.tokenizer.empty()) return digest;
  if (form.tokenizer.ends_with(".json")) {
    SI_ASSIGN_OR_RETURN(const std::string text,
                        base::read_text_file(form.tokenizer, "cannot read the tokenizer",
                                             train::kTokenizerBytesMax));
    add(text);
    return digest;
  }
  SI_ASSIGN_OR_RETURN(const train::TextFiles files, train::read_model_files(form.tokenizer));
  for (const auto& [name, text] : files) {
    add(name);
    add(text);
  }
  return digest;
}

// What a job says while it runs: for people on standard error, or as JSON lines.
class BatchScreen {
 public:
  BatchScreen(bool json, const std::stop_token& stop) : json_(json), bar_("", stop) {}

  /// Bytes that all drives together may write in their rated life; 0: not known.
  void set_rated(uint64_t bytes) { rated_bytes_ = bytes; }

  void note(const std::string& line) {
    if (!json_) fmt::print(stderr, "{}\n", line);
  }
  /// store: on devices; or null.
  void show(const BatchProgress& progress, const engine::KeyValueStore* store) {
    if (last_.shared_tokens == 0 && progress.shared_tokens > 0) {
      bar_.clear();
      note(
          fmt::format("prompts: {} of the first {} tokens begin several prompts, and are computed "
                      "and kept once for all of them",
                      progress.shared_tokens, progress.prompt_tokens));
    }
    last_ = progress;
    if (store != nullptr) {
      const base::TrafficReading traffic = store->traffic();
      read_bytes_ = traffic.up(base::TrafficKind::kCache);
      written_bytes_ = traffic.down(base::TrafficKind::kCache);
      wait_s_ = store->wait_seconds();
    }
    if (!json_) {
      bar_.rename(text_of(progress));
      (void)bar_(progress.answered, progress.prompts);  // the job heeds the stop itself
    } else if (base::seconds_since(shown_ns_) >= kJsonSeconds) {
      print_json();
    }
  }
  void end(bool done) {
    if (json_) return print_json();
    bar_.clear();
    note(text_of(last_) + (done ? "" : "; the same command goes on from here"));
  }

 private:
  static constexpr double kJsonSeconds = 10;

  static double rate(uint64_t count, double seconds) {
    return static_cast<double>(count) / std::max(seconds, 1e-9);
  }
  std::string text_of(const BatchProgress& progress) const {
    std::string text = fmt::format("{} of {} answered", progress.answered, progress.prompts);
    if (progress.refused > 0) text += fmt::format(", {} with an error", progress.refused);
    if (progress.lost > 0) text += fmt::format(", {} computed again", progress.lost);
    if (progress.active > 0) text += fmt::format(", {} at once", progress.active);
    if (progress.tokens > 0) {
      text += fmt::format(", {:.3g} tokens/s", rate(progress.tokens, progress.token_seconds));
    }
    if (progress.prompt_tokens > 0) {
      text += fmt::format(", prompts {:.3g} tokens/s",
                          rate(progress.prompt_tokens, progress.prompt_seconds));
      if (progress.shared_tokens > 0) {
        text +=
            fmt::format(" ({:.0f} % shared)", 100.0 * static_cast<double>(progress.shared_tokens) /
                                                  static_cast<double>(progress.prompt_tokens));
      }
    }
    if (written_bytes_ > 0) {
      text += fmt::format("; drives: {} read, waited for {:.0f} % of the time, {} written",
                          base::format_rate(rate(read_bytes_, progress.token_seconds)),
                          100 * wait_s_ / std::max(progress.token_seconds, 1e-9),
                          base::format_bytes(written_bytes_));
      if (rated_bytes_ > 0) {
        text += fmt::format(" ({:.2g} % of their rated life)", 100 * life_share());
      }
    }
    return text;
  }
  double life_share() const {
    return static_cast<double>(written_bytes_) / static_cast<double>(rated_bytes_);
  }
  void print_json() {
    shown_ns_ = base::now_ns();
    nlohmann::ordered_json line{{"answered", last_.answered},
                                {"prompts", last_.prompts},
                                {"refused", last_.refused},
                                {"active", last_.active},
                                {"lost", last_.lost},
                                {"tokens", last_.tokens},
                                {"token_seconds", last_.token_seconds},
                                {"prompt_tokens", last_.prompt_tokens},
                                {"shared_tokens", last_.shared_tokens},
                                {"prompt_seconds", last_.prompt_seconds},
                                {"cache_wait_seconds", wait_s_},
                                {"cache_read_bytes", read_bytes_},
                                {"cache_written_bytes", written_bytes_}};
    if (rated_bytes_ > 0) line["rated_life_share"] = life_share();
    fmt::print("{}\n", line.dump());
    std::fflush(stdout);
  }

  bool json_;
  Progress bar_;
  uint64_t shown_ns_ = base::now_ns();
  BatchProgress last_;
  double wait_s_ = 0;        // of token_seconds, for devices
  uint64_t read_bytes_ = 0;  // by drives, of keys and values
  uint64_t written_bytes_ = 0;
  uint64_t rated_bytes_ = 0;
};

Status check_flags(const GenerateFlags& flags) {
  if (flags.out.empty()) {
    return Status(ErrorCode::kInvalidArgument, "there is no file for the answers",
                  "Add --out answers.jsonl");
  }
  if (!flags.prompts.empty() || !flags.prompt_tokens.empty() || flags.samples != 1) {
    return Status(ErrorCode::kInvalidArgument,
                  "--batch is given together with --prompt, --prompt-tokens or --samples",
                  "Put all prompts into the file, a line for each text that is wanted");
  }
  return train::validate(flags.sampling);
}

class Batch {
 public:
  Batch(const GenerateFlags& flags, std::stop_token stop)
      : flags_(flags), stop_(std::move(stop)), screen_(flags.json, stop_) {}

  Status run() {
    SI_ASSIGN_OR_RETURN(files_, train::JobFiles::lock(flags_.out, flags_.fresh));
    SI_ASSIGN_OR_RETURN(prompts_,
                        train::BatchPrompts::open(flags_.batch, {flags_.tokens, flags_.sampling}));
    SI_ASSIGN_OR_RETURN(train::GeneratorOptions options, generator_options(flags_));
    host_bytes_ = options.host_bytes;
    SI_ASSIGN_OR_RETURN(const uint64_t rated, rated_bytes(options.updater.devices));
    screen_.set_rated(rated);
    SI_ASSIGN_OR_RETURN(generator_, train::Generator::open(std::move(options)));
    const train::ModelSource& source = generator_->source();
    LineCoder coder(generator_->text_form(), flags_.chat);
    if (prompts_->needs_text) SI_RETURN_IF_ERROR(coder.open());
    SI_ASSIGN_OR_RETURN(const uint64_t longest,
                        train::longest_sequence(*prompts_, &coder, source.architecture.positions));
    sources_ = engine::sources_at(flags_.cache, storage::RingKind::kAuto, flags_.remote);
    SI_RETURN_IF_ERROR(load(longest));
    keep_some(longest);
    SI_ASSIGN_OR_RETURN(const train::JobIdentity identity, identity_of());
    SI_RETURN_IF_ERROR(files_->start(identity, prompts_->file->lines(), notes()));
    describe();
    Result<std::unique_ptr<train::SequenceDecoder>> decoder = open_decoder();
    if (!decoder.ok()) {
      files_->forget();
      return decoder.status();
    }

    train::BatchOptions job;
    job.vocabulary = source.architecture.vocabulary;
    job.positions = source.architecture.positions;
    job.longest = longest;
    job.end_tokens = source.end_tokens;
    job.sequences = sequences_;
    job.save_every_s = flags_.save_every_s;
    job.keep_journal = true;  // until keys and values are deleted
    job.stop = stop_;
    const Status ran =
        train::BatchJob(*prompts_, *files_, &coder, **decoder, job)
            .run([&](const BatchProgress& progress) { screen_.show(progress, store_); });
    screen_.end(ran.ok());
    SI_RETURN_IF_ERROR(ran);
    decoder->reset();
    if (!flags_.keep) delete_cache();
    return files_->finish(flags_.keep);
  }

 private:
  /// Of all drives of --cache: --rated-endurance, or what the run's recipe says of a drive; 0:
  /// neither does of one of them.
  Result<uint64_t> rated_bytes(const std::vector<engine::DeviceOptions>& devices) const {
    SI_ASSIGN_OR_RETURN(const uint64_t each, bytes_of("--rated-endurance", flags_.rated_endurance));
    uint64_t sum = 0;
    for (const std::string& path : flags_.cache) {
      uint64_t one = each;
      for (const engine::DeviceOptions& device : devices) {
        std::error_code error;
        if (each == 0 && std::filesystem::equivalent(device.path, path, error)) {
          one = device.rated_endurance_bytes;
        }
      }
      if (one == 0) return 0;
      sum += one;
    }
    return sum;
  }

  Status load(uint64_t longest) {
    longest = std::max<uint64_t>(longest, 1);
    const uint64_t wanted = std::clamp<uint64_t>(prompts_->prompts, 1, flags_.sequences);
    const auto bytes = [&](const engine::KeyValueShape& model, uint64_t most) {
      const engine::KeyValueShape shape = in_format(model);
      const uint64_t block = kernels::cache_block_bytes(shape.attention.block);
      const uint64_t room = room_beside_weights(model);
      const auto devices = static_cast<uint64_t>(std::ranges::count_if(
          flags_.cache, [](const std::string& path) { return !serve::is_remote(path); }));
      device_bytes_ = plan::key_value_device_bytes(
          room, devices, block, engine::DeviceStoreOptions().device_memory_bytes);
      const uint64_t fixed = devices * device_bytes_;
      // Beside devices: the block of each layer that is not whole.
      const uint64_t one =
          sources_.empty() ? engine::memory_store_bytes(shape, longest) : shape.layers * block;
      store_bytes_ = fixed + std::clamp(room - std::min(room, fixed), one, most * one);
      const uint64_t fit = (store_bytes_ - fixed) / one;
      // In memory more of the shorter ones may fit.
      sequences_ = sources_.empty() && most == wanted ? flags_.sequences : fit;
      room_ = fmt::format("keys and values: {} for {} sequences at once, of up to {} tokens{}",
                          base::format_bytes(store_bytes_), fit, longest,
                          sources_.empty() ? "" : ", beside " + device_names());
      return store_bytes_;
    };
    return generator_->load({.sequences = wanted,
                             .longest = longest,
                             .fewer = true,
                             .own_store = !flags_.cache.empty() || !flags_.cache_format.empty(),
                             .store_bytes = bytes});
  }

  /// Memory that nothing else has a use for keeps keys and values beside their drives.
  void keep_some(uint64_t longest) {
    const auto is_local = [](const std::string& path) { return !serve::is_remote(path); };
    const auto local = static_cast<uint64_t>(std::ranges::count_if(flags_.cache, is_local));
    if (local == 0 || device_bytes_ < csd::kCacheWorkBytes) return;
    const engine::KeyValueShape shape = in_format(generator_->key_value_shape());
    const uint64_t block = kernels::cache_block_bytes(shape.attention.block);
    const uint64_t blocks =
        base::divide_up(longest, uint64_t{kernels::kCacheBlockTokens}) * shape.layers;
    // Of what nobody has asked for, half is left to others.
    const uint64_t left = generator_->memory_left() / (host_bytes_ != 0 ? 1 : 2);
    const uint64_t each = std::min(left, sequences_ * blocks * block) / local / block * block;
    for (const std::string& path : flags_.cache) kept_bytes_.push_back(is_local(path) ? each : 0);
    if (each > 0)
      room_ += fmt::format("; {} of them in memory, too", base::format_bytes(each * local));
  }

  engine::KeyValueShape in_format(engine::KeyValueShape shape) const {
    if (!flags_.cache_format.empty()) {
      shape.attention.block.format =
          *base::enum_from_name<kernels::CacheFormat>(flags_.cache_format);
    }
    return shape;
  }

  /// Devices of this start, and the number by which devices know the job's keys and values.
  train::JobIdentity notes() const {
    return {{kCache, device_names()}, {kJobName, storage::make_run_id().to_string()}};
  }

  std::string device_names() const {
    std::vector<std::string> names;
    for (const std::string& path : flags_.cache) {
      std::error_code error;
      const auto place = std::filesystem::weakly_canonical(std::filesystem::absolute(path), error);
      names.push_back(serve::is_remote(path) || error ? path : place.string());
    }
    return fmt::format("{}", fmt::join(names, ", "));
  }

  Result<std::unique_ptr<train::SequenceDecoder>> open_decoder() {
    train::Generator::DecoderOptions options;
    options.store_works_beside = !sources_.empty();
    options.stop = stop_;
    const engine::KeyValueShape shape = in_format(generator_->key_value_shape());
    if (!sources_.empty()) {
      SI_ASSIGN_OR_RETURN(options.store, open_devices(shape));
      store_ = options.store.get();
    } else if (!flags_.cache_format.empty()) {
      options.format = shape.attention.block.format;
    }
    return generator_->decoder(std::move(options));
  }

  Result<std::unique_ptr<engine::KeyValueStore>> open_devices(const engine::KeyValueShape& shape) {
    engine::DeviceStoreOptions options;
    options.shape = shape;
    // None: of a job that an older version began in memory.
    const std::string number = files_->found(kJobName).value_or("");
    options.job = std::bit_cast<std::array<uint8_t, 16>>(
        std::array{base::checksum(std::as_bytes(std::span(number))),
                   base::checksum(std::as_bytes(std::span(number)), 1)});
    options.identity = fmt::format("the batch job {:016x}", files_->job());
    options.afresh = flags_.fresh;
    options.device_memory_bytes = device_bytes_;
    options.kept_bytes = kept_bytes_;
    auto store = engine::make_device_store(sources_, options);
    if (store.status().code() != ErrorCode::kCorrupt) return store;
    screen_.note("keys and values: " + store.status().to_string());
    screen_.note("keys and values: all of them are computed again");
    options.afresh = true;
    return engine::make_device_store(sources_, options);
  }

  /// The answers are there, whatever becomes of it.
  void delete_cache() {
    Status erased = engine::erase_device_store(sources_);
    // Beside a run's state, which stays.
    for (const std::string& path : flags_.cache) {
      if (erased.ok() && !serve::is_remote(path)) erased = storage::erase_cache(path);
    }
    if (!erased.ok()) {
      screen_.note("keys and values: they could not be deleted: " + erased.to_string());
    }
  }

  uint64_t room_beside_weights(const engine::KeyValueShape& shape) const {
    const uint64_t value_bytes = shape.attention.block.format == kernels::CacheFormat::kF32 ? 4 : 2;
    const uint64_t weights =
        value_bytes * model::make_units(generator_->source().architecture).back().end();
    const uint64_t resident = engine::resident_memory_bytes();
    const uint64_t limit =
        host_bytes_ != 0 ? host_bytes_ : resident + engine::available_memory_bytes();
    return plan::key_value_room(limit, resident + weights);
  }

  Result<train::JobIdentity> identity_of() {
    Progress progress("reading the weights", stop_);
    SI_ASSIGN_OR_RETURN(
        train::JobIdentity identity,
        generator_->identity([&](uint64_t done, uint64_t total) { return progress(done, total); }));
    SI_ASSIGN_OR_RETURN(const uint64_t tokenizer, tokenizer_digest(generator_->text_form()));
    const auto add = [&](const char* name, const auto& value) {
      identity.emplace_back(name, fmt::format("{}", value));
    };
    add("the digest of the prompts", fmt::format("{:016x}", prompts_->file->digest()));
    add("the digest of the tokenizer", fmt::format("{:016x}", tokenizer));
    add("end tokens", fmt::format("{}", fmt::join(generator_->source().end_tokens, ",")));
    add("--tokens", flags_.tokens);
    add("--temperature", flags_.sampling.temperature);
    add("--top-k", flags_.sampling.top_k);
    add("--top-p", flags_.sampling.top_p);
    add("--seed", flags_.sampling.seed);
    add("--chat", flags_.chat);
    const engine::KeyValueShape shape = in_format(generator_->key_value_shape());
    add("--cache-format", base::enum_name(shape.attention.block.format));
    return identity;
  }

  void describe() {
    for (const std::string& line : generator_->describe()) screen_.note(line);
    screen_.note(room_);
    screen_.note(fmt::format(
        "prompts: {} in {}{}", prompts_->prompts, flags_.batch,
        prompts_->wrong == 0 ? "" : fmt::format(", of which {} cannot be used", prompts_->wrong)));
    for (const std::string& notice : files_->notices()) screen_.note("answers: " + notice);
    if (files_->answers() > 0 || files_->begun() > 0) {
      screen_.note(fmt::format("answers: goes on behind {}, and inside {} more", files_->answers(),
                               files_->begun()));
    }
    if (const std::string begun = files_->found(kCache).value_or(""); begun != device_names()) {
      const auto named = [](const std::string& names) { return names.empty() ? "memory" : names; };
      screen_.note(fmt::format(
          "keys and values: in {}; the job was begun with {}: what is not there is computed again",
          named(device_names()), named(begun)));
    }
  }

  /// In the journal's header: random, by which devices know the job's keys and values.
  static constexpr const char* kJobName = "the number of its keys and values";
  static constexpr const char* kCache = "--cache";

  const GenerateFlags& flags_;
  const std::stop_token stop_;
  BatchScreen screen_;
  uint64_t host_bytes_ = 0;  // 0: what is free
  std::string room_;         // for people
  uint64_t store_bytes_ = 0;   // of keys and values
  uint64_t device_bytes_ = 0;  // of them, for each device
  std::vector<uint64_t> kept_bytes_;  // by device, beside it
  uint64_t sequences_ = 0;            // at once
  engine::DeviceSources sources_;
  const engine::KeyValueStore* store_ = nullptr;  // on devices; the decoder's
  std::unique_ptr<train::JobFiles> files_;
  std::optional<train::BatchPrompts> prompts_;
  std::unique_ptr<train::Generator> generator_;
};

}  // namespace

int run_batch(const GenerateFlags& flags) {
  if (const Status status = check_flags(flags); !status.ok()) return report(status, kExitUsage);
  const Interrupt interrupt("saving; press Ctrl-C again to stop at once");
  const Status status = Batch(flags, interrupt.token()).run();
  if (status.ok()) return kExitDone;
  return report(status, status.code() == ErrorCode::kInvalidArgument ? kExitUsage : kExitFailed);
}

}  // namespace smartinf::apps
