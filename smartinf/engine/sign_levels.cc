#include "smartinf/engine/sign_levels.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "smartinf/base/check.h"
#include "smartinf/kernels/signs.h"

namespace smartinf::engine {
namespace {

/// A root that is smaller than this part of the matrix's largest counts as that: of rows that had
/// no gradient for long nothing is known.
constexpr float kLeast = 0x1p-5f;

/// Half of a root's logarithm, made of straight lines, to the nearest level.
int8_t level_of(float root) {
  constexpr int kBitsOfOne = 0x3f80;
  constexpr int kBitsOfLevel = 2 * kernels::kLevelStep;
  const auto bits = static_cast<int>(std::bit_cast<uint32_t>(root) >> 16);
  const int level =
      (bits - kBitsOfOne + kBitsOfLevel / 2) >> std::countr_zero(unsigned{kBitsOfLevel});
  return static_cast<int8_t>(std::clamp(level, -127, 127));
}

void set_levels(std::span<const float> roots, std::span<int8_t> levels) {
  SI_CHECK(roots.size() == levels.size(), "a root for each");
  float largest = 0;
  for (const float root : roots) largest = std::isfinite(root) ? std::max(largest, root) : largest;
  const float least = kLeast * largest;
  for (size_t i = 0; i < roots.size(); ++i) {
    // Of a matrix without variances nothing is known.
    levels[i] = largest > 0 ? level_of(roots[i] >= least ? roots[i] : least) : int8_t{0};
  }
}

}  // namespace

SignLevels::SignLevels(std::vector<plan::MatrixForm> forms)
    : forms_(std::move(forms)), levels_(forms_) {}

void SignLevels::set(size_t form, std::span<const float> rows, std::span<const float> columns) {
  set_levels(rows, levels_.rows(form));
  set_levels(columns, levels_.columns(form));
}

void SignLevels::append(const plan::Subgroup& subgroup, std::vector<int8_t>& out) const {
  levels_.append(subgroup.first, subgroup.count, out);
}

void SignLevels::of_elements(uint64_t first, std::span<int16_t> out) const {
  for (const plan::MatrixForm& form : plan::forms_in(forms_, first, out.size())) {
    const auto index = static_cast<size_t>(&form - forms_.data());
    const plan::FormPart part = plan::part_of(form, first, out.size());
    const auto rows = levels_.rows(index);
    const auto columns = levels_.columns(index);
    auto rest = out.subspan(part.first - first, part.count);
    part.each_stretch([&](uint64_t row, uint64_t column, uint64_t some) {
      kernels::add_levels(kernels::kernels(), rows[row], columns.subspan(column, some),
                          rest.first(some));
      rest = rest.subspan(some);
    });
  }
}

}  // namespace smartinf::engine
