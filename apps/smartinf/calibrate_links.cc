#include "apps/smartinf/calibrate_links.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "smartinf/base/clock.h"
#include "smartinf/base/file.h"
#include "smartinf/base/units.h"
#include "smartinf/sim/cluster.h"
#include "smartinf/train/ranks/environment.h"
#include "smartinf/train/ranks/join_ranks.h"

#include "apps/smartinf/busy_cores.h"
#include "apps/smartinf/commands.h"
#include "apps/smartinf/median.h"

namespace smartinf::apps {
namespace {

using base::Result;
using base::Status;
using engine::Channel;

constexpr int kRounds = 5;
constexpr int kPings = 20;
constexpr uint64_t kSmall = 64 * base::kKiB;
constexpr uint64_t kProbe = 1 * base::kMiB;
constexpr uint64_t kLarge = 32 * base::kMiB;
constexpr double kLargeS = 0.5;  // of a slow link's large message
constexpr std::chrono::seconds kTimeout{120};

/// Boxes by the rank that measures for each, and this process among them.
struct Boxes {
  std::vector<uint32_t> leader;
  std::vector<uint32_t> ranks;
  std::vector<std::string> names;
  uint32_t mine = 0;
  bool leads = false;

  uint32_t count() const { return static_cast<uint32_t>(leader.size()); }
};

/// Ranks of one node of torchrun's are one box; without torchrun, those of one host.
Result<Boxes> find_boxes(const train::Ranks& ranks) {
  char host[256] = "box";
  ::gethostname(host, sizeof(host) - 1);
  const char* node = std::getenv("GROUP_RANK");
  const std::string own = fmt::format("{}\n{}", node != nullptr ? node : host, host);
  SI_ASSIGN_OR_RETURN(const std::vector<std::string> all, ranks.all_texts(own));
  Boxes boxes;
  std::map<std::string, uint32_t> known;
  std::map<std::string, uint32_t> hosts;
  for (uint32_t rank = 0; rank < ranks.world(); ++rank) {
    const auto [at, fresh] = known.try_emplace(all[rank], boxes.count());
    if (fresh) {
      const std::string name = all[rank].substr(all[rank].find('\n') + 1);
      const uint32_t before = hosts[name]++;
      boxes.leader.push_back(rank);
      boxes.ranks.push_back(0);
      boxes.names.push_back(before == 0 ? name : fmt::format("{}-{}", name, before + 1));
    }
    ++boxes.ranks[at->second];
    if (rank != ranks.rank()) continue;
    boxes.mine = at->second;
    boxes.leads = fresh;
  }
  return boxes;
}

class Measuring {
 public:
  Measuring(const train::Ranks& ranks, const Boxes& boxes)
      : ranks_(ranks), boxes_(boxes), sent_(kLarge), received_(kLarge) {}

  /// Bytes a second sent and got that would take all time of all cores, of each box.
  const std::vector<double>& cores_rates() const { return cores_rates_; }

  Result<sim::Cluster> measure() {
    const uint32_t count = boxes_.count();
    std::vector<std::pair<uint32_t, uint32_t>> pairs;
    for (uint32_t a = 0; a < count; ++a) {
      for (uint32_t b = 0; b < count; ++b) {
        if (a != b) pairs.emplace_back(a, b);
      }
    }
    std::vector<std::vector<double>> latency(count * count), alone(count * count),
        together(count * count);
    SI_RETURN_IF_ERROR(probe(pairs));
    std::mt19937 draw(1);  // the same order on all ranks
    for (int round = 0; round < kRounds; ++round) {
      std::ranges::shuffle(pairs, draw);
      for (const auto& [a, b] : pairs) {
        SI_ASSIGN_OR_RETURN(const double ping_s, ping(a, b));
        SI_ASSIGN_OR_RETURN(const double large_s, pass(a, b, large_));
        if (a != boxes_.mine || !boxes_.leads) continue;
        latency[a * count + b].push_back(ping_s / 2);
        alone[a * count + b].push_back(static_cast<double>(large_) / (large_s - ping_s / 2));
      }
      SI_RETURN_IF_ERROR(all_at_once(draw, latency, together));
    }
    sim::Cluster cluster;
    std::vector<double> row(4 * size_t{count} + 1,
                            0.0);  // rate, all at once, latency, spread; and the cores'
    SI_ASSIGN_OR_RETURN(row.back(), cores_rate(draw, latency));
    if (boxes_.leads) {
      for (uint32_t b = 0; b < count; ++b) {
        const size_t at = boxes_.mine * count + b;
        if (alone[at].empty()) continue;
        const auto [least, most] = std::ranges::minmax(alone[at]);
        row[4 * b] = median(alone[at]);
        row[4 * b + 1] = together[at].empty() ? 0 : median(together[at]);
        row[4 * b + 2] = median(latency[at]);
        row[4 * b + 3] = (most - least) / row[4 * b];
      }
    }
    SI_ASSIGN_OR_RETURN(const std::vector<double> all, ranks_.all<double>(row));
    cluster.links.resize(size_t{count} * count);
    for (uint32_t a = 0; a < count; ++a) {
      const double* of = all.data() + boxes_.leader[a] * row.size();
      for (uint32_t b = 0; b < count; ++b, of += 4) {
        cluster.links[a * count + b] = {of[0], of[1], of[2], of[3]};
      }
      cores_rates_.push_back(*of);
    }
    return cluster;
  }

