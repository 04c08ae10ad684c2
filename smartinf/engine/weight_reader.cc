#include "smartinf/engine/weight_reader.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kThreads = 4;  // reads in flight

}  // namespace

/// Reads that are asked for, and those that are done. Threads: any, with the mutex.
struct WeightReader::Reads {
  explicit Reads(std::shared_ptr<const WeightFileSet> from) : files(std::move(from)) {}

  const std::shared_ptr<const WeightFileSet> files;
  std::mutex mutex;
  std::condition_variable done;
  uint32_t under_way = 0;
  uint32_t waiting = 0;
  Clock::time_point last_end =
      Clock::now();  // of a read, or when one began with no other under way
  std::map<uint64_t, std::optional<Status>> fetches;  // by first element; nothing: under way

  /// Waits until `until()`. False: no read has ended for silence_max.
  template <typename Until>
  bool wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds silence_max,
            const Until& until) {
    while (!until()) {
      const Clock::time_point limit = last_end + silence_max;
      if (done.wait_until(lock, limit) == std::cv_status::timeout && !until() &&
          Clock::now() >= last_end + silence_max) {
        return false;
      }
    }
    return true;
  }

  void read(const Fetch& fetch) {
    std::unique_lock lock(mutex);
    --waiting;
    if (under_way++ == 0) last_end = Clock::now();
    lock.unlock();
    Status status = files->read(fetch.subgroup, fetch.type, fetch.out);
    lock.lock();
    --under_way;
    last_end = Clock::now();
    fetches[fetch.subgroup.first] = std::move(status);
    done.notify_all();
  }
};

WeightReader::WeightReader(uint64_t elements, uint64_t subgroup_elements,
                           std::shared_ptr<const WeightFileSet> files)
    : elements_(elements),
      subgroup_elements_(subgroup_elements),
      reads_(std::make_shared<Reads>(std::move(files))) {}

WeightReader::~WeightReader() {
  if (!worker_) return;
  const size_t forgotten = worker_->cancel();
  std::unique_lock lock(reads_->mutex);
  const auto idle = [&] { return reads_->under_way == 0 && reads_->waiting == forgotten; };
  if (!hangs_) hangs_ = !reads_->wait(lock, silence_max_, idle);
  if (hangs_) worker_->detach();  // with a share of the reads
}

plan::Subgroup WeightReader::subgroup_at(uint64_t element) const {
  const uint64_t index = element / subgroup_elements_;
  const uint64_t first = index * subgroup_elements_;
  return {base::SubgroupId{static_cast<uint32_t>(index)}, first,
          std::min(subgroup_elements_, elements_ - first)};
}

Status WeightReader::load_weights(base::DataType type, const WeightsSink& sink) {
  std::vector<uint64_t> started;
  Status result;
  for (uint64_t first = 0; first < elements_ && result.ok(); first += subgroup_elements_) {
    void* out = sink(first);
    if (out == nullptr) continue;
    result = fetch_weights(first, type, out);
    if (result.ok()) started.push_back(first);
  }
  for (const uint64_t first : started) {
    Status status = wait_fetched(first);
    if (result.ok()) result = std::move(status);
  }
  return result;
}

Status WeightReader::fetch_weights(uint64_t first, base::DataType type, void* out) {
  if (first >= elements_ || first % subgroup_elements_ != 0) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("element {} is not the first of a subgroup", first),
                  "Fetch what subgroup_at() says.");
  }
  if (hangs_) return given_up(first);
  {
    const std::lock_guard lock(reads_->mutex);
    if (!reads_->fetches.emplace(first, std::nullopt).second) {
      return Status(ErrorCode::kFailedPrecondition,
                    fmt::format("the weights from element {} on are being read already", first),
                    "Call wait_fetched() first.");
    }
    if (reads_->under_way == 0 && reads_->waiting == 0) reads_->last_end = Clock::now();
    ++reads_->waiting;
  }
  if (!worker_) {
    worker_.emplace(
        "si-read", [reads = reads_](const Fetch& fetch) { reads->read(fetch); }, kThreads);
  }
  worker_->post({subgroup_at(first), type, static_cast<std::byte*>(out)});
  return Status();
}

Status WeightReader::given_up(uint64_t first) const {
  return Status(
      ErrorCode::kTimeout,
      fmt::format("a read of weights has not ended for {}",
                  base::format_seconds(std::chrono::duration<double>(silence_max_).count())),
      "Check the drive and the kernel's log (dmesg), and start again. The last committed step is "
      "intact.",
      base::ErrorPlace{reads_->files->path_of(subgroup_at(first)), 0, 0, 0});
}

bool WeightReader::has_fetched(uint64_t first) const {
  const std::lock_guard lock(reads_->mutex);
  const auto fetch = reads_->fetches.find(first);
  return fetch != reads_->fetches.end() && fetch->second.has_value();
}

Status WeightReader::wait_fetched(uint64_t first) {
  std::unique_lock lock(reads_->mutex);
  const auto fetch = reads_->fetches.find(first);
  if (fetch == reads_->fetches.end()) {
    return Status(ErrorCode::kFailedPrecondition, "wait_fetched was called without a fetch",
                  "Call fetch_weights() first.");
  }
  const auto done = [&] { return fetch->second.has_value(); };
  if (!done() && !hangs_) hangs_ = !reads_->wait(lock, silence_max_, done);
  if (!done()) return given_up(first);
  Status status = std::move(*fetch->second);
  reads_->fetches.erase(fetch);
  return status;
}

}  // namespace smartinf::engine
