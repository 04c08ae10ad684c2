#include "smartinf/engine/weight_reader.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

namespace {

constexpr unsigned kThreads = 4;  // reads in flight

}  // namespace

WeightReader::~WeightReader() { SI_CHECK(threads_.empty(), "weights are still being read"); }

void WeightReader::stop() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wanted_.notify_all();
  threads_.clear();
}

void WeightReader::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wanted_.wait(lock, [&] { return ends_ || !queue_.empty(); });
    if (ends_) return;
    const Fetch fetch = queue_.front();
    queue_.pop_front();
    lock.unlock();
    Status status = read(fetch.subgroup, fetch.type, fetch.out);
    lock.lock();
    fetches_[fetch.subgroup.first] = std::move(status);
    done_.notify_all();
  }
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
  {
    const std::lock_guard lock(mutex_);
    if (!fetches_.emplace(first, std::nullopt).second) {
      return Status(ErrorCode::kFailedPrecondition,
                    fmt::format("the weights from element {} on are being read already", first),
                    "Call wait_fetched() first.");
    }
    queue_.push_back({subgroup_at(first), type, static_cast<std::byte*>(out)});
  }
  while (threads_.size() < kThreads) threads_.emplace_back([this] { work(); });
  wanted_.notify_one();
  return Status();
}

Status WeightReader::wait_fetched(uint64_t first) {
  std::unique_lock lock(mutex_);
  const auto fetch = fetches_.find(first);
  if (fetch == fetches_.end()) {
    return Status(ErrorCode::kFailedPrecondition, "wait_fetched was called without a fetch",
                  "Call fetch_weights() first.");
  }
  done_.wait(lock, [&] { return fetch->second.has_value(); });
  Status status = std::move(*fetch->second);
  fetches_.erase(fetch);
  return status;
}

}  // namespace smartinf::engine
