#include "smartinf/engine/step_metadata.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/units.h"
#include "smartinf/storage/store.h"

namespace smartinf::engine {
namespace {

/// So many groups in a row have the same.
struct Run {
  uint32_t groups = 0;
  kernels::StepAhead ahead;
};
static_assert(sizeof(Run) == 16);

constexpr std::string_view kMark = "SIRESID2";
/// The mark of runs from before stepping ahead: nothing but the step belongs to it.
constexpr std::string_view kMarkOfStep = "SIRESID1";

struct Tail {  // behind the runs
  uint64_t runs = 0;
  std::array<char, kMark.size()> mark{};
  base::StepNumber step = 0;
};
static_assert(sizeof(Tail) == 24);
constexpr size_t kMarkBytes = sizeof(Tail) - offsetof(Tail, mark);  // with the step

bool same(const kernels::StepAhead& a, const kernels::StepAhead& b) {
  return a.lr == b.lr && a.bias == b.bias && a.eps == b.eps;
}

std::vector<Run> runs_of(const std::vector<kernels::StepAhead>& ahead) {
  std::vector<Run> runs;
  for (const kernels::StepAhead& one : ahead) {
    if (runs.empty() || !same(runs.back().ahead, one)) runs.push_back({0, one});
    ++runs.back().groups;
  }
  return runs;
}

}  // namespace

base::Result<std::string> join_metadata(const StepMetadata& metadata) {
  if (!metadata.residual_step) return metadata.client_metadata;
  const std::vector<Run> runs = runs_of(metadata.ahead);
  const size_t bytes = metadata.client_metadata.size() + runs.size() * sizeof(Run) + sizeof(Tail);
  if (bytes > storage::Store::kClientMetadataBytesMax) {
    return base::Status(
        base::ErrorCode::kInvalidArgument,
        fmt::format("what is kept with a step takes {}, {} of them for {} parameter groups with "
                    "rates of their own; there is room for {}",
                    base::format_bytes(bytes), base::format_bytes(runs.size() * sizeof(Run)),
                    runs.size(), base::format_bytes(storage::Store::kClientMetadataBytesMax)),
        "Use fewer learning rates, or train without compressed gradients.");
  }
  Tail tail;
  tail.runs = runs.size();
  tail.step = *metadata.residual_step;
  std::copy(kMark.begin(), kMark.end(), tail.mark.begin());
  std::string joined = metadata.client_metadata;
  joined.append(reinterpret_cast<const char*>(runs.data()), runs.size() * sizeof(Run));
  joined.append(reinterpret_cast<const char*>(&tail), sizeof(tail));
  return joined;
}

StepMetadata split_metadata(std::string stored) {
  StepMetadata metadata;
  metadata.client_metadata = std::move(stored);
  Tail tail;
  const auto marked = [&](size_t bytes, std::string_view mark) {
    if (metadata.client_metadata.size() < bytes) return false;
    const std::string_view end =
        std::string_view(metadata.client_metadata).substr(metadata.client_metadata.size() - bytes);
    std::memcpy(reinterpret_cast<char*>(&tail) + sizeof(tail) - bytes, end.data(), bytes);
    return std::string_view(tail.mark.data(), tail.mark.size()) == mark;
  };
  if (marked(kMarkBytes, kMarkOfStep)) {
    metadata.residual_step = tail.step;
    metadata.client_metadata.resize(metadata.client_metadata.size() - kMarkBytes);
  } else if (marked(sizeof(tail), kMark) &&
             tail.runs <= (metadata.client_metadata.size() - sizeof(tail)) / sizeof(Run)) {
    const size_t trainers =
        metadata.client_metadata.size() - sizeof(tail) - tail.runs * sizeof(Run);
    for (uint64_t i = 0; i < tail.runs; ++i) {
      Run run;
      std::memcpy(&run, metadata.client_metadata.data() + trainers + i * sizeof(run), sizeof(run));
      if (run.groups > (1u << 24)) continue;  // not ours
      metadata.ahead.insert(metadata.ahead.end(), run.groups, run.ahead);
    }
    metadata.residual_step = tail.step;
    metadata.client_metadata.resize(trainers);
  }
  return metadata;
}

}  // namespace smartinf::engine
