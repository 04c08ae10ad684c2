// RanksUpdater: the whole state is written (initialization, edit) or read.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "smartinf/csd/snapshot.h"
#include "smartinf/engine/ranks/messages.h"
#include "smartinf/engine/ranks/ranks_updater.h"
#include "smartinf/engine/stored_run.h"

namespace smartinf::engine {

using base::Result;
using base::Status;

namespace {

/// Exchange of a state that is read: a block of each plane goes to all ranks at once.
class BlockTurn {
 public:
  BlockTurn(Collectives& ranks, size_t planes) : ranks_(ranks) {
    memory_.resize(planes * base::kBlockElements * sizeof(float));
  }

  float* plane(size_t wanted) {
    return reinterpret_cast<float*>(memory_.data()) + wanted * base::kBlockElements;
  }
  /// Root's planes, or its failure, on all ranks.
  Status pass(uint32_t root, const Status& mine) {
    std::string text = pack(mine);
    SI_RETURN_IF_ERROR(broadcast(ranks_, Channel::kControl, text, root));
    Status outcome;
    SI_RETURN_IF_ERROR(unpack(text, outcome));
    SI_RETURN_IF_ERROR(outcome);
    return broadcast(ranks_, Channel::kControl, memory_, root);
  }

 private:
  Collectives& ranks_;
  std::vector<std::byte> memory_;
};

}  // namespace

Status RanksUpdater::initialize(const FillWeights& fill, const std::string& client_metadata) {
  return here_->initialize(fill, client_metadata);
}

Status RanksUpdater::edit_state(
    const std::function<Result<bool>(uint64_t, std::span<const std::span<float>>)>& edit,
    const std::string& client_metadata, const CompressionState& compression) {
  SI_RETURN_IF_ERROR(wait_commit());
  return here_->edit_state(edit, client_metadata, compression);
}

/// Block by block in ascending order. A rank that fails says so when its next block is due, and all
/// stop there.
Status RanksUpdater::read_from_all(uint32_t plane_mask, size_t plane_count,
                                   const ReadHere& read_here, const WholeState::Visit& visit) {
  std::vector<size_t> wanted;
  for (size_t p = 0; p < plane_count; ++p) {
    if (((plane_mask >> p) & 1u) != 0) wanted.push_back(p);
  }
  BlockTurn turn(*ranks_, wanted.size());
  uint64_t next = 0;
  Status mine;     // the failure on this rank
  Status stopped;  // the failure that all ranks have heard of
  const auto visit_mine = [&](uint64_t first, std::span<const std::span<const float>> planes) {
    if (visit && mine.ok()) mine = visit(first, planes);
  };
  // Blocks of others, and blocks here that could not be read.
  const auto pass_until = [&](uint64_t end) {
    while (next < end && stopped.ok()) {
      const size_t index = here_->devices().subgroup_at(next);
      const plan::Subgroup& subgroup = here_->devices().subgroups[index];
      const uint64_t count = std::min(base::kBlockElements, subgroup.first + subgroup.count - next);
      stopped = turn.pass(rank_of_[index], mine);
      if (!stopped.ok()) return;
      std::array<std::span<const float>, 4> planes;
      for (size_t w = 0; w < wanted.size(); ++w) planes[wanted[w]] = {turn.plane(w), count};
      visit_mine(next, std::span<const std::span<const float>>(planes.data(), plane_count));
      next += count;
    }
  };
  Status read = read_here([&](uint64_t first, std::span<const std::span<const float>> planes) {
    pass_until(first);
    const uint64_t end = first + planes[wanted.front()].size();
    visit_mine(first, planes);
    while (next < end && stopped.ok() && mine.ok()) {
      const uint64_t count = std::min(base::kBlockElements, end - next);
      for (size_t w = 0; w < wanted.size(); ++w) {
        std::memcpy(turn.plane(w), planes[wanted[w]].data() + (next - first),
                    count * sizeof(float));
      }
      stopped = turn.pass(ranks_->rank(), Status());
      next += count;
    }
    return stopped.ok() ? mine : stopped;
  });
  if (mine.ok() && stopped.ok()) mine = std::move(read);
  pass_until(space().count());
  return all("read", mine);
}

Status RanksUpdater::read_state(uint32_t plane_mask, const WholeState::Visit& visit) {
  SI_RETURN_IF_ERROR(wait_commit());
  const size_t plane_count = kernels::rule_planes(options_.rule.rule).size();
  plane_mask &= (1u << plane_count) - 1;
  if (plane_mask == 0) return here_->read_state(0, visit);
  return read_from_all(
      plane_mask, plane_count,
      [&](const WholeState::Visit& take) { return here_->read_state(plane_mask, take); }, visit);
}

Status RanksUpdater::read_weights(
    const std::function<Status(uint64_t, std::span<const float>)>& visit) {
  SI_RETURN_IF_ERROR(wait_commit());
  const auto read_here = [&](const WholeState::Visit& take) {
    return here_->read_weights([&](uint64_t first, std::span<const float> weights) {
      return take(first, std::span<const std::span<const float>>(&weights, 1));
    });
  };
  const auto visit_weights = [&](uint64_t first, std::span<const std::span<const float>> planes) {
    return visit ? visit(first, planes.front()) : Status();
  };
  return read_from_all(1, 1, read_here, visit_weights);
}

Status RanksUpdater::load_weights(base::DataType type, const WeightsSink& sink) {
  using From = WeightExchange::From;
  SI_RETURN_IF_ERROR(wait_commit());
  const std::vector<void*> places =
      places_of(sink, type, [](const plan::Subgroup&) { return true; });
  const Status loaded = here_->load_weights(type, sink_here(places));
  SI_RETURN_IF_ERROR(all_with("load_weights", places, loaded));
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] == nullptr || !takes_part(i)) continue;
    weight_exchange_->start(From::kMemory, i, type, places[i]);
  }
  weight_exchange_->wait_for_all(From::kMemory);
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] != nullptr) SI_RETURN_IF_ERROR(weight_exchange_->wait(From::kMemory, i));
  }
  return Status();
}

Result<StoredRun> RanksUpdater::snapshot() {
  auto run = here_->snapshot();
  SI_RETURN_IF_ERROR(all("snapshot", run.status()));
  return run;
}

}  // namespace smartinf::engine
