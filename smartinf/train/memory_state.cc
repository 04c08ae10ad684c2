#include "smartinf/train/memory_state.h"

#include <charconv>
#include <utility>
#include <vector>

namespace smartinf::train {
namespace {

using base::ErrorCode;
using base::Result;
using base::Status;

constexpr std::array<const char*, MemoryState::kPlanes> kPlaneNames = {"master", "momentum",
                                                                       "variance"};

}  // namespace

std::string MemoryState::path(const std::string& run) { return run + "/state.safetensors"; }

Result<MemoryState> MemoryState::open(const std::string& run, const plan::ParameterSpace& space) {
  SI_ASSIGN_OR_RETURN(model::SafetensorsFile file, model::SafetensorsFile::open(path(run)));
  MemoryState state(std::move(file));
  base::ErrorPlace place;
  place.path = path(run);
  SI_ASSIGN_OR_RETURN(const plan::ParameterSpace there,
                      plan::ParameterSpace::from_json(state.file_.metadata("parameter_space")));
  if (const std::string difference = plan::ParameterSpace::first_difference(space, there);
      !difference.empty()) {
    return Status(ErrorCode::kMismatch,
                  "train.run holds the state of a different model: " + difference,
                  "Choose another train.run, or the model that the state was made with", place);
  }
  if (const std::string difference = plan::ParameterSpace::first_other_group(space, there);
      !difference.empty()) {
    return Status(ErrorCode::kMismatch,
                  "train.run holds state whose parameters belong to other groups: " + difference,
                  std::string(plan::kOtherGroupsAdvice), place);
  }
  const auto corrupt = [&](const std::string& what) {
    return Status(ErrorCode::kCorrupt, "state without its " + what,
                  "Restore the file from a copy, or start a new run in another train.run", place);
  };
  for (size_t i = 0; i < kPlanes; ++i) {
    const std::span<const std::byte> bytes = state.file_.tensor(kPlaneNames[i]);
    if (bytes.size() != space.count() * sizeof(float)) return corrupt(kPlaneNames[i]);
    state.planes_[i] = {reinterpret_cast<const float*>(bytes.data()), space.count()};
  }
  const std::string step = state.file_.metadata("step");
  const auto read = std::from_chars(step.data(), step.data() + step.size(), state.step_);
  if (step.empty() || read.ptr != step.data() + step.size()) return corrupt("step");
  state.client_metadata_ = state.file_.metadata("client_metadata");
  // Older files name it "blob".
  if (state.client_metadata_.empty()) state.client_metadata_ = state.file_.metadata("blob");
  return state;
}

Status MemoryState::save(const std::string& run, const plan::ParameterSpace& space,
                         base::StepNumber step, const std::string& client_metadata,
                         const std::array<std::span<const float>, kPlanes>& planes) {
  std::vector<model::TensorInfo> tensors;
  for (const char* name : kPlaneNames) {
    tensors.push_back({name, base::DataType::kF32, {space.count()}});
  }
  SI_ASSIGN_OR_RETURN(model::SafetensorsWriter writer,
                      model::SafetensorsWriter::create(path(run), tensors,
                                                       {{"parameter_space", space.to_json()},
                                                        {"step", std::to_string(step)},
                                                        {"client_metadata", client_metadata}}));
  for (const std::span<const float> plane : planes) {
    SI_RETURN_IF_ERROR(writer.append(std::as_bytes(plane)));
  }
  return writer.finish();
}

}  // namespace smartinf::train