 private:
  /// Large messages of slow links are smaller.
  Status probe(const std::vector<std::pair<uint32_t, uint32_t>>& pairs) {
    double slowest_s = 0;
    for (const auto& [a, b] : pairs) {
      SI_RETURN_IF_ERROR(pass(a, b, kSmall).status());
      SI_ASSIGN_OR_RETURN(const double seconds, pass(a, b, kProbe));
      if (boxes_.leads && boxes_.mine == a) slowest_s = std::max(slowest_s, seconds);
    }
    SI_ASSIGN_OR_RETURN(const std::vector<double> all, ranks_.all<double>(std::vector{slowest_s}));
    slowest_s = std::max(1e-6, *std::ranges::max_element(all));
    const double bytes = static_cast<double>(kProbe) * kLargeS / slowest_s;
    large_ = std::clamp(static_cast<uint64_t>(bytes), kProbe, kLarge);
    return {};
  }

  Status send(Channel channel, uint64_t bytes, uint32_t box) {
    SI_ASSIGN_OR_RETURN(
        const auto started,
        ranks_.collectives()->send(channel, std::span(sent_).first(bytes), boxes_.leader[box]));
    return started->wait();
  }
  Status receive(Channel channel, uint64_t bytes, uint32_t box) {
    SI_ASSIGN_OR_RETURN(const auto started,
                        ranks_.collectives()->receive(channel, std::span(received_).first(bytes),
                                                      boxes_.leader[box]));
    return started->wait();
  }

  engine::Collectives::Started expect(uint64_t bytes, uint32_t box) {
    return ranks_.collectives()->receive(Channel::kForward, std::span(received_).first(bytes),
                                         boxes_.leader[box]);
  }

  /// Seconds from the begin of a message from a to b until a has an answer of one byte; 0
  /// elsewhere.
  Result<double> pass(uint32_t a, uint32_t b, uint64_t bytes) {
    SI_RETURN_IF_ERROR(ranks_.barrier());
    if (!boxes_.leads) return 0.0;
    if (boxes_.mine == a) {
      SI_RETURN_IF_ERROR(receive(Channel::kBackward, 1, b));  // it expects the message
      const uint64_t begin_ns = base::now_ns();
      SI_RETURN_IF_ERROR(send(Channel::kForward, bytes, b));
      SI_RETURN_IF_ERROR(receive(Channel::kBackward, 1, b));
      return base::seconds_since(begin_ns);
    }
    if (boxes_.mine == b) {
      SI_ASSIGN_OR_RETURN(const auto in, expect(bytes, a));
      SI_RETURN_IF_ERROR(send(Channel::kBackward, 1, a));
      SI_RETURN_IF_ERROR(in->wait());
      SI_RETURN_IF_ERROR(send(Channel::kBackward, 1, a));
    }
    return 0.0;
  }

  /// There and back, the median of some.
  Result<double> ping(uint32_t a, uint32_t b) {
    std::vector<double> seconds;
    for (int i = 0; i < kPings; ++i) {
      SI_ASSIGN_OR_RETURN(const double once, pass(a, b, 1));
      seconds.push_back(once);
    }
    return median(seconds);
  }

  /// Once more all at once, while the cores compute.
  Result<double> cores_rate(std::mt19937& draw, const std::vector<std::vector<double>>& latency) {
    std::optional<BusyCores> busy;
    if (boxes_.leads) busy.emplace(std::max(1u, std::thread::hardware_concurrency()));
    std::vector<std::vector<double>> slower(latency.size());
    SI_RETURN_IF_ERROR(ranks_.barrier());
    moved_bytes_ = 0;
    if (busy) busy->begin();
    for (int round = 0; round < kRounds; ++round) {
      SI_RETURN_IF_ERROR(all_at_once(draw, latency, slower));
    }
    return busy ? busy->rate(moved_bytes_) : 0.0;
  }

