// smartinf bench overlap: a training step whose computing is a sleep of a given length, as if an
// accelerator computed, with the update waited for, behind the next forward (late) and beside
// backward (early), in turn. It shows what of an update is hidden, and where that ends.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/clock.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/units.h"
#include "smartinf/engine/updater.h"
#include "smartinf/storage/erase.h"

#include "apps/smartinf/commands.h"
#include "apps/smartinf/format_flags.h"
#include "apps/smartinf/interrupt.h"
#include "apps/smartinf/median.h"
#include "apps/smartinf/synthetic_steps.h"

namespace smartinf::apps {
namespace {

using base::DataType;
using base::Status;

struct OverlapOptions {
  double params = 2e8;
  std::vector<std::string> devices;
  std::vector<double> computing = {0.25, 0.5, 1, 2, 4};
  std::vector<std::string> overlaps = {"none", "late", "early"};
  std::string guesses = "right";
  uint64_t layers = 32;
  int rounds = 3;
  int steps = 3;
  FormatFlags format;
  std::string memory_budget = "512MiB";
  uint32_t threads = 0;
  bool spill = false;
  bool json = false;
};

/// Time of a step, and the time that no schedule could have been faster than.
struct Timing {
  double step_s = 0;     // median of the steps
  double exposed_s = 0;  // of it, waited for the update
  double bound_s = 0;
};

class OverlapBench {
 public:
  explicit OverlapBench(const OverlapOptions& options)
      : interrupt_("stopping after this step; press Ctrl-C again to stop at once"),
        options_(options) {}

  Status run() {
    updater_options_.gradient_type = DataType::kBf16;
    updater_options_.format = options_.format.format();
    if (options_.spill) updater_options_.gradient_budget_bytes = 0;
    SI_ASSIGN_OR_RETURN(updater_options_.memory_budget_bytes,
                        base::parse_bytes(options_.memory_budget));
    for (const std::string& path : options_.devices) {
      engine::DeviceOptions device;
      device.path = path;
      device.threads = options_.threads;
      updater_options_.devices.push_back(device);
    }
    SI_ASSIGN_OR_RETURN(steps_, SyntheticSteps::make(static_cast<uint64_t>(options_.params),
                                                     DataType::kBf16, DataType::kBf16));
    const Status measured = measure();
    updater_.reset();
    if (made_) {
      for (const std::string& device : options_.devices) {
        const Status erased = storage::erase_store(device);
        if (measured.ok()) SI_RETURN_IF_ERROR(erased);
      }
    }
    return measured;
  }

 private:
  Status measure() {
    SI_ASSIGN_OR_RETURN(updater_, engine::Updater::open(updater_options_, steps_->space()));
    if (!updater_->fresh()) {
      return Status(base::ErrorCode::kAlreadyExists, "the devices hold a state already",
                    "Name directories that are empty or do not exist.");
    }
    made_ = true;
    SI_RETURN_IF_ERROR(steps_->initialize(*updater_));
    SI_RETURN_IF_ERROR(steps_->step(*updater_).status());  // touches memory for the first time
    if (std::ranges::count(options_.overlaps, "early") != 0) {
      SI_RETURN_IF_ERROR(updater_->early_update_possible());
    }
    if (!options_.json) {
      for (const std::string& line : updater_->describe_devices()) fmt::print("{}\n", line);
      fmt::print("{:>9} {:>9}  {:<7}{:>9} {:>9} {:>9}   step / bound\n", "computing", "update",
                 "overlap", "step", "waited", "bound");
    }
    for (int round = 0; round < options_.rounds; ++round) {
      for (const double share : options_.computing) {
        // Measured anew each time: the rate of a drive drifts.
        SI_ASSIGN_OR_RETURN(const double update_s, time_update());
        for (const std::string& overlap : options_.overlaps) {
          SI_ASSIGN_OR_RETURN(const Timing timing, time_steps(overlap, share * update_s, update_s));
          print(round, share, update_s, overlap, timing);
        }
      }
    }
    return Status();
  }

