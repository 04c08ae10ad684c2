#include "python/core/checkpoint.h"

#include <tuple>
#include <utility>

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "smartinf/engine/step_metadata.h"

#include "python/core/errors.h"

namespace nb = nanobind;

namespace smartinf::python {

PyCheckpoint::PyCheckpoint(const std::string& path) {
  const nb::gil_scoped_release released;
  description_ = take(engine::read_checkpoint(path));
  const bool one = description_.ranks.empty();
  for (const engine::Checkpoint& each :
       one ? std::vector<engine::Checkpoint>{description_} : description_.ranks) {
    parts_.emplace_back(new Part{take(engine::open_checkpoint(each))});
    const engine::StoredRun& first = parts_.front()->run;
    const engine::StoredRun& run = parts_.back()->run;
    if (run.description.rule != first.description.rule ||
        run.layout().planes != first.layout().planes) {
      throw StatusError(base::Status(
          base::ErrorCode::kMismatch, "the ranks' parts of the checkpoint are of different kinds",
          "Use another checkpoint.", base::ErrorPlace{each.path, {}, {}, 0}));
    }
  }
  std::vector<csd::Snapshot*> devices;
  for (const auto& part : parts_) {
    for (const auto& device : part->run.devices) devices.push_back(device.get());
  }
  tables_ = take(engine::StoredTables::open(devices));
}

std::string PyCheckpoint::rule() const {
  return std::string(kernels::update_rule_name(parts_.front()->run.description.rule));
}

std::vector<std::string> PyCheckpoint::planes() const {
  std::vector<std::string> names;
  for (const base::PlaneKind plane : parts_.front()->run.layout().planes) {
    names.emplace_back(base::plane_kind_name(plane));
  }
  return names;
}

nb::list PyCheckpoint::parts() const {
  nb::list parts;
  for (const auto& part : parts_) {
    const engine::StoredRun& run = part->run;
    const engine::StepMetadata metadata = engine::split_metadata(run.client_metadata);
    nb::list ranges;
    for (const plan::ParameterRange& range : run.description.space.ranges()) {
      nb::list shape;
      for (const uint64_t extent : range.shape) shape.append(extent);
      ranges.append(nb::make_tuple(range.name, shape));
    }
    nb::list ahead;
    for (const plan::ParameterRange& range : run.description.space.ranges()) {
      if (range.group >= metadata.ahead.size()) break;  // left out, for want of room
      const kernels::StepAhead& one = metadata.ahead[range.group];
      ahead.append(nb::make_tuple(one.lr, one.bias, one.eps));
    }
    nb::dict out;
    out["run"] = run.layout().run.to_string();
    out["step"] = run.step;
    out["client_metadata"] = metadata.client_metadata;
    out["count"] = run.description.space.count();
    out["ranges"] = ranges;
    out["residual"] = run.layout().planes.back() == base::PlaneKind::kResidual &&
                      metadata.residual_step == run.step;
    out["ahead"] = ahead;
    parts.append(out);
  }
  return parts;
}

void PyCheckpoint::read(size_t part, size_t plane, uint64_t first, uint64_t count,
                        uintptr_t address) {
  const nb::gil_scoped_release released;
  const bool there = part < parts_.size() && plane < parts_[part]->run.layout().planes.size() &&
                     first <= parts_[part]->run.description.space.count() &&
                     count <= parts_[part]->run.description.space.count() - first;
  if (!there) {
    throw StatusError(
        base::Status(base::ErrorCode::kInvalidArgument, "elements that the checkpoint has not"));
  }
  python::check(
      parts_[part]->reader.read(plane, first, {reinterpret_cast<float*>(address), count}));
}

void PyCheckpoint::check() {
  const nb::gil_scoped_release released;
  for (const auto& part : parts_) python::check(part->reader.check());
}

}  // namespace smartinf::python
