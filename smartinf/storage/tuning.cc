#include "smartinf/storage/tuning.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/aligned_buffer.h"
#include "smartinf/base/clock.h"
#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/storage/block_store.h"
#include "smartinf/storage/container.h"
#include "smartinf/storage/leak_in_flight.h"
#include "smartinf/storage/transfer_queue.h"

namespace smartinf::storage {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::string_view kTuningFileName = "smartinf.tuning";
constexpr std::string_view kMeasureFileName = "smartinf.measure";
constexpr std::array<uint64_t, 4> kSizes{base::kMiB, 2 * base::kMiB, 4 * base::kMiB,
                                         8 * base::kMiB};
constexpr std::array<uint32_t, 3> kDepths{4, 8, 16};
constexpr std::chrono::seconds kPatience{60};
/// A larger size or depth must gain this much: it costs memory.
constexpr double kWorthwhile = 1.03;

bool is_block_device(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0 && S_ISBLK(info.st_mode);
}

struct Rates {
  double read = 0;
  double write = 0;
  uint64_t written_bytes = 0;  // places that were written, at least once each
};

/// Moves data through one file: fill() writes all of it, run() reads one half and writes the other.
class Mover {
 public:
  /// `transfers`: two for each depth that run() is to try. They and the memory outlive the queue: a
  /// failure leaves some in flight.
  Mover(TransferQueue& queue, std::span<Transfer> transfers, std::span<std::byte> memory,
        uint64_t file_bytes)
      : queue_(queue), transfers_(transfers), memory_(memory), file_bytes_(file_bytes) {}

  Status fill() {
    uint64_t at = 0;
    for (Transfer& transfer : transfers_.first(8)) {
      if (at < file_bytes_) next_fill(transfer, at);
    }
    while (queue_.in_flight() > 0) {
      Transfer* done = nullptr;
      SI_ASSIGN_OR_RETURN(const size_t count, queue_.finish({&done, 1}, kPatience));
      if (count == 0) continue;
      if (!done->status.ok()) return done->status;
      if (at < file_bytes_) next_fill(*done, at);
    }
    return sync();
  }

  Status sync() {
    Transfer& transfer = transfers_.front();
    transfer.op = IoOp::kSync;
    transfer.buffer = {};
    queue_.start(transfer);
    Transfer* done = nullptr;
    SI_ASSIGN_OR_RETURN(const size_t count, queue_.finish({&done, 1}, kPatience));
    return count == 1 ? transfer.status : Status(ErrorCode::kTimeout, "the drive does not answer");
  }

  /// reads_alone: nothing is written meanwhile.
  Result<Rates> run(uint64_t io_bytes, uint32_t depth, double seconds, bool reads_alone = false) {
    const uint64_t half = file_bytes_ / 2;
    const std::span<Transfer> transfers = transfers_.first(reads_alone ? depth : size_t{2} * depth);
    std::array<uint64_t, 2> at{};
    std::array<uint64_t, 2> moved{};
    const auto next = [&](Transfer& transfer, size_t index) {
      const bool write = index >= depth;
      transfer.op = write ? IoOp::kWrite : IoOp::kRead;
      transfer.offset_bytes = (write ? half : 0) + at[write];
      transfer.buffer = memory_.subspan(index * io_bytes, io_bytes);
      transfer.owner = reinterpret_cast<void*>(index);
      at[write] = at[write] + 2 * io_bytes <= half ? at[write] + io_bytes : 0;
      queue_.start(transfer);
    };
    const uint64_t start_ns = base::now_ns();
    for (size_t i = 0; i < transfers.size(); ++i) next(transfers[i], i);
    double spent = 0;
    while (queue_.in_flight() > 0) {
      Transfer* done = nullptr;
      SI_ASSIGN_OR_RETURN(const size_t count, queue_.finish({&done, 1}, kPatience));
      spent = base::seconds_since(start_ns);
      if (count == 0) continue;
      if (!done->status.ok()) return done->status;
      const auto index = reinterpret_cast<size_t>(done->owner);
      moved[index >= depth] += io_bytes;
      if (spent < seconds) next(*done, index);
    }
    return Rates{static_cast<double>(moved[0]) / spent, static_cast<double>(moved[1]) / spent,
                 std::min(moved[1], half)};
  }

