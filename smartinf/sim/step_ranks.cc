// Exchange of a rank with the others: gradients while backward runs, and weights as they are there.
#include <algorithm>
#include <utility>
#include <vector>

#include "smartinf/plan/rank_share.h"
#include "smartinf/sim/step_graph.h"

namespace smartinf::sim {
Stage StepGraph::exchange_stage(uint64_t sent, uint64_t received) {
  pass_bytes_.ranks_sent += sent;
  pass_bytes_.ranks_received += received;
  const uint64_t more = std::max(sent, received);
  if (more == 0) return Stage(0, {}, exchange_.latency_s);
  const auto part = [&](uint64_t bytes) {
    return static_cast<double>(bytes) / static_cast<double>(more);
  };
  std::vector<Use> uses;
  const double far = 1 - exchange_.near;
  if (far > 0) {
    uses.push_back({network_out_, part(sent) * far * cost(exchange_.far_bytes_per_s)});
    uses.push_back({network_in_, part(received) * far * cost(exchange_.far_bytes_per_s)});
    if (exchange_.cores_bytes_per_s > 0 && !on_gpu()) {
      const double both = part(sent) + part(received);
      uses.push_back({gpu_, both * far * cost(exchange_.cores_bytes_per_s)});
    }
  }
  if (exchange_.near > 0 && exchange_.near_bytes_per_s > 0) {
    uses.push_back({near_, part(sent) * exchange_.near * cost(exchange_.near_bytes_per_s)});
  }
  return Stage(more, uses, exchange_.latency_s);
}

/// A unit's sums to the ranks that have its state, and theirs here.
StepGraph::TaskIndex StepGraph::exchange_gradient(size_t u, TaskIndex left) {
  const Unit& unit = units_[u];
  uint64_t here = 0;
  for (const Owner& owner : owners_) here += local_range(owner, unit.first, unit.count).second;
  const uint64_t elsewhere = unit.count - std::min(unit.count, here);
  const auto bytes = [](uint64_t elements, double each) {
    return static_cast<uint64_t>(static_cast<double>(elements) * each);
  };
  const Stage stage = exchange_stage(bytes(elsewhere, exchange_.gradient_sent),
                                     bytes(here, exchange_.gradient_received));
  const TaskIndex before = exchanged_.empty() ? kNone : exchanged_.back().first;
  if (exchange_.compress_s > 0) {  // by the thread that computes
    left = task(kComputing, "compress " + unit.name,
                {computing(exchange_.compress_s * static_cast<double>(unit.count))}, {left});
  }
  const TaskIndex done =
      task(kExchanging, "exchange gradient " + unit.name, {stage}, {left, before});
  exchanged_.emplace_back(done, unit.count * exchange_.gradient_kept);
  return done;
}

/// Backward goes on while what is under way fits the buckets.
StepGraph::TaskIndex StepGraph::buckets_free(TaskIndex left) const {
  const uint64_t room = plan::kRankBuckets * plan::rank_bucket_bytes(parameters_);
  uint64_t under_way = 0;
  for (auto one = exchanged_.rbegin(); one != exchanged_.rend(); ++one) {
    if (under_way >= room) return one->first;
    under_way += one->second;
  }
  return left;
}

/// Weights of this rank's devices to all others, and as many of theirs as the others have more.
Stage StepGraph::weights_stage(uint64_t bytes) {
  const double elsewhere = (1 - exchange_.share) / exchange_.share;
  return exchange_stage(bytes * (exchange_.ranks - 1),
                        static_cast<uint64_t>(static_cast<double>(bytes) * elsewhere));
}

/// Subgroup after subgroup of each device.
void StepGraph::broadcast_weights() {
  weights_everywhere_.clear();
  for (size_t d = 0; d < owners_.size(); ++d) {
    std::vector<TaskIndex>& everywhere = weights_everywhere_.emplace_back();
    const std::vector<TaskIndex>& up = update_->weights_up()[d];
    for (size_t i = 0; i < up.size(); ++i) {
      const SubgroupLoad& load = update_->devices()[d].subgroups[i];
      const TaskIndex before = everywhere.empty() ? kNone : everywhere.back();
      everywhere.push_back(
          task(kExchanging, "broadcast weights", {weights_stage(load.weights)}, {up[i], before}));
    }
  }
}

}  // namespace smartinf::sim
