#include "smartinf/engine/sign_levels.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "smartinf/base/units.h"
#include "smartinf/kernels/signs.h"

namespace smartinf::engine {
namespace {

constexpr float kNone = 0;

TEST(SignLevels, AreHalfTheLogarithmOfARoot) {
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("matrix", {64, 64}, 0).ok());
  SignLevels levels(plan::matrix_forms(space));
  std::vector<float> rows(64, 1.0f);
  std::vector<float> columns(64, 0.25f);
  rows[1] = 4;
  rows[2] = 1.0f / 4;  // within five octaves of the largest
  rows[3] = 0x1p-20f;  // not
  rows[4] = kNone;
  columns[1] = 0x1.8p-2f;  // half way between two octaves, as straight lines have it
  levels.set(0, rows, columns);
  std::vector<int16_t> found(space.count());
  levels.of_elements(0, found);
  constexpr int kOctave = 128;
  EXPECT_EQ(found[0], -kOctave);
  EXPECT_EQ(found[64], 0);
  EXPECT_EQ(found[2 * 64], -2 * kOctave);
  const int least = -kOctave + (2 - 5) * kOctave / 2;
  EXPECT_EQ(found[3 * 64], least);
  EXPECT_EQ(found[4 * 64], least);
  EXPECT_EQ(found[1], -kOctave + kOctave / 4);
}

TEST(SignLevels, OfNothingKnownAreNone) {
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("matrix", {64, 64}, 0).ok());
  SignLevels levels(plan::matrix_forms(space));
  std::vector<float> roots(64, kNone);
  levels.set(0, roots, roots);
  std::vector<int16_t> found(space.count(), 7);
  levels.of_elements(0, found);
  for (const int16_t level : found) ASSERT_EQ(level, 0);
  // Beyond what a byte says.
  roots.assign(64, 1e38f);
  levels.set(0, roots, roots);
  levels.of_elements(0, found);
  EXPECT_EQ(found[0], 2 * 127 * kernels::kLevelStep);
}

/// A device finds what the host compressed with, however the space is cut.
TEST(SignLevels, AreToldOfEveryPart) {
  plan::ParameterSpace space;
  ASSERT_TRUE(space.add("vector", {1000}, 0).ok());
  ASSERT_TRUE(space.add("matrix", {700, 300}, 0).ok());
  ASSERT_TRUE(space.add("wide", {3, 100'000}, 0).ok());
  SignLevels levels(plan::matrix_forms(space));
  for (size_t f = 0; f < levels.forms().size(); ++f) {
    std::vector<float> rows(levels.forms()[f].rows);
    std::vector<float> columns(levels.forms()[f].columns);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::exp2(static_cast<float>(i % 9) / 4);
    for (size_t i = 0; i < columns.size(); ++i) {
      columns[i] = std::exp2(-static_cast<float>(i % 11) / 3);
    }
    levels.set(f, rows, columns);
  }
  std::vector<int16_t> expected(space.count());
  levels.of_elements(0, expected);
  EXPECT_NE(expected[5], expected[6]);
  for (const uint64_t subgroup_elements : {base::kBlockElements, 3 * base::kBlockElements}) {
    for (const plan::Subgroup& subgroup : space.subgroups(subgroup_elements)) {
      std::vector<int16_t> own(subgroup.count);
      levels.of_elements(subgroup.first, own);
      std::vector<int8_t> told = {7};  // behind what is there
      levels.append(subgroup, told);
      EXPECT_EQ(told.front(), 7);
      size_t at = 1;
      for (const plan::MatrixForm& form :
           plan::forms_in(levels.forms(), subgroup.first, subgroup.count)) {
        const plan::FormPart part = plan::part_of(form, subgroup.first, subgroup.count);
        uint64_t element = part.first;
        part.each_row([&](uint64_t row, uint64_t column, uint64_t count) {
          for (uint64_t i = 0; i < count; ++i, ++element) {
            const int level = told[at + row] + told[at + part.rows() + column + i];
            ASSERT_EQ(level * kernels::kLevelStep, expected[element]) << element;
            ASSERT_EQ(own[element - subgroup.first], expected[element]) << element;
          }
        });
        at += part.factors();
      }
      EXPECT_EQ(at, told.size());
    }
  }
}

}  // namespace
}  // namespace smartinf::engine