 private:
  void next_fill(Transfer& transfer, uint64_t& at) {
    transfer.op = IoOp::kWrite;
    transfer.offset_bytes = at;
    transfer.buffer =
        memory_.first(std::min<uint64_t>({kSizes[2], memory_.size(), file_bytes_ - at}));
    at += transfer.buffer.size();
    queue_.start(transfer);
  }

  TransferQueue& queue_;
  std::span<Transfer> transfers_;
  std::span<std::byte> memory_;
  uint64_t file_bytes_;
};

/// As many transfers read as are written.
uint64_t bytes_in_flight(uint64_t io_bytes, uint32_t depth) { return 2 * depth * io_bytes; }

/// Every size and depth that fits the memory, the smaller first.
Status try_all(Mover& mover, uint64_t memory_bytes, double seconds, IoTuning& best) {
  SI_RETURN_IF_ERROR(mover.fill());
  double best_rate = 0;
  for (const uint32_t depth : kDepths) {
    for (const uint64_t io_bytes : kSizes) {
      if (bytes_in_flight(io_bytes, depth) > memory_bytes) continue;
      SI_ASSIGN_OR_RETURN(const Rates rates, mover.run(io_bytes, depth, seconds));
      // A step moves as much one way as the other: the slower way is what counts.
      const double rate = std::min(rates.read, rates.write);
      const bool larger = io_bytes * depth > best.io_bytes * best.io_depth || best_rate == 0;
      if (rate > best_rate * (larger ? kWorthwhile : 1.0)) {
        best = IoTuning{io_bytes, depth, rates.read, rates.write};
        best_rate = rate;
      }
    }
  }
  return Status();
}

/// The time of a sync for each byte written before it: the median of some.
Status try_sync(Mover& mover, const MeasureOptions& options, IoTuning& best) {
  constexpr size_t kTimes = 5;
  constexpr double kSeen = 0.02;  // of the time of the writes
  std::array<double, kTimes> seconds_per_byte{};
  for (double& one : seconds_per_byte) {
    SI_RETURN_IF_ERROR(mover.sync());
    SI_ASSIGN_OR_RETURN(const Rates rates,
                        mover.run(best.io_bytes, best.io_depth, options.seconds));
    const uint64_t start_ns = base::now_ns();
    SI_RETURN_IF_ERROR(mover.sync());
    one = base::seconds_since(start_ns) / static_cast<double>(rates.written_bytes);
  }
  std::sort(seconds_per_byte.begin(), seconds_per_byte.end());
  SI_ASSIGN_OR_RETURN(const Rates alone, mover.run(best.io_bytes, best.io_depth,
                                                   4 * options.seconds, /*reads_alone=*/true));
  best.reads_alone_bytes_per_second = alone.read;
  const double median = seconds_per_byte[kTimes / 2];
  if (median * best.write_bytes_per_second > kSeen) best.sync_bytes_per_second = 1 / median;
  return Status();
}

}  // namespace

