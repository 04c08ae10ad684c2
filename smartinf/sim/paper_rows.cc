#include "smartinf/sim/paper_rows.h"

#include <array>

namespace smartinf::sim {
namespace {

constexpr Method kB = Method::kBaseline;
constexpr Method kSu = Method::kSmart;
constexpr Method kSuO = Method::kSmartOver;
constexpr Method kSuOC = Method::kSmartComp;

// Throughput relative to the baseline with one device becomes seconds again.
constexpr double kOneDevice = 53.7;
constexpr PaperRow scaling(uint32_t devices, Method method, double throughput) {
  return {"scaling", "gpt2-4.0B", devices, method, 0, 0, 0, kOneDevice / throughput};
}
constexpr PaperRow raid0(uint32_t devices, double speed_up) {
  return {"raid0", "gpt2-4.0B", devices, kB, 0, 0, 0, kOneDevice / speed_up};
}

constexpr std::array kRows{
    PaperRow{"seconds", "gpt2-4.0B", 6, kB, 0.62, 5.59, 17.54, 23.76},
    PaperRow{"seconds", "gpt2-4.0B", 6, kSu, 0.67, 5.33, 13.04, 19.05},
    PaperRow{"seconds", "gpt2-4.0B", 6, kSuO, 0.67, 5.43, 12.27, 18.37},
    PaperRow{"seconds", "gpt2-4.0B", 6, kSuOC, 0.67, 4.14, 10.77, 15.58},
    PaperRow{"seconds", "gpt2-4.0B", 10, kB, 0.67, 5.23, 17.75, 23.65},
    PaperRow{"seconds", "gpt2-4.0B", 10, kSu, 0.67, 5.33, 9.63, 15.63},
    PaperRow{"seconds", "gpt2-4.0B", 10, kSuO, 0.67, 5.80, 8.28, 14.75},
    PaperRow{"seconds", "gpt2-4.0B", 10, kSuOC, 0.67, 4.19, 7.30, 12.16},
    PaperRow{"seconds", "gpt2-8.4B", 6, kB, 1.12, 11.18, 37.64, 49.93},
    PaperRow{"seconds", "gpt2-8.4B", 6, kSu, 1.12, 11.18, 28.07, 40.37},
    PaperRow{"seconds", "gpt2-8.4B", 6, kSuO, 1.12, 10.93, 27.45, 39.50},
    PaperRow{"seconds", "gpt2-8.4B", 6, kSuOC, 1.12, 8.19, 25.84, 35.15},
    PaperRow{"seconds", "gpt2-8.4B", 10, kB, 1.12, 10.93, 36.76, 48.81},
    PaperRow{"seconds", "gpt2-8.4B", 10, kSu, 1.12, 10.80, 20.50, 32.42},
    PaperRow{"seconds", "gpt2-8.4B", 10, kSuO, 1.12, 10.93, 19.50, 31.55},
    PaperRow{"seconds", "gpt2-8.4B", 10, kSuOC, 1.12, 8.19, 17.02, 26.33},
    scaling(1, kB, 1.00),
    scaling(2, kB, 1.55),
    scaling(4, kB, 2.23),
    scaling(6, kB, 2.26),
    scaling(8, kB, 2.26),
    scaling(10, kB, 2.27),
    scaling(1, kSuO, 0.80),
    scaling(2, kSuO, 1.48),
    scaling(4, kSuO, 2.55),
    scaling(6, kSuO, 2.92),
    scaling(8, kSuO, 3.25),
    scaling(10, kSuO, 3.64),
    scaling(1, kSuOC, 0.89),
    scaling(2, kSuOC, 1.62),
    scaling(4, kSuOC, 2.80),
    scaling(6, kSuOC, 3.45),
    scaling(8, kSuOC, 3.76),
    scaling(10, kSuOC, 4.42),
    raid0(1, 1.0),
    raid0(2, 1.705),
    raid0(4, 2.163),
    raid0(6, 2.226),
    raid0(8, 2.243),
    raid0(10, 2.261),
    PaperRow{"kinds", "bert-0.34B", 6, kSuO, 0.10, 0, 1.67, 2.33},
    PaperRow{"kinds", "gpt2-4.0B", 6, kSuO, 0, 0, 10.53, 15.95, kernels::UpdateRule::kSgdMomentum},
};

constexpr std::array kShares{
    PaperShares{"gpt2-2.5B", 1.5, 10.5, 88.0},
    PaperShares{"gpt2-8.3B", 1.2, 12.8, 86.0},
    PaperShares{"gpt2-20.5B", 1.3, 15.8, 83.0},
};

}  // namespace

std::span<const PaperRow> paper_rows() { return kRows; }

std::span<const PaperShares> paper_shares() { return kShares; }

Machine with_devices(Machine machine, uint32_t devices) {
  if (machine.devices.empty()) return machine;
  machine.devices.resize(1);
  machine.devices.front().count = devices;
  return machine;
}

base::Result<std::vector<PaperComparison>> compare_with_paper(const Machine& machine) {
  std::vector<PaperComparison> all;
  for (const PaperRow& row : kRows) {
    SI_ASSIGN_OR_RETURN(const ModelShape model, model_preset(row.model));
    StepOptions options;
    options.method = row.method;
    options.rule = row.rule;
    PaperComparison comparison;
    comparison.row = row;
    SI_ASSIGN_OR_RETURN(comparison.simulated,
                        simulate_step(model, with_devices(machine, row.devices), options));
    comparison.error = (comparison.simulated.total_s - row.total_s) / row.total_s;
    all.push_back(std::move(comparison));
  }
  return all;
}

}  // namespace smartinf::sim
