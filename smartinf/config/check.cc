#include "smartinf/config/check.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <type_traits>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/config/keys.h"

namespace smartinf::config {
namespace {

using base::ErrorCode;
using base::Status;

Status wrong(std::string_view key, std::string_view why, std::string advice) {
  return Status(ErrorCode::kInvalidArgument, fmt::format("{} {}", key, why), std::move(advice));
}

// Also refuses a NaN.
Status within(std::string_view key, double value, double least, double most) {
  if (value >= least && value <= most) return Status();
  return wrong(key, fmt::format("is {}", value),
               fmt::format("Choose a value from {} to {}.", least, most));
}

Status check_bytes(std::string_view key, uint64_t bytes, uint64_t least, uint64_t most) {
  if (bytes >= least && bytes <= most) return Status();
  return wrong(key, bytes == ~uint64_t{0} ? "is unlimited" : "is " + base::format_bytes(bytes),
               fmt::format("Choose a size from {} to {}.", base::format_bytes(least),
                           base::format_bytes(most)));
}

// An option that the chosen rule ignores was set by mistake, or the rule was.
Status check_rule(const kernels::RuleOptions& rule) {
  using kernels::UpdateRule;
  const double below_one = std::nextafter(1.0, 0.0);
  const double most = std::numeric_limits<double>::max();
  SI_RETURN_IF_ERROR(within("optimizer.beta1", rule.beta1, 0, below_one));
  SI_RETURN_IF_ERROR(within("optimizer.beta2", rule.beta2, 0, below_one));
  SI_RETURN_IF_ERROR(within("optimizer.eps", rule.eps, 1e-30, 1));
  SI_RETURN_IF_ERROR(within("optimizer.dampening", rule.dampening, 0, 1));
  SI_RETURN_IF_ERROR(within("optimizer.lr_decay", rule.lr_decay, 0, most));
  SI_RETURN_IF_ERROR(
      within("optimizer.initial_accumulator_value", rule.initial_accumulator_value, 0, most));
  const auto only = [](std::string_view key, std::string_view whose) {
    return wrong(key, "is set, but the update rule does not use it",
                 fmt::format("Leave it out, or set optimizer.rule = \"{}\".", whose));
  };
  if (rule.rule != UpdateRule::kSgdMomentum) {
    if (rule.dampening != 0) return only("optimizer.dampening", "sgd");
    if (rule.nesterov) return only("optimizer.nesterov", "sgd");
  }
  if (rule.rule != UpdateRule::kAdagrad) {
    if (rule.lr_decay != 0) return only("optimizer.lr_decay", "adagrad");
    if (rule.initial_accumulator_value != 0) {
      return only("optimizer.initial_accumulator_value", "adagrad");
    }
  }
  if (rule.nesterov && (rule.beta1 == 0 || rule.dampening != 0)) {
    return wrong("optimizer.nesterov", "needs a momentum (beta1) above 0 and no dampening",
                 "Set optimizer.beta1 above 0 and optimizer.dampening to 0.");
  }
  return Status();
}

// A second: more is a slip, and the store would take the drive for dead.
constexpr double kLatencyMaxUs = 1e6;

Status check_devices(const std::vector<engine::DeviceOptions>& devices) {
  // Paths of different ranks may be the same: the ranks may be on different machines.
  std::map<std::pair<std::string, uint32_t>, size_t> seen;
  for (size_t i = 0; i < devices.size(); ++i) {
    const engine::DeviceOptions& device = devices[i];
    const std::string path_key = numbered_key("device.path", i);
    if (device.path.empty()) {
      return wrong(path_key, "is empty", "Name a directory or a block device.");
    }
    const std::string path = engine::is_remote(device.path)
                                 ? device.path
                                 : std::filesystem::path(device.path).lexically_normal().string();
    const auto [other, fresh] = seen.emplace(
        std::pair(path.ends_with('/') ? path.substr(0, path.size() - 1) : path, device.rank), i);
    if (!fresh) {
      return wrong(path_key, fmt::format("is also the path of device {}", other->second),
                   "Give each device a directory of its own.");
    }
    SI_RETURN_IF_ERROR(within(numbered_key("device.threads", i), device.threads, 0, 4096));
    SI_RETURN_IF_ERROR(engine::check_processor(device.processor)
                           .with_context(numbered_key("device.processor", i)));
    SI_RETURN_IF_ERROR(within(numbered_key("device.bandwidth", i), device.bandwidth, 0, 1e18));
    SI_RETURN_IF_ERROR(within(numbered_key("device.internal_latency_us", i),
                              device.internal_link.latency_us, 0, kLatencyMaxUs));
  }
  return Status();
}

}  // namespace

Status check_recipe(const Recipe& recipe) {
  SI_RETURN_IF_ERROR(train::validate(recipe.options));
  const engine::UpdaterOptions& updater = recipe.updater;
  SI_RETURN_IF_ERROR(check_rule(updater.rule));
  SI_RETURN_IF_ERROR(check_bytes("engine.memory_budget", updater.memory_budget_bytes, base::kMiB,
                                 uint64_t{1} << 50));
  if (updater.io_bytes != 0) {
    SI_RETURN_IF_ERROR(
        check_bytes("engine.io_size", updater.io_bytes, base::kIoAlignment, base::kGiB));
    if (updater.io_bytes % base::kIoAlignment != 0) {
      return wrong("engine.io_size", fmt::format("is {} bytes", updater.io_bytes),
                   fmt::format("Choose a multiple of {}.", base::kIoAlignment));
    }
  }
  SI_RETURN_IF_ERROR(within("engine.io_depth", updater.io_depth, 0, 4096));
  SI_RETURN_IF_ERROR(
      within("engine.host_link_latency_us", updater.host_link.latency_us, 0, kLatencyMaxUs));
  SI_RETURN_IF_ERROR(within("engine.subgroup_elements",
                            static_cast<double>(updater.subgroup_elements), 0, 0x1p40));
  if (recipe.options.train.where == train::OptimizerWhere::kMemory &&
      updater.rule.rule != kernels::UpdateRule::kAdamW) {
    return wrong("optimizer.rule",
                 "is not \"adamw\", the only rule that optimizer.where = \"memory\" has",
                 "Choose optimizer.where = \"device\" or optimizer.rule = \"adamw\".");
  }
  if (recipe.options.train.where == train::OptimizerWhere::kMemory &&
      updater.state_cache_bytes != 0) {
    return wrong("memory.state_cache",
                 "is set, but optimizer.where = \"memory\" keeps the whole state in memory",
                 "Leave it out, or set optimizer.where = \"device\".");
  }
  const compress::CompressOptions& compress = updater.compress;
  SI_RETURN_IF_ERROR(within("compress.density", compress.density, 0, 1));
  if (compress.on() && recipe.options.train.where != train::OptimizerWhere::kDevice) {
    return wrong("compress.density",
                 "is set, but gradients cross the host link only with optimizer.where = \"device\"",
                 "Leave it out, or set optimizer.where = \"device\".");
  }
  if (compress.on() && compress.stages == compress::kChosenStages &&
      recipe.options.ranks.cluster.empty()) {
    return wrong(
        "compress.stages", "is \"auto\", but ranks.cluster names no file to choose by",
        "Make one with smartinf calibrate --links, or by hand (docs/cluster.md), or set it "
        "to \"all\".");
  }
  SI_RETURN_IF_ERROR(within("remote.reconnect_seconds", updater.remote.reconnect_seconds, 0, 1e6));
  SI_RETURN_IF_ERROR(within("remote.deadline_seconds", updater.remote.deadline_seconds, 1, 1e6));
  SI_RETURN_IF_ERROR(within("remote.restart_seconds", recipe.restart_seconds, 0, 1e6));
  SI_RETURN_IF_ERROR(
      check_bytes("remote.window", updater.remote.window_bytes, 4 * base::kMiB, uint64_t{1} << 40));
  return check_devices(updater.devices);
}

}  // namespace smartinf::config