Result<IoTuning> measure_io(const std::string& path, const MeasureOptions& options) {
  if (is_block_device(path)) return IoTuning{};
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return base::errno_status(error.value(), "cannot make the device's directory", path);
  const std::string file_path = (std::filesystem::path(path) / kMeasureFileName).string();
  (void)unlink(file_path.c_str());  // of a measurement that was killed
  // Made anew, so that no link that stands there is followed.
  const FileDescriptor file(
      open(file_path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_DIRECT | O_CLOEXEC, 0600));
  if (!file.is_open()) {
    const int why = errno;
    (void)unlink(file_path.c_str());  // some make the file and then refuse to open it so
    // Through the page cache the rate would be memory's: nothing is known then.
    if (why == EINVAL || why == EOPNOTSUPP) return IoTuning{};
    return base::errno_status(why, "cannot make a file to measure the drive with", file_path);
  }
  // Without a name it goes away by itself, whatever happens.
  (void)unlink(file_path.c_str());
  const uint64_t file_bytes = base::round_up(options.file_bytes, 2 * kSizes.back());
  if (fallocate(file.get(), 0, 0, static_cast<off_t>(file_bytes)) != 0 && errno != EOPNOTSUPP) {
    return base::errno_status(errno, "cannot reserve space to measure the drive with", file_path, 0,
                              file_bytes);
  }
  RingOptions ring_options = options.ring;
  ring_options.depth = std::max(ring_options.depth, 2 * kDepths.back());
  SI_ASSIGN_OR_RETURN(std::unique_ptr<Ring> ring, make_ring(ring_options));
  SI_ASSIGN_OR_RETURN(const uint32_t index, ring->add_file(file.get(), file_path));
  SI_ASSIGN_OR_RETURN(base::AlignedBuffer memory,
                      base::AlignedBuffer::allocate(std::clamp(
                          options.memory_bytes, bytes_in_flight(kSizes.front(), kDepths.front()),
                          bytes_in_flight(kSizes.back(), kDepths.back()))));
  // Data that a drive cannot compress away.
  uint64_t word = 0x9e3779b97f4a7c15u;
  for (uint64_t& out : std::span(reinterpret_cast<uint64_t*>(memory.data()), memory.size() / 8)) {
    word ^= word << 13;
    word ^= word >> 7;
    word ^= word << 17;
    out = word;
  }
  std::vector<Transfer> transfers(size_t{2} * kDepths.back());
  TransferQueue queue(std::move(ring), index, file_path, /*direct=*/true, kPatience);
  Mover mover(queue, transfers, memory.bytes(), file_bytes);
  IoTuning best;
  Status measured = try_all(mover, memory.size(), options.seconds, best);
  if (measured.ok() && options.sync) measured = try_sync(mover, options, best);
  if (!queue.close().ok()) {
    leak_in_flight(std::move(transfers));
    leak_in_flight(std::move(memory));
  }
  SI_RETURN_IF_ERROR(measured);
  return best;
}

Status remember_tuning(const std::string& path, const IoTuning& tuning) {
  if (is_block_device(path)) return Status();
  const std::string file_path = (std::filesystem::path(path) / kTuningFileName).string();
  return base::write_text_file(
      file_path,
      fmt::format("# Found by smartinf at first use. Delete this file to have it measured again.\n"
                  "io_bytes = {}\nio_depth = {}\nread_bytes_per_second = {:.0f}\n"
                  "write_bytes_per_second = {:.0f}\n",
                  tuning.io_bytes, tuning.io_depth, tuning.read_bytes_per_second,
                  tuning.write_bytes_per_second),
      "cannot remember the drive's tuning");
}

namespace {

/// Nothing where the text is not a whole tuning.
std::optional<IoTuning> parse_tuning(const std::string& text) {
  std::istringstream file(text);
  IoTuning tuning;
  int found = 0;
  for (std::string line; std::getline(file, line);) {
    const size_t equals = line.find(" = ");
    if (line.starts_with('#') || equals == std::string::npos) continue;
    const std::string key = line.substr(0, equals);
    const double value = std::strtod(line.c_str() + equals + 3, nullptr);
    if (!(value >= 0) || value > 1e15) return std::nullopt;
    ++found;
    if (key == "io_bytes") {
      tuning.io_bytes = static_cast<uint64_t>(value);
    } else if (key == "io_depth") {
      tuning.io_depth = static_cast<uint32_t>(std::min(value, 1e6));
    } else if (key == "read_bytes_per_second") {
      tuning.read_bytes_per_second = value;
    } else if (key == "write_bytes_per_second") {
      tuning.write_bytes_per_second = value;
    } else {
      --found;
    }
  }
  // Written by hand, perhaps: only what a store accepts.
  if (found != 4 || tuning.io_bytes < base::kIoAlignment ||
      tuning.io_bytes % base::kIoAlignment != 0 || tuning.io_bytes > base::kGiB ||
      tuning.io_depth == 0 || tuning.io_depth > 4096) {
    return std::nullopt;
  }
  return tuning;
}

}  // namespace