  /// Seconds of an update behind which nothing is computed, until it is committed.
  base::Result<double> time_update() {
    std::vector<double> seconds;
    for (int i = 0; i < 3; ++i) {
      SI_RETURN_IF_ERROR(check_interrupt());
      SI_ASSIGN_OR_RETURN(const StepTimes times, steps_->step(*updater_));
      seconds.push_back(times.update_s);
    }
    return median(seconds);
  }

  Status check_interrupt() const {
    if (!interrupt_.requested()) return Status();
    return Status(base::ErrorCode::kCancelled, "stopped before the end");
  }

  struct Layer {
    uint64_t first = 0;
    uint64_t count = 0;
  };
  std::vector<Layer> layers() const {
    const uint64_t count = steps_->space().count();
    const uint64_t cuts = base::divide_up(count, engine::kGradientCutElements);
    const uint64_t wanted = std::min(options_.layers, cuts);
    std::vector<Layer> layers;
    for (uint64_t i = 0; i < wanted; ++i) {
      const uint64_t first = i * cuts / wanted * engine::kGradientCutElements;
      const uint64_t end = (i + 1) * cuts / wanted * engine::kGradientCutElements;
      layers.push_back({first, std::min(end, count) - first});
    }
    return layers;
  }

  static void compute(double seconds) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }

  /// The first step is not counted: nothing is hidden behind its forward.
  base::Result<Timing> time_steps(const std::string& overlap, double computing_s, double update_s) {
    const std::vector<Layer> all = layers();
    std::vector<double> seconds;
    std::vector<double> exposed;
    uint64_t end_ns = base::now_ns();
    for (int i = 0; i <= options_.steps; ++i) {
      SI_RETURN_IF_ERROR(check_interrupt());
      const bool right = options_.guesses == "right" || (options_.guesses == "alternate" && i % 2);
      SI_ASSIGN_OR_RETURN(const double waited_s, step(all, overlap, computing_s, right));
      const uint64_t begin_ns = std::exchange(end_ns, base::now_ns());
      if (i == 0) continue;
      exposed.push_back(waited_s);
      seconds.push_back(static_cast<double>(end_ns - begin_ns) * 1e-9);
    }
    SI_RETURN_IF_ERROR(updater_->wait_commit());
    const double forward_s = computing_s / 3;
    const double backward_s = computing_s - forward_s;
    const double bound_s = overlap == "none"   ? computing_s + update_s
                           : overlap == "late" ? backward_s + std::max(forward_s, update_s)
                                               : std::max(computing_s, update_s);
    return Timing{median(seconds), median(exposed), bound_s};
  }

  /// Forward takes a third of the computing and backward the rest. Returns the seconds that were
  /// waited for weights and for the commit of the step before.
  base::Result<double> step(const std::vector<Layer>& all, const std::string& overlap,
                            double computing_s, bool right) {
    const double layer_s = computing_s / 3 / static_cast<double>(all.size());
    double waited_s = 0;
    const auto timed = [&](Status status, uint64_t begin_ns) {
      waited_s += base::seconds_since(begin_ns);
      return status;
    };
    for (const Layer& layer : all) {
      const uint64_t begin_ns = base::now_ns();
      SI_RETURN_IF_ERROR(timed(updater_->wait_weights(layer.first, layer.count), begin_ns));
      compute(layer_s);
    }
    engine::UpdateOptions options = steps_->update_options();
    for (auto layer = all.rbegin(); layer != all.rend(); ++layer) {
      compute(2 * layer_s);
      if (layer == all.rbegin()) {
        const uint64_t begin_ns = base::now_ns();
        SI_RETURN_IF_ERROR(timed(updater_->begin_step(), begin_ns));
        if (overlap == "early") {
          SI_RETURN_IF_ERROR(updater_->start_early_update(options, steps_->weights_type(),
                                                          steps_->weights_sink(), 0));
        }
      }
      SI_RETURN_IF_ERROR(steps_->put_gradients(*updater_, layer->first, layer->count));
    }
    SI_RETURN_IF_ERROR(updater_->finish_gradients(1).status());
    if (!right) options.gradient_scale = 0.5;  // as if it had been clipped
    SI_RETURN_IF_ERROR(
        updater_->start_update(options, steps_->weights_type(), steps_->weights_sink()));
    SI_RETURN_IF_ERROR(updater_->start_commit({}));
    if (overlap != "none") return waited_s;
    const uint64_t begin_ns = base::now_ns();
    SI_RETURN_IF_ERROR(timed(updater_->wait_commit(), begin_ns));
    return waited_s;
  }

