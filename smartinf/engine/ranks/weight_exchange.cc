#include "smartinf/engine/ranks/weight_exchange.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/engine/ranks/messages.h"

namespace smartinf::engine {

using base::ErrorCode;
using base::Status;

namespace {

/// For how the job ended, behind the weights.
constexpr uint64_t kOutcomeBytes = plan::kRankOutcomeBytes;
constexpr uint64_t kOutcomeTextBytes = kOutcomeBytes - 64;  // beside its frame

/// As much of it as fits.
std::string outcome_text(const Status& status) {
  std::string text = pack(status);
  if (text.size() <= kOutcomeTextBytes) return text;
  return pack(Status(status.code(), status.what().substr(0, kOutcomeTextBytes / 2)));
}

}  // namespace

WeightExchange::WeightExchange(std::shared_ptr<Collectives> ranks, DeviceUpdater& updater,
                               const std::vector<uint32_t>& rank_of,
                               const std::vector<std::vector<uint32_t>>& users,
                               base::TrafficCounter& traffic)
    : ranks_(std::move(ranks)),
      updater_(updater),
      rank_of_(rank_of),
      users_(users),
      traffic_(traffic),
      worker_("si-weights", [this](Job job) { work(std::move(job)); }) {
  pending_.fill(std::vector<uint8_t>(rank_of.size(), 0));
  outcome_.fill(std::vector<Status>(rank_of.size()));
}

void WeightExchange::start(From from, size_t subgroup, base::DataType type, void* out) {
  Job job;
  job.from = from;
  job.subgroup = subgroup;
  job.type = type;
  job.out = static_cast<std::byte*>(out);
  job.bytes = updater_.devices().subgroups[subgroup].count * base::data_type_bytes(type);
  {
    const std::lock_guard lock(mutex_);
    const auto kind = static_cast<size_t>(from);
    SI_CHECK(pending_[kind][subgroup] == 0, "weights of a subgroup are under way twice");
    pending_[kind][subgroup] = 1;
    ++under_way_[kind];
  }
  worker_.post(std::move(job));
}

Status WeightExchange::wait(From from, size_t subgroup) {
  const auto kind = static_cast<size_t>(from);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return pending_[kind][subgroup] == 0; });
  return outcome_[kind][subgroup];
}

void WeightExchange::wait_for_all(From from) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return under_way_[static_cast<size_t>(from)] == 0; });
}

void WeightExchange::wait_for_all() {
  for (const From from : {From::kUpdate, From::kFetch, From::kMemory}) wait_for_all(from);
}

// ---- The thread.

void WeightExchange::work(Job job) {
  // Weights that have been sent are not kept waiting for those that this rank's devices still have
  // to make.
  while (in_flight_.size() == kInFlight || (!in_flight_.empty() && would_wait(job))) end_oldest();
  in_flight_.push_back(std::move(job));
  begin(in_flight_.back());
  while (!in_flight_.empty() && worker_.idle()) end_oldest();
}

void WeightExchange::end_oldest() {
  end(in_flight_.front());
  in_flight_.pop_front();
}

/// Ranks that are out of step must not take one job's weights for another's.
uint64_t WeightExchange::identity_of(const Job& job) {
  return uint64_t{job.subgroup} << 16 | static_cast<uint64_t>(job.from) << 8 |
         static_cast<uint64_t>(job.type);
}

bool WeightExchange::would_wait(const Job& job) const {
  if (!here(job) || job.from == From::kMemory) return false;
  return job.from == From::kUpdate ? !updater_.weights_ready(job.subgroup)
                                   : !updater_.fetched(job.subgroup);
}

void WeightExchange::begin(Job& job) {
  const plan::Subgroup& subgroup = updater_.devices().subgroups[job.subgroup];
  for (std::vector<std::byte>& memory : memory_) {
    const bool used = std::any_of(in_flight_.begin(), in_flight_.end(),
                                  [&](const Job& other) { return other.memory == &memory; });
    if (!used) job.memory = &memory;
  }
  const auto add = [&](Collectives::Started message) {
    if (message.ok()) {
      job.messages.push_back(std::move(*message));
    } else if (job.status.ok()) {
      job.status = std::move(message).status();
    }
  };
  if (!here(job)) {
    job.memory->resize(job.bytes + kOutcomeBytes);
    traffic_.add_up(base::TrafficKind::kWeight, job.bytes);
    return add(ranks_->receive(Channel::kWeights, *job.memory, rank_of_[job.subgroup]));
  }
  if (job.from == From::kUpdate) {
    job.status = updater_.wait_weights(subgroup.first, subgroup.count);
  }
  if (job.from == From::kFetch) job.status = updater_.wait_fetched(subgroup.first);
  const std::string outcome =
      outcome_text(std::move(job.status).with_context(fmt::format("rank {}", ranks_->rank())));
  (void)unpack(outcome, job.status);  // as the others hear it
  const std::string text = pack(identity_of(job), outcome);
  bool filled = false;
  for (const uint32_t user : users_[job.subgroup]) {
    if (user == ranks_->rank()) continue;
    if (!std::exchange(filled, true)) {
      job.memory->resize(job.bytes + kOutcomeBytes);
      if (job.status.ok()) std::memcpy(job.memory->data(), job.out, job.bytes);
      std::memcpy(job.memory->data() + job.bytes, text.data(), text.size());
    }
    traffic_.add_down(base::TrafficKind::kWeight, job.bytes);
    add(ranks_->send(Channel::kWeights, *job.memory, user));
  }
}

void WeightExchange::end(Job& job) {
  for (const auto& message : job.messages) {
    Status waited = message->wait();
    if (job.status.ok()) job.status = std::move(waited);
  }
  job.messages.clear();
  Status status = std::move(job.status);
  if (status.ok() && !here(job)) {
    uint64_t identity = 0;
    std::string outcome;
    status = unpack({reinterpret_cast<const char*>(job.memory->data() + job.bytes), kOutcomeBytes},
                    identity, outcome);
    if (status.ok() && identity == identity_of(job)) {
      if (Status read = unpack(outcome, status); !read.ok()) status = std::move(read);
    } else {
      status = Status(ErrorCode::kFailedPrecondition,
                      fmt::format("ranks {} and {} do not ask for the same weights", ranks_->rank(),
                                  rank_of_[job.subgroup]),
                      "This is a bug: please report it. The last committed step is intact.");
      ranks_->failed(status);
    }
    if (status.ok()) std::memcpy(job.out, job.memory->data(), job.bytes);
  }
  {
    const std::lock_guard lock(mutex_);
    const auto kind = static_cast<size_t>(job.from);
    pending_[kind][job.subgroup] = 0;
    outcome_[kind][job.subgroup] = std::move(status);
    --under_way_[kind];
  }
  changed_.notify_all();
}

}  // namespace smartinf::engine
