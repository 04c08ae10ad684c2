#include "smartinf/plan/parameter_space.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "smartinf/base/check.h"
#include "smartinf/base/checksum.h"
#include "smartinf/base/state_format.h"
#include "smartinf/base/text.h"
#include "smartinf/base/units.h"

namespace smartinf::plan {

using base::ErrorCode;
using base::Status;

namespace {

std::string shape_text(const std::vector<uint64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Status corrupt(std::string what) {
  return Status(ErrorCode::kCorrupt, "parameter space: " + std::move(what),
                "The device's description is damaged; run smartinf fsck on it.");
}

}  // namespace

Status ParameterSpace::add(std::string name, std::vector<uint64_t> shape, uint32_t group) {
  if (name.empty()) {
    return Status(ErrorCode::kInvalidArgument, "a parameter range has an empty name",
                  "Give every parameter a name.");
  }
  if (!base::printable(name)) {
    return Status(ErrorCode::kInvalidArgument,
                  "a parameter range has a name with control characters",
                  "Names are printable text.");
  }
  if (index_by_name_.contains(name)) {
    return Status(ErrorCode::kInvalidArgument, fmt::format("parameter {} appears twice", name),
                  "Add tied parameters to the parameter space once.");
  }
  uint64_t count = 1;
  for (const uint64_t extent : shape) {
    if (extent == 0) {
      return Status(
          ErrorCode::kInvalidArgument,
          fmt::format("parameter {} has shape {}, which has no elements", name, shape_text(shape)),
          "Leave parameters without elements out.");
    }
    if (count > kElementsMax / extent) {
      return Status(ErrorCode::kInvalidArgument,
                    fmt::format("parameter {} of shape {} is too large", name, shape_text(shape)),
                    "Check the model's sizes.");
    }
    count *= extent;
  }
  if (count > kElementsMax - count_) {
    return Status(ErrorCode::kInvalidArgument,
                  fmt::format("the model is too large with parameter {}", name),
                  "Check the model's sizes.");
  }
  index_by_name_.emplace(name, ranges_.size());
  ranges_.push_back({std::move(name), std::move(shape), count_, count, group});
  count_ += count;
  group_count_ = std::max(group_count_, group + 1);
  return Status();
}

const ParameterRange* ParameterSpace::find(std::string_view name) const {
  const auto found = index_by_name_.find(std::string(name));
  return found == index_by_name_.end() ? nullptr : &ranges_[found->second];
}

size_t ParameterSpace::index_at(uint64_t element) const {
  SI_CHECK(element < count_, "element outside the parameter space");
  const auto after = std::upper_bound(
      ranges_.begin(), ranges_.end(), element,
      [](uint64_t value, const ParameterRange& range) { return value < range.first; });
  return static_cast<size_t>(after - ranges_.begin()) - 1;
}

const ParameterRange& ParameterSpace::at(uint64_t element) const {
  return ranges_[index_at(element)];
}

std::vector<GroupSpan> ParameterSpace::spans(uint64_t first, uint64_t count) const {
  SI_CHECK(first <= count_ && count <= count_ - first, "span outside the parameter space");
  std::vector<GroupSpan> result;
  if (count == 0) return result;
  const uint64_t end = first + count;
  for (size_t i = index_at(first); i < ranges_.size() && ranges_[i].first < end; ++i) {
    const ParameterRange& range = ranges_[i];
    const uint64_t from = std::max(first, range.first);
    const uint64_t to = std::min(end, range.first + range.count);
    if (!result.empty() && result.back().group == range.group) {
      result.back().count += to - from;
    } else {
      result.push_back({from, to - from, range.group});
    }
  }
  return result;
}

std::vector<Subgroup> ParameterSpace::subgroups(uint64_t elements) const {
  SI_CHECK(elements > 0, "a subgroup holds at least one element");
  const uint64_t size = base::round_up(std::min(elements, kElementsMax), base::kBlockElements);
  std::vector<Subgroup> result;
  result.reserve(base::divide_up(count_, size));
  for (uint64_t first = 0; first < count_; first += size) {
    result.push_back({base::SubgroupId{static_cast<uint32_t>(result.size())}, first,
                      std::min(size, count_ - first)});
  }
  return result;
}

uint64_t ParameterSpace::digest() const {
  // Lengths stand before what they measure, so that no two different spaces give the same bytes.
  std::vector<uint64_t> words;
  uint64_t names = 0;
  for (const ParameterRange& range : ranges_) {
    names = base::mix_seed(
        names, base::checksum(std::as_bytes(std::span(range.name.data(), range.name.size()))));
    words.push_back(range.group);
    words.push_back(range.shape.size());
    words.insert(words.end(), range.shape.begin(), range.shape.end());
  }
  return base::checksum(std::as_bytes(std::span(words)), names);
}

std::string ParameterSpace::to_json() const {
  nlohmann::json ranges = nlohmann::json::array();
  for (const ParameterRange& range : ranges_) {
    ranges.push_back({{"name", range.name}, {"shape", range.shape}, {"group", range.group}});
  }
  return nlohmann::json{{"ranges", std::move(ranges)}}.dump();
}

base::Result<ParameterSpace> ParameterSpace::from_json(std::string_view text) {
  const nlohmann::json json = base::parse_json(text);
  if (json.is_discarded()) return corrupt("it is not JSON");
  if (!json.is_object() || !json.contains("ranges") || !json["ranges"].is_array()) {
    return corrupt("it has no list \"ranges\"");
  }
  ParameterSpace space;
  for (const nlohmann::json& range : json["ranges"]) {
    const size_t position = space.ranges_.size();
    const bool shaped = range.is_object() && range.contains("name") && range["name"].is_string() &&
                        range.contains("shape") && range["shape"].is_array() &&
                        range.contains("group") && range["group"].is_number_unsigned() &&
                        range["group"].get<uint64_t>() < ~uint32_t{0};
    if (!shaped) return corrupt(fmt::format("range {} lacks its name, shape or group", position));
    std::vector<uint64_t> shape;
    for (const nlohmann::json& extent : range["shape"]) {
      if (!extent.is_number_unsigned()) {
        return corrupt(fmt::format("range {} has a shape that is not of whole numbers", position));
      }
      shape.push_back(extent.get<uint64_t>());
    }
    Status added = space.add(range["name"].get<std::string>(), std::move(shape),
                             range["group"].get<uint32_t>());
    if (!added.ok()) return corrupt(added.what());
  }
  return space;
}

std::string ParameterSpace::first_difference(const ParameterSpace& here,
                                             const ParameterSpace& there) {
  const size_t common = std::min(here.ranges_.size(), there.ranges_.size());
  for (size_t i = 0; i < common; ++i) {
    const ParameterRange& a = here.ranges_[i];
    const ParameterRange& b = there.ranges_[i];
    if (a.name != b.name) {
      return fmt::format("parameter {} is {} here, {} on the device", i, a.name, b.name);
    }
    if (a.shape != b.shape) {
      return fmt::format("{}: {} here, {} on the device", a.name, shape_text(a.shape),
                         shape_text(b.shape));
    }
  }
  if (here.ranges_.size() > common) {
    return fmt::format("{}: here, but not on the device", here.ranges_[common].name);
  }
  if (there.ranges_.size() > common) {
    return fmt::format("{}: on the device, but not here", there.ranges_[common].name);
  }
  return {};
}

std::string ParameterSpace::first_other_group(const ParameterSpace& here,
                                              const ParameterSpace& there) {
  for (size_t i = 0; i < std::min(here.ranges_.size(), there.ranges_.size()); ++i) {
    const ParameterRange& a = here.ranges_[i];
    const ParameterRange& b = there.ranges_[i];
    if (a.group != b.group) {
      return fmt::format("{}: group {} here, {} on the device", a.name, a.group, b.group);
    }
  }
  return {};
}

}  // namespace smartinf::plan