  void print(int round, double share, double update_s, const std::string& overlap,
             const Timing& timing) const {
    if (options_.json) {
      const nlohmann::ordered_json row = {
          {"round", round},
          {"params", steps_->space().count()},
          {"devices", options_.devices.size()},
          {"state_format", base::state_format_name(updater_options_.format)},
          {"spill", options_.spill},
          {"guesses", options_.guesses},
          {"computing_share", share},
          {"computing_s", share * update_s},
          {"update_s", update_s},
          {"overlap", overlap},
          {"step_s", timing.step_s},
          {"exposed_s", timing.exposed_s},
          {"bound_s", timing.bound_s}};
      fmt::print("{}\n", row.dump());
    } else {
      fmt::print("{:>9} {:>9}  {:<7}{:>9} {:>9} {:>9}   {:.2f}\n",
                 base::format_seconds(share * update_s), base::format_seconds(update_s), overlap,
                 base::format_seconds(timing.step_s), base::format_seconds(timing.exposed_s),
                 base::format_seconds(timing.bound_s), timing.step_s / timing.bound_s);
    }
    std::fflush(stdout);
  }

  Interrupt interrupt_;
  const OverlapOptions options_;
  engine::UpdaterOptions updater_options_;
  std::unique_ptr<SyntheticSteps> steps_;  // before the updater, which writes into its weights
  std::unique_ptr<engine::Updater> updater_;
  bool made_ = false;  // the state on the devices is this benchmark's
};

}  // namespace

void add_bench_overlap(CLI::App& bench, Run& run) {
  auto options = std::make_shared<OverlapOptions>();
  CLI::App* command = bench.add_subcommand(
      "overlap", "Time steps in which a sleep stands for computing, with each overlap in turn");
  command->add_option("--params", options->params, "Number of parameters, e.g. 2e8")
      ->check(CLI::Range(1.0, 1e13))
      ->capture_default_str();
  command->add_option("--device", options->devices, "Directory for the state; may be repeated")
      ->required();
  command
      ->add_option("--computing", options->computing,
                   "Lengths of forward and backward together, as multiples of the update's time")
      ->delimiter(',')
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command
      ->add_option("--overlap", options->overlaps, "Settings of optimizer.overlap to time in turn")
      ->delimiter(',')
      ->check(CLI::IsMember(base::name_list(enum_names(plan::Overlap{}).subspan(1))))
      ->capture_default_str();
  command
      ->add_option("--guesses", options->guesses,
                   "Guesses of early updates: all right, all wrong, or every other one")
      ->check(CLI::IsMember({"right", "wrong", "alternate"}))
      ->capture_default_str();
  command
      ->add_option("--layers", options->layers, "Number of layers, for each of which forward waits")
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--rounds", options->rounds, "Number of rounds over all settings")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command
      ->add_option("--steps", options->steps,
                   "Number of steps of each setting, of which the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  add_format_flags(*command, options->format, "f32");
  command->add_option("--memory-budget", options->memory_budget, "Memory for the engine's buffers")
      ->capture_default_str();
  command
      ->add_option("--threads", options->threads,
                   "Threads of each device; 0: the cores are divided among the devices")
      ->capture_default_str();
  command->add_flag("--spill", options->spill,
                    "Spill all gradients to the drive instead of keeping them in memory");
  command->add_flag("--json", options->json, "Print one JSON object for each row");
  command->footer(
      "The bound is the time that no schedule of this kind can beat: computing + update (none);\n"
      "backward + the longer of forward and update (late); the longer of computing and update "
      "(early).\n"
      "\n"
      "Examples:\n"
      "  smartinf bench overlap --params 2e8 --device /mnt/nvme0/bench\n"
      "  smartinf bench overlap --device a --device b --computing 1 --overlap none,early --guesses "
      "wrong");
  command->callback([options, &run] {
    run = [options] {
      const Status status = OverlapBench(*options).run();
      return status.ok() ? kExitDone : report(status);
    };
  });
}

}  // namespace smartinf::apps
