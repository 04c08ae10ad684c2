#include "workloads/gnn/rank_exchange.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "smartinf/base/clock.h"

namespace smartinf::workloads {

using base::Result;
using base::Status;
using graph::Vertex;

namespace {

constexpr uint64_t kExchangeBytes = 8 << 20;  // that a rank sends at once, and receives

}  // namespace

void EpochReport::add(const EpochReport& batch) {
  loss += batch.loss;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += batch.counts[i];
  for (double EpochReport::*const sum :
       {&EpochReport::seconds, &EpochReport::compute_seconds, &EpochReport::row_seconds,
        &EpochReport::exchange_seconds}) {
    this->*sum += batch.*sum;
  }
  for (uint64_t EpochReport::*const sum :
       {&EpochReport::up_bytes, &EpochReport::down_bytes, &EpochReport::planned_up_bytes,
        &EpochReport::planned_down_bytes, &EpochReport::row_bytes, &EpochReport::within_bytes,
        &EpochReport::between_bytes, &EpochReport::planned_within_bytes,
        &EpochReport::planned_between_bytes}) {
    this->*sum += batch.*sum;
  }
}

Status RankExchange::all_ok(const std::string& what, const Status& mine) {
  if (alone()) return mine;
  return engine::all_ok(*ranks_.collectives, engine::Channel::kControl, what, mine);
}

Status RankExchange::rows(size_t step, const Read& read, const Write& write, EpochReport& report) {
  const EpochPlan::Exchange& rows = plan_.exchanges[step];
  if (alone()) return Status();
  const size_t table = plan_.handed(step);
  const uint64_t begin_ns = base::now_ns();
  engine::Collectives& ranks = *ranks_.collectives;
  const uint64_t dim = plan_.tables[table].dim;
  const uint64_t at_once =
      std::max<uint64_t>(1, kExchangeBytes / (uint64_t{ranks.world()} * dim * sizeof(float)));
  const auto some = [&](const std::vector<Vertex>& vertices, uint64_t first) {
    first = std::min<uint64_t>(first, vertices.size());
    return std::span(vertices).subspan(first, std::min(at_once, vertices.size() - first));
  };
  for (uint64_t first = 0;; first += at_once) {
    std::vector<std::vector<float>> sent(ranks.world()), received(ranks.world());
    std::vector<std::unique_ptr<engine::Collectives::Pending>> calls;
    for (uint32_t r = 0; r < ranks.world(); ++r) {
      received[r].resize(some(rows.receive[r], first).size() * dim);
      if (received[r].empty()) continue;
      SI_ASSIGN_OR_RETURN(calls.emplace_back(),
                          ranks.receive(engine::Channel::kForward,
                                        std::as_writable_bytes(std::span(received[r])), r));
    }
    for (uint32_t r = 0; r < ranks.world(); ++r) {
      const std::span<const Vertex> vertices = some(rows.send[r], first);
      if (vertices.empty()) continue;
      sent[r].resize(vertices.size() * dim);
      SI_RETURN_IF_ERROR(read(table, vertices, sent[r]));
      const auto bytes = std::as_bytes(std::span(sent[r]));
      SI_ASSIGN_OR_RETURN(calls.emplace_back(), ranks.send(engine::Channel::kForward, bytes, r));
      (plan_.within_server(r, ranks_.rank) ? report.within_bytes : report.between_bytes) +=
          bytes.size();
    }
    if (calls.empty()) break;
    for (const auto& call : calls) SI_RETURN_IF_ERROR(call->wait());
    for (uint32_t r = 0; r < ranks.world(); ++r) {
      if (!received[r].empty()) {
        SI_RETURN_IF_ERROR(write(table, some(rows.receive[r], first), received[r]));
      }
    }
  }
  report.exchange_seconds += base::seconds_since(begin_ns);
  return Status();
}

Status RankExchange::sum_report(std::span<const double> block_losses, EpochReport& report) {
  std::array<uint64_t, 6>& counts = report.counts;
  report.planned_within_bytes = plan_.within_bytes;
  report.planned_between_bytes = plan_.between_bytes;
  const std::array<uint64_t*, 10> summed{&counts[0],
                                         &counts[1],
                                         &counts[2],
                                         &counts[3],
                                         &counts[4],
                                         &counts[5],
                                         &report.within_bytes,
                                         &report.between_bytes,
                                         &report.planned_within_bytes,
                                         &report.planned_between_bytes};
  std::string mine;
  for (const uint64_t* const count : summed) {
    mine.append(reinterpret_cast<const char*>(count), sizeof *count);
  }
  mine.append(reinterpret_cast<const char*>(block_losses.data()), block_losses.size_bytes());
  std::vector<std::string> all{mine};
  if (!alone()) {
    SI_ASSIGN_OR_RETURN(all,
                        engine::all_gather(*ranks_.collectives, engine::Channel::kControl, mine));
  }
  for (uint64_t* const count : summed) *count = 0;
  for (const std::string& of_rank : all) {  // in the order of blocks
    const char* at = of_rank.data();
    const auto take = [&](auto& value) {
      std::memcpy(&value, at, sizeof value);
      at += sizeof value;
    };
    uint64_t count = 0;
    for (uint64_t* const sum : summed) take(count), *sum += count;
    for (double loss = 0; at < of_rank.data() + of_rank.size();) take(loss), report.loss += loss;
  }
  return Status();
}

Status RankExchange::gradients(std::span<const Layer> layers, std::span<BlockSums> sums) {
  if (alone()) return Status();
  const uint32_t of_server = plan_.spread.ranks_of_server();
  if (ranks_.rank != leader()) return send_sums(sums, leader());
  SI_RETURN_IF_ERROR(receive_sums(layers, sums, leader() + 1, leader() + of_server, 1));
  const uint64_t server = leader() / of_server;
  for (BlockSums& of_layer : sums) {
    if (plan_.sample) of_layer.nodes() = {{server, 1, of_layer.total()}};
  }
  if (!first_rank()) return send_sums(sums, 0);
  return receive_sums(layers, sums, of_server, ranks_.ranks, of_server);
}

Status RankExchange::send_sums(std::span<BlockSums> sums, uint32_t to) {
  std::vector<uint64_t> heads;  // of each node its layer, first block and number of blocks
  std::vector<float> values;
  for (size_t l = 0; l < sums.size(); ++l) {
    for (const BlockSums::Node& node : sums[l].nodes()) {
      heads.insert(heads.end(), {l, node.first, node.blocks});
      values.insert(values.end(), node.sum.begin(), node.sum.end());
    }
    sums[l].nodes().clear();
  }
  const std::array<uint64_t, 2> sizes{heads.size(), values.size()};
  SI_RETURN_IF_ERROR(send(std::span<const uint64_t>(sizes), to));
  SI_RETURN_IF_ERROR(send(std::span<const uint64_t>(heads), to));
  return send(std::span<const float>(values), to);
}

Status RankExchange::receive_sums(std::span<const Layer> layers, std::span<BlockSums> sums,
                                  uint32_t first, uint32_t end, uint32_t stride) {
  std::vector<std::vector<BlockSums::Node>> nodes(sums.size());
  for (size_t l = 0; l < sums.size(); ++l) nodes[l] = std::move(sums[l].nodes());
  for (uint32_t from = first; from < end; from += stride) {
    std::array<uint64_t, 2> sizes{};
    SI_RETURN_IF_ERROR(receive(std::span<uint64_t>(sizes), from));
    std::vector<uint64_t> heads(sizes[0]);
    std::vector<float> values(sizes[1]);
    SI_RETURN_IF_ERROR(receive(std::span(heads), from));
    SI_RETURN_IF_ERROR(receive(std::span(values), from));
    auto value = values.begin();
    for (size_t i = 0; i < heads.size(); i += 3) {
      const Layer& layer = layers[heads[i]];
      const auto behind = value + static_cast<int64_t>(layer.end - layer.weight);
      nodes[heads[i]].push_back({heads[i + 1], heads[i + 2], std::vector<float>(value, behind)});
      value = behind;
    }
  }
  for (size_t l = 0; l < sums.size(); ++l) {
    sums[l] = {};
    std::ranges::sort(nodes[l], {}, &BlockSums::Node::first);
    for (BlockSums::Node& node : nodes[l]) sums[l].add(std::move(node));
  }
  return Status();
}

Status RankExchange::parameters(const Status& mine, uint64_t& done, std::span<float> values) {
  SI_RETURN_IF_ERROR(all_ok("parameters", mine));
  if (alone()) return Status();
  if (!first_rank()) {
    const uint32_t from = ranks_.rank == leader() ? 0 : leader();
    SI_RETURN_IF_ERROR(receive(std::span(&done, 1), from));
    SI_RETURN_IF_ERROR(receive(values, from));
  }
  const uint32_t of_server = plan_.spread.ranks_of_server();
  for (uint32_t to = ranks_.rank + 1; to < ranks_.ranks; ++to) {
    const bool mate = ranks_.rank == leader() && to < leader() + of_server;
    if (!mate && !(first_rank() && to % of_server == 0)) continue;
    SI_RETURN_IF_ERROR(send(std::span<const uint64_t>(&done, 1), to));
    SI_RETURN_IF_ERROR(send(std::span<const float>(values), to));
  }
  return Status();
}

}  // namespace smartinf::workloads
