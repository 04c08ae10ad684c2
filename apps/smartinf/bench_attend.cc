// smartinf bench attend: one layer's attention of a decode step over kept keys and values, in
// memory beside reading as many bytes of it, or on drives beside the same reads alone.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/base/units.h"
#include "smartinf/csd/messages/cache/cache_scans.h"
#include "smartinf/engine/device_key_value_store.h"
#include "smartinf/engine/key_value_store.h"
#include "smartinf/engine/local_source.h"
#include "smartinf/kernels/update.h"
#include "smartinf/serve/options.h"
#include "smartinf/storage/cache_file.h"
#include "smartinf/storage/file_descriptor.h"
#include "smartinf/storage/ring.h"

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
  std::vector<std::string> devices;  // empty: memory
  uint32_t threads = 0;              // 0: all cores
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

// ---- Drives.

constexpr uint32_t kReadsAtOnce = csd::cache_reads_at_once(storage::RingOptions().depth);
constexpr uint64_t kBytesOfARun = 2 * base::kGiB;

/// Reads a device's file of keys and values from its first block to its end, over and over.
class BlockReader {
 public:
  static base::Result<std::unique_ptr<BlockReader>> open(const std::string& device,
                                                         uint64_t block_bytes) {
    auto reader = std::make_unique<BlockReader>();
    reader->path_ = (std::filesystem::path(device) / "smartinf.cache").string();
    reader->file_ =
        storage::FileDescriptor(::open(reader->path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
    if (!reader->file_.is_open()) return base::errno_status(errno, "cannot read", reader->path_);
    std::error_code error;
    reader->end_ = std::filesystem::file_size(reader->path_, error);
    reader->size_ = std::max<uint64_t>(1, csd::kCacheReadBytesMax / block_bytes) * block_bytes;
    if (error || reader->end_ < storage::kCacheDataOffset + reader->size_) {
      return base::Status(base::ErrorCode::kInvalidArgument,
                          "a device has less than one read of " + base::format_bytes(reader->size_),
                          "Give more --tokens or --sequences.");
    }
    SI_ASSIGN_OR_RETURN(reader->ring_, storage::make_ring({.depth = kReadsAtOnce}));
    SI_ASSIGN_OR_RETURN(const uint32_t index,
                        reader->ring_->add_file(reader->file_.get(), reader->path_));
    SI_ASSIGN_OR_RETURN(reader->memory_,
                        base::AlignedBuffer::allocate(kReadsAtOnce * reader->size_));
    (void)reader->ring_->register_memory(reader->memory_.bytes());
    for (size_t i = 0; i < kReadsAtOnce; ++i) {
      reader->reads_[i].file = index;
      reader->reads_[i].buffer = reader->memory_.bytes().subspan(i * reader->size_, reader->size_);
    }
    return reader;
  }

  base::Status read(uint64_t bytes) {
    left_ = bytes;
    uint32_t in_flight = 0;
    for (storage::IoRequest& read : reads_) {
      SI_ASSIGN_OR_RETURN(const bool started, start(read));
      in_flight += started ? 1 : 0;
    }
    while (in_flight > 0) {
      std::array<storage::IoRequest*, kReadsAtOnce> done{};
      SI_ASSIGN_OR_RETURN(const size_t count, ring_->reap(done, std::chrono::seconds(1)));
      for (size_t i = 0; i < count; ++i) {
        if (done[i]->outcome < 0) {
          return base::errno_status(static_cast<int>(-done[i]->outcome), "cannot read", path_);
        }
        SI_ASSIGN_OR_RETURN(const bool started, start(*done[i]));
        in_flight -= started ? 0 : 1;
      }
    }
    return {};
  }

 private:
  base::Result<bool> start(storage::IoRequest& read) {
    if (left_ < size_) return false;
    left_ -= size_;
    if (at_ + size_ > end_) at_ = storage::kCacheDataOffset;
    read.offset_bytes = at_;
    at_ += size_;
    storage::IoRequest* const one = &read;
    SI_RETURN_IF_ERROR(ring_->submit({&one, 1}));
    return true;
  }

  std::string path_;
  storage::FileDescriptor file_;
  uint64_t end_ = 0, size_ = 0, at_ = storage::kCacheDataOffset, left_ = 0;
  base::AlignedBuffer memory_;
  std::array<storage::IoRequest, kReadsAtOnce> reads_;
  std::unique_ptr<storage::Ring> ring_;  // destroyed first
};

/// Of all devices together, reading so many bytes each.
class DriveReaders {
 public:
  base::Status open(const AttendOptions& options) {
    const uint64_t block_bytes = kernels::cache_block_bytes(options.shape().attention.block);
    for (const std::string& device : options.devices) {
      SI_ASSIGN_OR_RETURN(readers_.emplace_back(), BlockReader::open(device, block_bytes));
    }
    return {};
  }
  base::Result<double> seconds(uint64_t bytes_each) {
    std::vector<base::Status> read(readers_.size());
    base::ThreadTeam team(static_cast<uint32_t>(read.size()), "si-bench");
    const uint64_t start_ns = base::now_ns();
    team.run(read.size(), [&](uint32_t, size_t d) { read[d] = readers_[d]->read(bytes_each); });
    const double seconds = base::seconds_since(start_ns);
    for (base::Status& one : read) SI_RETURN_IF_ERROR(std::move(one));
    return seconds;
  }

 private:
  std::vector<std::unique_ptr<BlockReader>> readers_;
};

/// Attends from drives, two halves of the sequences in turn as a decoder does, and reads the same
/// with nothing beside it. What the drives have read in the time counts, not what was there before.
base::Result<Measured> measure_drives(engine::KeyValueStore& store, const AttendOptions& options) {
  const uint64_t width = uint64_t{options.heads} * options.head_width;
  const std::vector<float> queries = Numbers().next(options.sequences * width);
  std::vector<float> out(queries.size());
  std::array<std::vector<engine::AttendQuery>, 2> halves;
  for (uint32_t s = 0; s < options.sequences; ++s) {
    halves[s * 2 / options.sequences].push_back(
        {s, queries.data() + s * width, out.data() + s * width});
  }
  const uint64_t passes = base::divide_up(kBytesOfARun, options.bytes());
  const auto read_bytes = [&] { return store.traffic().up(base::TrafficKind::kCache); };
  const uint64_t bytes_each = passes * options.bytes() / options.devices.size();
  DriveReaders readers;
  SI_RETURN_IF_ERROR(readers.open(options));
  Measured measured;
  for (uint32_t i = 0; i <= options.repeat; ++i) {
    // Until the devices have read ahead as far as they do.
    for (uint64_t before = ~uint64_t{0}; before != read_bytes();) {
      before = read_bytes();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    SI_ASSIGN_OR_RETURN(const double read_s, readers.seconds(bytes_each));
    std::array<std::optional<engine::AttendTicket>, 2> under_way;
    const uint64_t before = read_bytes();
    const uint64_t start_ns = base::now_ns();
    for (uint64_t pass = 0; pass <= passes; ++pass) {
      for (size_t half = 0; half < 2; ++half) {
        if (under_way[half]) SI_RETURN_IF_ERROR(store.finish_attend(*under_way[half]));
        if (pass == passes || halves[half].empty()) continue;
        SI_ASSIGN_OR_RETURN(under_way[half], store.begin_attend(0, halves[half]));
      }
    }
    const double attend_s = base::seconds_since(start_ns);
    if (i == 0) continue;  // a warm-up
    // The time of all sequences once.
    measured.attend_s.push_back(attend_s * static_cast<double>(options.bytes()) /
                                static_cast<double>(read_bytes() - before));
    measured.read_bytes_per_s.push_back(static_cast<double>(bytes_each * options.devices.size()) /
                                        read_s);
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
    json["devices"] = options.devices.size();
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
  fmt::print("attend {}, {:.2f} of {} at {}; {:.1f} tokens/s of one layer\n",
             base::format_rate(rate), rate / read_rate,
             options.devices.empty() ? "reading memory" : "the same reads alone",
             base::format_rate(read_rate), tokens_per_s);
}

base::Status bench_drives(const AttendOptions& options) {
  if (options.tokens % kernels::kCacheBlockTokens != 0) {
    return {base::ErrorCode::kInvalidArgument, "--tokens is not a multiple of 32",
            "Devices keep whole blocks of 32 tokens."};
  }
  engine::UpdaterOptions engine;
  for (const std::string& path : options.devices) {
    if (serve::is_remote(path)) {
      return {base::ErrorCode::kUnsupported, "--device " + path + " is another machine's",
              "Run smartinf bench attend there."};
    }
    engine::DeviceOptions& device = engine.devices.emplace_back();
    device.path = path;
    device.threads = std::max(1u, options.threads / static_cast<uint32_t>(options.devices.size()));
    device.bandwidth = 1;
  }
  const engine::DeviceSources sources = engine::local_sources(engine);
  engine::DeviceStoreOptions of_store;
  of_store.shape = options.shape();
  of_store.job = storage::make_run_id().bytes;
  of_store.identity = "smartinf bench attend";
  SI_ASSIGN_OR_RETURN(std::unique_ptr<engine::KeyValueStore> store,
                      engine::make_device_store(sources, of_store));
  base::Result<Measured> measured = [&]() -> base::Result<Measured> {
    SI_RETURN_IF_ERROR(fill(*store, options));
    SI_RETURN_IF_ERROR(store->save());
    return measure_drives(*store, options);
  }();
  store.reset();
  const base::Status erased = engine::erase_device_store(sources);
  SI_RETURN_IF_ERROR(measured.status());
  print(options, *measured);
  return erased;
}

base::Status bench_attend(AttendOptions options) {
  SI_RETURN_IF_ERROR(kernels::forced_isa_status());
  if (options.heads % options.kv_heads != 0) {
    return {base::ErrorCode::kInvalidArgument, "--heads is not a multiple of --kv-heads"};
  }
  if (options.threads == 0) options.threads = std::max(1u, std::thread::hardware_concurrency());
  if (!options.devices.empty()) return bench_drives(options);
  const std::unique_ptr<engine::KeyValueStore> store = engine::make_memory_store(
      options.shape(), options.bytes(), engine::make_decoder_team(options.threads));
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
      "attend",
      "Time attention over kept keys and values, in memory or on drives, beside reading as many "
      "bytes");
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
  command
      ->add_option("--device", options->devices,
                   "Folder on a drive that keeps the keys and values, and is made where it is not "
                   "there; may be repeated [memory]")
      ->allow_extra_args(false)
      ->type_name("DIR");
  command->add_option("--threads", options->threads, "Threads that attend [all cores]")
      ->check(CLI::Range(1u, 1024u));
  count("--repeat", options->repeat, "Number of runs, of which the median is reported", 1000);
  command->add_flag("--json", options->json, "Print one JSON object");
  command->footer(
      "Examples:\n"
      "  smartinf bench attend --heads 32 --kv-heads 8 --head-width 128 --tokens 8192\n"
      "  smartinf bench attend --format q8 --threads 2 --json\n"
      "  smartinf bench attend --device /nvme0/bench --device /nvme1/bench");
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