  /// All boxes in pairs, each of which sends both ways; until all pairs have met.
  Status all_at_once(std::mt19937& draw, const std::vector<std::vector<double>>& latency,
                     std::vector<std::vector<double>>& together) {
    const uint32_t count = boxes_.count();
    const uint32_t seats = count + count % 2;  // of an odd number one sits out
    std::vector<uint32_t> seat(seats);
    std::iota(seat.begin(), seat.end(), 0);
    std::ranges::shuffle(seat, draw);
    for (uint32_t turn = 0; turn + 1 < seats; ++turn) {
      SI_RETURN_IF_ERROR(ranks_.barrier());
      for (uint32_t i = 0; i < seats / 2; ++i) {
        const uint32_t a = seat[i], b = seat[seats - 1 - i];
        if (!boxes_.leads || a >= count || b >= count) continue;
        if (boxes_.mine != a && boxes_.mine != b) continue;
        const uint32_t other = boxes_.mine == a ? b : a;
        const uint64_t begin_ns = base::now_ns();
        // A message waits until it is expected.
        std::byte answer{};
        SI_ASSIGN_OR_RETURN(const auto in, expect(large_, other));
        SI_ASSIGN_OR_RETURN(
            const auto answered,
            ranks_.collectives()->receive(Channel::kBackward, {&answer, 1}, boxes_.leader[other]));
        SI_RETURN_IF_ERROR(send(Channel::kForward, large_, other));
        SI_RETURN_IF_ERROR(in->wait());
        SI_RETURN_IF_ERROR(send(Channel::kBackward, 1, other));
        SI_RETURN_IF_ERROR(answered->wait());
        const size_t at = boxes_.mine * count + other;
        together[at].push_back(static_cast<double>(large_) /
                               (base::seconds_since(begin_ns) - latency[at].back()));
        moved_bytes_ += 2 * static_cast<double>(large_);
      }
      std::rotate(seat.begin() + 1, seat.end() - 1, seat.end());
    }
    return {};
  }

  const train::Ranks& ranks_;
  const Boxes& boxes_;
  std::vector<std::byte> sent_, received_;
  uint64_t large_ = kLarge;
  double moved_bytes_ = 0;  // there and back, with all boxes at once
  std::vector<double> cores_rates_;
};

Status measure_links(const LinksJob& job, const train::Ranks& ranks) {
  SI_ASSIGN_OR_RETURN(const Boxes boxes, find_boxes(ranks));
  if (boxes.count() < 2) {
    return Status(
        base::ErrorCode::kInvalidArgument, "all ranks are on one box, which has no links",
        "Start ranks on several (torchrun --nnodes 2 --node-rank N ...), or leave --links "
        "out.");
  }
  Measuring measuring(ranks, boxes);
  SI_ASSIGN_OR_RETURN(sim::Cluster cluster, measuring.measure());
  Status measured;
  std::string machine;
  if (job.machine && boxes.leads) {
    auto text = job.machine();
    measured = text.status();
    if (text.ok()) machine = std::move(*text);
  }
  SI_RETURN_IF_ERROR(ranks.all_ok_without_timeout("the machine", measured));
  SI_ASSIGN_OR_RETURN(const std::vector<std::string> machines, ranks.all_texts(std::move(machine)));
  Status written;
  if (ranks.first()) {
    const std::filesystem::path file(job.file);
    cluster.name = job.name;
    for (uint32_t i = 0; i < boxes.count(); ++i) {
      sim::Box box{boxes.names[i], boxes.names[i] + ".toml", {}, boxes.ranks[i]};
      if (job.machine && written.ok()) {
        written = base::write_text_file((file.parent_path() / box.file).string(),
                                        machines[boxes.leader[i]], "cannot write the machine file");
      }
      box.machine.network.ranks_cores_bytes_per_s = measuring.cores_rates()[i];
      cluster.boxes.push_back(std::move(box));
    }
    if (written.ok()) {
      written = base::write_text_file(job.file, sim::cluster_to_toml(cluster),
                                      "cannot write the cluster's file");
    }
  }
  SI_RETURN_IF_ERROR(ranks.all_ok("the cluster's file", written));
  if (!ranks.first()) return {};
  for (uint32_t a = 0; a < boxes.count(); ++a) {
    for (uint32_t b = 0; b < boxes.count(); ++b) {
      if (a == b) continue;
      const sim::Link& link = cluster.link(a, b);
      fmt::print("{} to {}: {:.6g} Mbit/s, {:.6g} with all at once, spread {:.1f} %, latency {}\n",
                 boxes.names[a], boxes.names[b], 8e-6 * link.bytes_per_s,
                 8e-6 * link.together_bytes_per_s, 100 * link.spread,
                 base::format_seconds(link.latency_s));
    }
  }
  fmt::print("{} written{}; smartinf plan MODEL --cluster {} --tokens-per-step N\n", job.file,
             job.machine ? ""
                         : "; without --device no box was measured: put a machine file of each "
                           "beside it, as its [[box]] names it",
             job.file);
  return {};
}

}  // namespace

int run_links(const LinksJob& job) {
  const auto environment = train::rank_environment();
  if (!environment.ok()) return report(environment.status(), kExitUsage);
  if (!*environment) {
    return report(
        Status(base::ErrorCode::kInvalidArgument, "--links is given, and there is one process",
               "Start a rank on each box: torchrun --nnodes 2 --node-rank N --master-addr "
               "HOST --master-port 29500 --no-python --nproc-per-node 1 smartinf calibrate "
               "--links --save cluster.toml"),
        kExitUsage);
  }
  const auto ranks = train::join_ranks(**environment, kTimeout);
  if (!ranks.ok()) return report(ranks.status());
  const Status done = measure_links(job, *ranks);
  if (done.ok()) return kExitDone;
  ranks->failed(done);
  return report(done);
}

}  // namespace smartinf::apps
