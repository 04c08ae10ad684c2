// smartinf bench attend: one layer's attention of a decode step over kept keys and values, beside
// reading as many bytes of memory.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/key_value_store.h"
#include "smartinf/kernels/update.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/kernel_timer.h"
#include "apps/smartinf/median.h"

namespace smartinf::apps {
namespace {

struct AttendOptions {
  uint32_t heads = 32;
  uint32_t kv_heads = 8;
  uint32_t head_width = 128;
  uint64_t tokens = 8192;
  uint32_t sequences = 16;
  kernels::CacheFormat format = kernels::CacheFormat::kBf16;
  uint32_t threads = 0;  // 0: all cores
  uint32_t repeat = 5;
  bool json = false;

  engine::KeyValueShape shape() const {
    return {
        .attention = {.block = {.kv_heads = kv_heads, .head_width = head_width, .format = format},
                      .heads = heads,
                      .scale = 1 / std::sqrt(static_cast<float>(head_width))},
        .layers = 1,
        .windows = {}};
  }
  /// Of all sequences, as they are kept.
  uint64_t bytes() const {
    return sequences * base::divide_up(tokens, uint64_t{kernels::kCacheBlockTokens}) *
           kernels::cache_block_bytes(shape().attention.block);
  }
};

/// Numbers that look like keys, values or queries.
class Numbers {
 public:
  std::vector<float> next(size_t n) {
    std::vector<float> numbers(n);
    for (float& number : numbers) {
      state_ = base::mix_seed(state_, 1);
      number = static_cast<float>(static_cast<int32_t>(state_ >> 32)) * 0x1p-31f;
    }
    return numbers;
  }

