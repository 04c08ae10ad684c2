// All trainable parameters laid end to end: [0, N) elements, with a name and shape for each range,
// and its cut into subgroups.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "smartinf/base/ids.h"
#include "smartinf/base/status.h"

namespace smartinf::plan {

struct ParameterRange {
  std::string name;
  std::vector<uint64_t> shape;  // empty: a scalar
  uint64_t first = 0;           // element in the space
  uint64_t count = 0;           // product of shape
  uint32_t group = 0;           // index of its learning rate and decay
};

/// Parts of a range's gradient that are given at once start and end on multiples of this within the
/// range (or at its end).
inline constexpr uint64_t kGradientCutElements = uint64_t{1} << 20;

struct Subgroup {
  base::SubgroupId id;
  uint64_t first = 0;
  uint64_t count = 0;
};

/// A span of elements that share a group.
struct GroupSpan {
  uint64_t first = 0;
  uint64_t count = 0;
  uint32_t group = 0;
};

/// Advice where a run's groups are not those of its state.
inline constexpr std::string_view kOtherGroupsAdvice =
    "Group them as when the run began (train.lr_factors and train.weight_decays name the same "
    "parameters; from Python, the optimizer's groups have the same members): only the groups' "
    "values may change. Or give this run another directory.";

/// Threads: const members are safe from any thread.
class ParameterSpace {
 public:
  /// More elements than this are refused: byte offsets of every plane must fit 64 bits with room.
  static constexpr uint64_t kElementsMax = uint64_t{1} << 56;

  /// Appends a range at the end. Errors: kInvalidArgument for an empty or repeated name, a shape
  /// with a zero, or a size beyond kElementsMax; the space is then unchanged.
  base::Status add(std::string name, std::vector<uint64_t> shape, uint32_t group);

  uint64_t count() const { return count_; }
  const std::vector<ParameterRange>& ranges() const { return ranges_; }
  /// One more than the largest group of any range; 0 for an empty space.
  uint32_t group_count() const { return group_count_; }
  /// Null when there is no range of that name.
  const ParameterRange* find(std::string_view name) const;
  /// The range that holds an element. element < count().
  const ParameterRange& at(uint64_t element) const;
  /// Its position in ranges().
  size_t index_at(uint64_t element) const;

  /// Spans of [first, first + count) by group; neighbours of one group are joined.
  std::vector<GroupSpan> spans(uint64_t first, uint64_t count) const;

  /// Cuts the space into subgroups of `elements` (rounded up to a multiple of
  /// base::kBlockElements); the last one may be shorter. elements > 0.
  std::vector<Subgroup> subgroups(uint64_t elements) const;

  /// Over names, shapes, order and groups; equal spaces have equal digests.
  uint64_t digest() const;
  /// Text form kept on every device, and back. The text is JSON; fields are in docs/format.md.
  std::string to_json() const;
  /// Errors: kCorrupt with the place for text that to_json() did not write.
  static base::Result<ParameterSpace> from_json(std::string_view text);
  /// The first difference in names, order and shapes between two spaces, for a message:
  /// "layer.3.wq: [256, 256] here, [512, 512] on the device". Empty without one.
  static std::string first_difference(const ParameterSpace& here, const ParameterSpace& there);
  /// The same of groups, when there is no other difference.
  static std::string first_other_group(const ParameterSpace& here, const ParameterSpace& there);

 private:
  std::vector<ParameterRange> ranges_;
  std::unordered_map<std::string, size_t> index_by_name_;
  uint64_t count_ = 0;
  uint32_t group_count_ = 0;
};

}  // namespace smartinf::plan
