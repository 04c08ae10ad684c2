#include "apps/smartinf/bench_step_flags.h"

#include "smartinf/engine/options.h"
#include "smartinf/kernels/update_rule.h"
#include "smartinf/storage/ring.h"
#include "smartinf/storage/store.h"

#include "apps/smartinf/remote_flags.h"
#include "apps/smartinf/values_flag.h"

namespace smartinf::apps {
namespace {

void add_update_flags(CLI::App& command, StepOptions& options) {
  command.add_option("--params", options.params, "Number of parameters, e.g. 2e8")
      ->check(CLI::Range(1.0, 1e13))
      ->capture_default_str();
  CLI::Option_group* places = command.add_option_group("places", "");
  places->add_option("--device", options.devices, "Directory for the state; may be repeated");
  places
      ->add_option("--emulated", options.emulated,
                   "Emulation: number of devices in the memory of this process")
      ->check(CLI::Range(1u, 64u));
  places->require_option(1);
  command
      .add_option("--repeat", options.repeat, "Number of steps, of which the median is reported")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  add_format_flags(command, options.format, "f32");
  command.add_option("--rule", options.rule, "Update rule")
      ->check(CLI::IsMember(base::enum_name_list<kernels::UpdateRule>()))
      ->capture_default_str();
  command
      .add_option("--durability", options.durability,
                  "Durability of the state; step: every step survives power loss; none: it is "
                  "overwritten in "
                  "place and takes half the space")
      ->check(CLI::IsMember(base::enum_name_list<storage::Durability>()))
      ->capture_default_str();
  command.add_flag("--no-checksums", options.no_checksums, "Leave out the checksums of blocks");
  command.add_option("--where", options.where, "Place of the update")
      ->check(CLI::IsMember(base::enum_name_list<engine::UpdateWhere>()))
      ->capture_default_str();
  command
      .add_option("--schedule", options.schedule, "Order of reads, updates and writes on a device")
      ->check(CLI::IsMember(base::name_list(plan::engine_schedule_names())))
      ->capture_default_str();
  command
      .add_option("--ring", options.ring,
                  "Kind of I/O; auto: io_uring where it works, else a pool of threads")
      ->check(CLI::IsMember(base::enum_name_list<storage::RingKind>()))
      ->capture_default_str();
  command
      .add_option("--memory-budget", options.memory_budget,
                  "Memory for all devices' buffers together")
      ->capture_default_str();
  command
      .add_option("--state-cache", options.state_cache,
                  "Size of the part of the state that is kept in memory as well and not read "
                  "again, e.g. 1GB")
      ->capture_default_str();
  command
      .add_option("--internal-read", options.internal_read,
                  "Emulation: bytes per second that each drive reads; 0: no limit")
      ->capture_default_str();
  command
      .add_option("--internal-write", options.internal_write,
                  "Emulation: bytes per second that each drive writes; 0: no limit")
      ->capture_default_str();
  command
      .add_option("--host-link", options.host_link,
                  "Emulation: bytes per second of the link between all devices and the host; 0: "
                  "no limit")
      ->capture_default_str();
  command
      .add_option("--shared", options.shared,
                  "Emulation: links whose two directions share the link's time: none, the drives', "
                  "or the drives' and the host link (all)")
      ->check(CLI::IsMember({"none", "drives", "all"}))
      ->capture_default_str();
  command
      .add_option("--slow-device", options.slow_device,
                  "Emulation: speed of the first of the --emulated devices, relative to the others")
      ->check(CLI::Range(0.01, 100.0))
      ->capture_default_str();
  command
      .add_option("--subgroup", options.subgroup,
                  "Parameters of a subgroup; 0: chosen from the memory budget")
      ->capture_default_str();
}

void add_gradient_flags(CLI::App& command, StepOptions& options) {
  command
      .add_option("--gradient", options.gradient,
                  "Type of gradients on the host link [bf16; f32 with --where host]")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command.add_option("--weights", options.weights, "Type of new weights on the host link")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command.add_flag("--spill", options.spill,
                   "Spill all gradients to the drive instead of keeping them in memory");
  command
      .add_option(
          "--density", options.density,
          "Share of a gradient's elements that are sent, e.g. 0.08; 0: gradients are sent dense")
      ->check(CLI::Range(0.0, 1.0));
  add_values_flag(command, options.values, "sign; without error feedback bf16");
  command
      .add_option("--error-feedback", options.error_feedback,
                  "Whether elements that are not sent are added to the next gradient")
      ->capture_default_str();
  command
      .add_option("--residual-every", options.residual_every,
                  "Steps between writes of the residual to the device; 0: never")
      ->capture_default_str();
}

void add_measure_flags(CLI::App& command, StepOptions& options) {
  command
      .add_option("--io-bytes", options.io_bytes, "Size of a transfer; 0: measured at first use")
      ->capture_default_str();
  command
      .add_option("--io-depth", options.io_depth,
                  "Transfers in flight in each direction; 0: measured at first use")
      ->capture_default_str();
  command
      .add_option("--threads", options.threads,
                  "Threads of each device; 0: the cores are divided among the devices")
      ->capture_default_str();
  command
      .add_option("--processor", options.processor,
                  "Processor of the updates, as in device.processor: cpu, opencl or opencl:DEVICE")
      ->capture_default_str();
  command
      .add_option("--trace", options.trace, "Chrome trace of all steps to write (ui.perfetto.dev)")
      ->type_name("FILE");
  command
      .add_option("--machine", options.machine,
                  "Machine file whose processors are simulated [this machine's, which are timed]")
      ->type_name("NAME|FILE");
  command.add_flag("--keep", options.keep, "Keep the state on the devices");
  command.add_flag("--json", options.json, "Print one flat JSON object");
  add_remote_flags(command, options.remote);
}

}  // namespace

void add_step_flags(CLI::App& command, StepOptions& options) {
  add_update_flags(command, options);
  add_gradient_flags(command, options);
  add_measure_flags(command, options);
}

}  // namespace smartinf::apps
