#include "smartinf/sim/closed_form.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace smartinf::sim {

using base::Result;

LinkBytes table_one(Method method, kernels::UpdateRule rule, double parameters, double ratio) {
  const double state = 4 * static_cast<double>(kernels::rule_planes(rule).size());
  switch (method) {
    case Method::kBaseline:
      return {(state + 4) * parameters, (state + 4) * parameters};
    case Method::kSmart:
    case Method::kSmartOver:
      return {4 * parameters, 4 * parameters};
    case Method::kSmartComp:
      return {4 * parameters, ratio * 4 * parameters};
  }
  return {};
}

Result<ClosedForm> closed_form(const ModelShape& model, const Machine& machine,
                               const StepOptions& options) {
  SI_RETURN_IF_ERROR(check_model(model));
  SI_RETURN_IF_ERROR(check_machine(machine));
  const DeviceGroup& device = machine.devices.front();
  const Software& software = machine.software;
  const auto n = static_cast<double>(machine.device_count());
  const auto parameters = static_cast<double>(model.parameters());
  const bool baseline = options.method == Method::kBaseline;
  const double state = state_bytes_per_parameter(options.rule, options.format);
  const double dense = software.gradient_bytes;
  // Where the host selects, whole gradients leave the GPU and wait in memory.
  const bool on_host = host_selects(machine, options);
  const double gradient =
      options.method == Method::kSmartComp && !on_host ? 4 * options.ratio : dense;
  const bool spilled = software.gradient_spilled && !on_host;
  const double read = parameters * (state + (spilled ? gradient : 0));
  const double written = parameters * state;

  ClosedForm form;
  form.optimizer_one_s = read / device.read_bytes_per_s + written / device.write_bytes_per_s;
  const double swapped = baseline ? std::max(read, written) : parameters * software.weight_bytes;
  form.swap_one_s = swapped / device.link_bytes_per_s;
  // Remote devices pass the network and their servers' links, in place of the host's.
  const auto servers = static_cast<double>(machine.devices.size());
  const double shared =
      device.remote ? std::min(machine.network.bytes_per_s, servers * device.link_bytes_per_s)
                    : machine.host.link_bytes_per_s;
  form.links_worth = shared / device.link_bytes_per_s;
  const double drives_s = form.optimizer_one_s / n;
  const double link_s = form.swap_one_s / std::min(n, form.links_worth);
  form.update_s = std::max(drives_s, link_s);
  form.link_bound = link_s > drives_s;

  const Gpu& gpu = machine.gpu;
  const double products_per_s = gpu.peak_flops * gpu.product_efficiency;
  const auto layers = static_cast<double>(model.layers);
  const double forward_flops = layers * model.layer_forward_flops() + model.head_forward_flops();
  const double link = gpu.name == "none" ? 1e30 : gpu.link_bytes_per_s;
  form.forward_s = std::max(forward_flops / products_per_s, 2 * parameters / link);
  form.backward_s =
      std::max(3 * forward_flops / products_per_s, std::max(2.0, gradient) * parameters / link);
  form.total_s = form.forward_s + form.backward_s + form.update_s;
  return form;
}

Result<std::vector<Reason>> why_they_part(const ModelShape& model, const Machine& machine,
                                          const StepOptions& options) {
  SI_ASSIGN_OR_RETURN(const StepTimes real, simulate_step(model, machine, options));
  constexpr double kEndless = 1e18;
  struct Ideal {
    const char* what;
    std::function<void(Machine&, StepOptions&)> apply;
  };
  const std::vector<Ideal> ideals{
      {"copies on the host take no time",
       [](Machine& m, StepOptions&) { m.host.copy_bytes_per_s = kEndless; }},
      {"gradients leave while backward goes on",
       [](Machine& m, StepOptions&) { m.software.offload_waits = false; }},
      {"selection takes no time",
       [](Machine& m, StepOptions&) {
         m.gpu.select_passes = 0;
         if (m.host.select_params_per_s > 0) m.host.select_params_per_s = kEndless;
         m.host.step_ahead_params_per_s = 0;
       }},
      {"drives lose nothing when reads and writes mix, nor to their own processor",
       [](Machine& m, StepOptions&) {
         for (DeviceGroup& device : m.devices) device.mixed_efficiency = 1;
       }},
      {"the update itself takes no time",
       [](Machine& m, StepOptions&) {
         m.host.update_bytes_per_s = kEndless;
         for (DeviceGroup& device : m.devices) {
           device.update_bytes_per_s = device.decompress_bytes_per_s = kEndless;
           device.kernel.clock_hz = 0;
         }
       }},
      {"the host link has no limit",
       [](Machine& m, StepOptions&) { m.host.link_bytes_per_s = kEndless; }},
      {"every subgroup overlaps with the next ones (eight slots)",
       [](Machine& m, StepOptions& o) {
         m.software.overlapped = plan::ScheduleVariant::kOverlapped;
         if (o.method == Method::kSmart) o.method = Method::kSmartOver;
         o.slots = 8;
       }},
  };
  std::vector<Reason> reasons;
  for (const Ideal& ideal : ideals) {
    Machine easier = machine;
    StepOptions wanted = options;
    ideal.apply(easier, wanted);
    SI_ASSIGN_OR_RETURN(const StepTimes times, simulate_step(model, easier, wanted));
    reasons.push_back({ideal.what, real.total_s - times.total_s});
  }
  std::stable_sort(reasons.begin(), reasons.end(),
                   [](const Reason& a, const Reason& b) { return a.saved_s > b.saved_s; });
  return reasons;
}

}  // namespace smartinf::sim