 private:
  uint64_t state_ = 1;
};

base::Status fill(engine::KeyValueStore& store, const AttendOptions& options) {
  const uint64_t row = uint64_t{options.kv_heads} * options.head_width;
  constexpr uint64_t kTokensAtOnce = 256;
  Numbers numbers;
  const std::vector<float> keys = numbers.next(kTokensAtOnce * row);
  const std::vector<float> values = numbers.next(kTokensAtOnce * row);
  for (uint32_t s = 0; s < options.sequences; ++s) {
    SI_RETURN_IF_ERROR(store.open(s, options.tokens));
    for (uint64_t t = 0; t < options.tokens; t += kTokensAtOnce) {
      SI_RETURN_IF_ERROR(store.append(s, 0, std::min(kTokensAtOnce, options.tokens - t),
                                      base::DataType::kF32, keys.data(), values.data()));
    }
  }
  return {};
}

struct Measured {
  std::vector<double> attend_s;
  std::vector<double> read_bytes_per_s;
};

/// Attends and reads in turn, so that a busy machine slows both.
base::Result<Measured> measure(engine::KeyValueStore& store, const AttendOptions& options) {
  const uint64_t width = uint64_t{options.heads} * options.head_width;
  const std::vector<float> queries = Numbers().next(options.sequences * width);
  std::vector<float> out(queries.size());
  std::vector<engine::AttendQuery> asked;
  for (uint32_t s = 0; s < options.sequences; ++s) {
    asked.push_back({s, queries.data() + s * width, out.data() + s * width});
  }
  base::ThreadTeam team(options.threads, "si-bench");
  SI_ASSIGN_OR_RETURN(const base::AlignedBuffer memory,
                      base::AlignedBuffer::allocate(std::min(options.bytes(), base::kGiB)));
  std::fill_n(memory.data(), memory.size(), std::byte{1});
  Measured measured;
  for (uint32_t i = 0; i <= options.repeat; ++i) {
    const double read_s = read_seconds(team, memory.bytes());
    const uint64_t start_ns = base::now_ns();
    SI_ASSIGN_OR_RETURN(const engine::AttendTicket ticket, store.begin_attend(0, asked));
    SI_RETURN_IF_ERROR(store.finish_attend(ticket));
    if (i == 0) continue;  // a warm-up
    measured.attend_s.push_back(base::seconds_since(start_ns));
    measured.read_bytes_per_s.push_back(static_cast<double>(memory.size()) / read_s);
  }
  return measured;
}

void print(const AttendOptions& options, const Measured& measured) {
  const double seconds = median(measured.attend_s);
  const double rate = static_cast<double>(options.bytes()) / seconds;
  const double read_rate = median(measured.read_bytes_per_s);
  const double tokens_per_s = options.sequences / seconds;
  const std::string format(base::enum_name(options.format));
  if (options.json) {
    const auto [fastest, slowest] =
        std::minmax_element(measured.attend_s.begin(), measured.attend_s.end());
    nlohmann::ordered_json json;
    json["isa"] = kernels::kernels().isa();
    json["format"] = format;
    json["heads"] = options.heads;
    json["kv_heads"] = options.kv_heads;
    json["head_width"] = options.head_width;
    json["tokens"] = options.tokens;
    json["sequences"] = options.sequences;
    json["threads"] = options.threads;
    json["bytes"] = options.bytes();
    json["bytes_per_s"] = rate;
    json["bytes_per_s_min"] = static_cast<double>(options.bytes()) / *slowest;
    json["bytes_per_s_max"] = static_cast<double>(options.bytes()) / *fastest;
    json["read_bytes_per_s"] = read_rate;
    json["share_of_read"] = rate / read_rate;
    json["layer_tokens_per_s"] = tokens_per_s;
    fmt::print("{}\n", json.dump());
    return;
  }
  fmt::print("{} sequences of {} tokens in {}, {} queries for each of {} heads of {}: {}\n",
             options.sequences, options.tokens, format, options.heads / options.kv_heads,
             options.kv_heads, options.head_width, base::format_bytes(options.bytes()));
  fmt::print("attend {}, {:.2f} of reading memory at {}; {:.1f} tokens/s of one layer\n",
             base::format_rate(rate), rate / read_rate, base::format_rate(read_rate), tokens_per_s);
}

base::Status bench_attend(AttendOptions options) {
  SI_RETURN_IF_ERROR(kernels::forced_isa_status());
  if (options.heads % options.kv_heads != 0) {
    return {base::ErrorCode::kInvalidArgument, "--heads is not a multiple of --kv-heads"};
  }
  if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
  const std::unique_ptr<engine::KeyValueStore> store =
      engine::make_memory_store(options.shape(), options.bytes(), options.threads);
  SI_RETURN_IF_ERROR(fill(*store, options));
  SI_ASSIGN_OR_RETURN(const Measured measured, measure(*store, options));
  print(options, measured);
  return {};
}

}  // namespace

void add_bench_attend(CLI::App& bench, Run& run) {
  auto options = std::make_shared<AttendOptions>();
  auto format = std::make_shared<std::string>("bf16");
  CLI::App* command = bench.add_subcommand(
      "attend", "Time attention over kept keys and values beside reading as many bytes");
  const auto count = [&](const char* flag, uint32_t& value, const char* help, uint32_t most) {
    command->add_option(flag, value, help)->check(CLI::Range(1u, most))->capture_default_str();
  };
  count("--heads", options->heads, "Heads of queries", 4096);
  count("--kv-heads", options->kv_heads, "Heads of keys and values", 4096);
  count("--head-width", options->head_width, "Channels of a head", 4096);
  command->add_option("--tokens", options->tokens, "Tokens of each sequence")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 24))
      ->capture_default_str();
  count("--sequences", options->sequences, "Sequences, each with one query", 65536);
  command->add_option("--format", *format, "How keys and values are kept")
      ->check(CLI::IsMember(base::enum_name_list<kernels::CacheFormat>()))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "Threads that attend [all cores]")
      ->check(CLI::Range(1u, 1024u));
  count("--repeat", options->repeat, "Number of runs, of which the median is reported", 1000);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->footer(
      "Examples:\n"
      "  smartinf bench attend --heads 32 --kv-heads 8 --head-width 128 --tokens 8192\n"
      "  smartinf bench attend --format q8 --threads 2 --json");
  command->callback([options, format, &run] {
    options->format = *base::enum_from_name<kernels::CacheFormat>(*format);
    run = [options] {
      const base::Status status = bench_attend(*options);
      if (status.ok()) return kExitDone;
      fmt::print(stderr, "smartinf bench attend: {}\n", status.to_string());
      return kExitFailed;
    };
  });
}

}  // namespace smartinf::apps