std::optional<IoTuning> recall_tuning(const std::string& path) {
  if (is_block_device(path)) return std::nullopt;
  std::error_code error;
  std::filesystem::path folder = std::filesystem::absolute(path, error).lexically_normal();
  std::optional<dev_t> drive;
  for (;; folder = folder.parent_path()) {
    struct stat found {};
    if (stat(folder.c_str(), &found) == 0) {
      if (drive.value_or(found.st_dev) != found.st_dev) return std::nullopt;
      drive = found.st_dev;
      const auto text =
          base::read_text_file((folder / kTuningFileName).string(), "cannot read", base::kMiB);
      if (text.ok()) return parse_tuning(*text);
      if (text.status().code() != base::ErrorCode::kNotFound) return std::nullopt;
    }
    if (!folder.has_relative_path()) return std::nullopt;
  }
}

Result<DriveLimit> drive_limit(const std::string& path, const StoreOptions& options,
                               uint64_t memory_bytes) {
  SI_ASSIGN_OR_RETURN(Container container, open_container(path, options));
  // Memory and transfers outlive the store: a failure leaves transfers in flight.
  base::AlignedBuffer memory;
  std::vector<SubgroupIo> ios;
  SI_ASSIGN_OR_RETURN(std::unique_ptr<BlockStore> store,
                      BlockStore::open(std::move(container), options));
  SI_RETURN_IF_ERROR(store->recover_to(store->state().prepared_step));
  const auto& subgroups = store->layout().subgroups;
  const uint64_t slot_bytes = base::round_up(store->extent_bytes_max(), base::kPageBytes);
  const uint32_t slots = static_cast<uint32_t>(
      std::clamp<uint64_t>(memory_bytes / slot_bytes, 1, std::min<uint64_t>(subgroups.size(), 64)));
  SI_ASSIGN_OR_RETURN(memory, base::AlignedBuffer::allocate(slots * slot_bytes));
  // As a device's buffers are after its first step: without huge pages they are touched one by one.
  std::memset(memory.data(), 0, memory.size());
  (void)store->register_memory(memory.bytes());  // as the device does; refused there, refused here

  const base::TrafficReading before = store->traffic();
  const uint64_t start_ns = base::now_ns();
  // With two slots, a step that is aborted; with one, what a flush writes: the state stays as it
  // is.
  const bool two_slots = store->durability() == Durability::kStep;
  const base::StepNumber step = store->state().committed_step + 1;
  if (two_slots) store->begin_step(step);
  ios.resize(slots);
  size_t next = 0;
  size_t left = subgroups.size();
  const auto read_next = [&](SubgroupIo& io) {
    io.op = SubgroupIo::Op::kRead;
    io.subgroup = subgroups[next++].id;
    store->start(io);
  };
  for (uint32_t i = 0; i < slots && next < subgroups.size(); ++i) {
    ios[i].buffer = memory.bytes().subspan(i * slot_bytes, slot_bytes);
    read_next(ios[i]);
  }
  while (left > 0) {
    std::array<SubgroupIo*, 16> done{};
    SI_ASSIGN_OR_RETURN(const size_t count, store->poll(done, kPatience));
    for (size_t i = 0; i < count; ++i) {
      SubgroupIo& io = *done[i];
      if (!io.status.ok()) return io.status;
      if (io.op == SubgroupIo::Op::kRead) {
        io.op = two_slots ? SubgroupIo::Op::kWrite : SubgroupIo::Op::kFlush;
        store->start(io);
        continue;
      }
      --left;
      if (next < subgroups.size()) read_next(io);
    }
  }
  SI_RETURN_IF_ERROR(store->sync());
  DriveLimit limit;
  limit.seconds = base::seconds_since(start_ns);
  const base::TrafficReading moved = store->traffic().since(before);
  limit.read_bytes = moved.up_total();
  limit.written_bytes = moved.down_total();
  if (two_slots) SI_RETURN_IF_ERROR(store->abort(step));
  return limit;
}

}  // namespace smartinf::storage
