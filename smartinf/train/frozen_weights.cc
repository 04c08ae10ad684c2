#include "smartinf/train/frozen_weights.h"

#include <algorithm>
#include <utility>

namespace smartinf::train {

using base::ErrorCode;
using base::Status;

namespace {

constexpr unsigned kThreads = 4;  // reads in flight

}  // namespace

FrozenWeights::FrozenWeights(model::WeightFiles files, uint64_t elements)
    : files_(std::move(files)), elements_(elements) {
  for (unsigned i = 0; i < kThreads; ++i) threads_.emplace_back([this] { work(); });
}

FrozenWeights::~FrozenWeights() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void FrozenWeights::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wanted_.wait(lock, [&] { return ends_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Fetch fetch = queue_.front();
    queue_.pop_front();
    lock.unlock();
    Status status = files_.read_as(fetch.type, fetch.first, subgroup_at(fetch.first).count,
                                   static_cast<std::byte*>(fetch.out));
    lock.lock();
    fetches_[fetch.first] = std::move(status);
    done_.notify_all();
  }
}

plan::Subgroup FrozenWeights::subgroup_at(uint64_t element) const {
  const uint64_t index = element / kFrozenPieceElements;
  const uint64_t first = index * kFrozenPieceElements;
  return {base::SubgroupId{static_cast<uint32_t>(index)}, first,
          std::min(kFrozenPieceElements, elements_ - first)};
}

Status FrozenWeights::load_weights(base::DataType type, const engine::WeightsSink& sink) {
  std::vector<uint64_t> started;
  for (uint64_t first = 0; first < elements_; first += kFrozenPieceElements) {
    void* out = sink(first);
    if (out == nullptr) continue;
    SI_RETURN_IF_ERROR(fetch_weights(first, type, out));
    started.push_back(first);
  }
  Status result;
  for (const uint64_t first : started) {
    Status status = wait_fetched(first);
    if (result.ok()) result = std::move(status);
  }
  return result;
}

Status FrozenWeights::fetch_weights(uint64_t first, base::DataType type, void* out) {
  {
    const std::lock_guard lock(mutex_);
    if (!fetches_.emplace(first, std::nullopt).second) {
      return Status(ErrorCode::kFailedPrecondition, "these weights are being read already");
    }
    queue_.push_back({first, type, out});
  }
  wanted_.notify_one();
  return Status();
}

Status FrozenWeights::wait_fetched(uint64_t first) {
  std::unique_lock lock(mutex_);
  const auto fetch = fetches_.find(first);
  if (fetch == fetches_.end()) {
    return Status(ErrorCode::kFailedPrecondition, "these weights were not asked for");
  }
  done_.wait(lock, [&] { return fetch->second.has_value(); });
  Status status = std::move(*fetch->second);
  fetches_.erase(fetch);
  return status;
}

}  // namespace smartinf::train
