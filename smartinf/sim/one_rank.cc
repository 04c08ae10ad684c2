#include "smartinf/sim/one_rank.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/plan/micro_batches.h"
#include "smartinf/plan/rank_share.h"

namespace smartinf::sim {
namespace {

using base::ErrorCode;
using base::Status;

constexpr uint32_t kRanksMax = 1024;

/// Relative: at which a device moves a step's state, by which parameters are shared out.
double bandwidth_of(const DeviceGroup& device) {
  return 1 / (1 / device.read_bytes_per_s + 1 / device.write_bytes_per_s);
}

/// The devices that each rank of a machine drives, by rank.
std::vector<std::vector<const DeviceGroup*>> devices_of_ranks(const Machine& machine,
                                                              uint32_t ranks) {
  std::vector<std::vector<const DeviceGroup*>> all(ranks);
  const std::vector<const DeviceGroup*> devices = machine.each_device();
  for (size_t i = 0; i < devices.size(); ++i) {
    all[plan::rank_of_device(i, devices.size(), ranks)].push_back(devices[i]);
  }
  return all;
}

double bandwidth_of(const std::vector<const DeviceGroup*>& devices) {
  double sum = 0;
  for (const DeviceGroup* device : devices) sum += bandwidth_of(*device);
  return sum;
}

/// Elements that a thread compresses, where the machine does not say: a third of what a core with
/// AVX-512 does (docs/results/smartcomp.md).
constexpr double kCompressedPerSecond = 5e8;

/// Bytes of a gradient's element that each rank sends where the state is not its own.
std::vector<uint64_t> bytes_of_sums(const Machine& machine, const StepOptions& options) {
  std::vector<uint64_t> bytes;
  for (uint32_t rank = 0; rank < options.ranks; ++rank) {
    const auto range = plan::micro_batches_of(options.accumulation, rank, options.ranks);
    uint64_t of_rank = 0;
    for (const plan::MicroBatchRange& node : plan::summation_nodes(options.accumulation, range)) {
      of_rank += node.size() == 1 ? machine.software.gradient_bytes : sizeof(float);
    }
    bytes.push_back(of_rank);
  }
  return bytes;
}

Exchange exchange_of(const Machine& machine, const StepOptions& options, double share) {
  const uint32_t here = options.ranks / options.machines;
  const std::vector<uint64_t> sums = bytes_of_sums(machine, options);
  Exchange exchange;
  exchange.ranks = options.ranks;
  exchange.share = share;
  exchange.gradient_kept = *std::max_element(sums.begin(), sums.end());
  exchange.gradient_sent = static_cast<double>(exchange.gradient_kept);
  for (const uint64_t bytes : sums) exchange.gradient_received += static_cast<double>(bytes);
  exchange.gradient_received -= exchange.gradient_sent;
  if (options.compressed_gradient_bytes > 0) {
    const double known = machine.host.select_params_per_s;
    exchange.gradient_sent = options.compressed_gradient_bytes;
    exchange.gradient_received = (options.ranks - 1.0) * exchange.gradient_sent;
    exchange.compress_s = 1 / (known > 0 ? known : kCompressedPerSecond);
  }
  exchange.near = (here - 1.0) / (options.ranks - 1.0);
  exchange.near_bytes_per_s = machine.network.near_bytes_per_s / here;
  exchange.far_bytes_per_s = machine.network.bytes_per_s / here;
  exchange.latency_s = options.machines > 1 ? machine.network.latency_s : 0;
  exchange.cores_bytes_per_s = machine.network.ranks_cores_bytes_per_s / here;
  return exchange;
}

/// The ranks of a machine compute on one GPU each, or on the host's cores together.
void share_gpus(Gpu& gpu, uint32_t ranks) {
  const uint32_t gpus = std::exchange(gpu.count, 1);
  const bool none = gpu.name == "none";
  const double part = none ? 1.0 / ranks : std::min(1.0, static_cast<double>(gpus) / ranks);
  gpu.peak_flops *= part;
  gpu.memory_bytes_per_s *= part;
  gpu.link_bytes_per_s *= part;
  if (gpu.links_shared || gpu.link_is_host_link) gpu.link_bytes_per_s /= std::min(gpus, ranks);
}

}  // namespace

Status check_ranks(const Machine& machine, const StepOptions& options) {
  const auto invalid = [](std::string what, std::string advice) {
    return Status(ErrorCode::kInvalidArgument, std::move(what), std::move(advice));
  };
  if (options.ranks == 1 && options.machines == 1) return {};
  if (options.ranks == 0 || options.ranks > kRanksMax) {
    return invalid(fmt::format("{} ranks", options.ranks),
                   fmt::format("Give a number from 1 to {}.", kRanksMax));
  }
  if (options.machines == 0 || options.ranks % options.machines != 0) {
    return invalid(fmt::format("{} ranks on {} machines", options.ranks, options.machines),
                   "Give as many ranks for each machine: a multiple of the machines.");
  }
  if (options.accumulation < options.ranks) {
    return invalid(fmt::format("a step has {} micro batches, but there are {} ranks to share them",
                               options.accumulation, options.ranks),
                   "Give at least one for each rank (--accumulation).");
  }
  if (options.machines > 1 && machine.network.bytes_per_s <= 0) {
    return invalid(fmt::format("{} machines, but no network between them", options.machines),
                   "Write [network] and bytes_per_s into the machine file.");
  }
  const auto unsupported = [](std::string what, std::string advice) {
    return Status(ErrorCode::kUnsupported, std::move(what), std::move(advice));
  };
  if (machine.software.overlapped == plan::ScheduleVariant::kPaper) {
    return unsupported("several ranks are those of `smartinf train`, not of the paper's stack",
                       "Take a machine whose software.overlapped is \"overlapped\".");
  }
  if (options.method == Method::kSmartComp) {
    return unsupported("several ranks compress what they send each other, not what devices get",
                       "Take method su+o.");
  }
  if (options.overlap == plan::Overlap::kEarly) {
    return unsupported("several ranks do not update before all gradients are there",
                       "Take overlap late.");
  }
  if (options.streamed() != nullptr && machine.gpu.name != "none") {
    return unsupported("several ranks do not stream weights to accelerators",
                       "Take a GPU with more memory, or one rank.");
  }
  return {};
}

Machine part_of_machine(const Machine& machine, uint32_t ranks, double* share) {
  const auto devices = devices_of_ranks(machine, ranks);
  const auto most = std::max_element(
      devices.begin(), devices.end(),
      [](const auto& a, const auto& b) { return bandwidth_of(a) < bandwidth_of(b); });
  const double part = bandwidth_of(*most) / bandwidth_of(machine.each_device());
  if (share != nullptr) *share = part;
  Machine rank = machine;
  rank.devices.clear();
  const DeviceGroup* last = nullptr;
  for (const DeviceGroup* device : *most) {
    if (std::exchange(last, device) != device) rank.devices.emplace_back(*device).count = 0;
    DeviceGroup& group = rank.devices.back();
    ++group.count;
    // Ranks whose devices are in one server share its link.
    if (device->remote)
      group.link_bytes_per_s = device->link_bytes_per_s * group.count / device->count;
  }
  rank.host.memory_bytes /= ranks;
  rank.host.link_bytes_per_s *= part;
  rank.host.update_bytes_per_s *= part;
  rank.host.weights_bytes_per_s *= part;
  rank.network.bytes_per_s /= ranks;
  rank.network.cores_bytes_per_s /= ranks;
  rank.network.ranks_cores_bytes_per_s /= ranks;
  share_gpus(rank.gpu, ranks);
  return rank;
}

OneRank one_rank(const Machine& machine, const StepOptions& options) {
  OneRank one{machine, options, {}};
  if (options.ranks == 1) return one;
  double part = 1;
  one.machine = part_of_machine(machine, options.ranks / options.machines, &part);
  one.exchange = exchange_of(machine, options, part / options.machines);
  one.options.ranks = one.options.machines = 1;
  one.options.accumulation =
      static_cast<uint32_t>(base::divide_up(options.accumulation, options.ranks));
  one.options.state_cache_bytes =
      plan::share_of_devices(options.state_cache_bytes, devices_of_one(machine, options),
                             devices_of_all(machine, options));
  return one;
}

uint64_t devices_of_all(const Machine& machine, const StepOptions& options) {
  if (options.devices > 0) return options.devices;
  return uint64_t{std::max(1u, machine.device_count())} * options.machines;
}

uint64_t devices_of_one(const Machine& machine, const StepOptions& options) {
  const uint32_t here = options.ranks / options.machines;
  std::vector<uint32_t> rank_of;
  const size_t devices = std::max(1u, machine.device_count());
  for (size_t i = 0; i < devices; ++i) {
    rank_of.push_back(plan::rank_of_device(i, devices, here));
  }
  return plan::device_sharing(rank_of, here).most;
}

}  // namespace smartinf::sim
