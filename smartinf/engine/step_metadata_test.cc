#include "smartinf/engine/step_metadata.h"

#include <gtest/gtest.h>

#include "smartinf/storage/store.h"

namespace smartinf::engine {
namespace {

constexpr uint64_t kMost = storage::Store::kClientMetadataBytesMax;

void expect_same(const std::vector<kernels::StepAhead>& a,
                 const std::vector<kernels::StepAhead>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].lr, b[i].lr);
    EXPECT_EQ(a[i].bias, b[i].bias);
    EXPECT_EQ(a[i].eps, b[i].eps);
  }
}

StepMetadata metadata_of(const std::string& client_metadata, size_t groups, size_t in_a_row) {
  StepMetadata metadata{.client_metadata = client_metadata, .residual_step = 7, .ahead = {}};
  for (size_t g = 0; g < groups; ++g) {
    metadata.ahead.push_back(
        {.lr = 0.25f * static_cast<float>(g / in_a_row), .bias = 0.5f, .eps = 1e-8f});
  }
  return metadata;
}

TEST(StepMetadata, ComesBack) {
  for (const std::string& client_metadata :
       {std::string(), std::string("a trainer's"), std::string(99, '\0')}) {
    for (const size_t groups : {0ul, 1ul, 2ul, 300ul}) {
      const StepMetadata metadata = metadata_of(client_metadata, groups, 3);
      const StepMetadata back = split_metadata(join_metadata(metadata).value());
      EXPECT_EQ(back.client_metadata, client_metadata);
      EXPECT_EQ(back.residual_step, 7u);
      expect_same(back.ahead, metadata.ahead);
    }
    const StepMetadata back = split_metadata(
        join_metadata({.client_metadata = client_metadata, .residual_step = {}, .ahead = {}})
            .value());
    EXPECT_EQ(back.client_metadata, client_metadata);
    EXPECT_FALSE(back.residual_step);
  }
}

TEST(StepMetadata, AModelOfManyParametersWithOneRateTakesLittleRoom) {
  EXPECT_LE(join_metadata(metadata_of("", 100'000, 100'000)).value().size(), 64u);
}

TEST(StepMetadata, WhatDoesNotFitIsRefused) {
  const auto many = join_metadata(metadata_of("a trainer's", 5000, 1));
  ASSERT_FALSE(many.ok());
  EXPECT_EQ(many.status().code(), base::ErrorCode::kInvalidArgument);
  EXPECT_NE(many.status().to_string().find("5000 parameter groups"), std::string::npos);
  for (const uint64_t left : {0ul, 23ul, 24ul, 39ul, 40ul}) {
    const std::string client_metadata(kMost - left, 'x');
    const auto joined = join_metadata(metadata_of(client_metadata, 2, 2));
    ASSERT_EQ(joined.ok(), left >= 40);
    if (joined.ok()) expect_same(split_metadata(*joined).ahead, metadata_of("", 2, 2).ahead);
  }
}

TEST(StepMetadata, TextsFromBeforeSteppingAheadAreRead) {
  const StepMetadata back =
      split_metadata("before" + std::string("SIRESID1") + std::string("\5\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(back.client_metadata, "before");
  EXPECT_EQ(back.residual_step, 5u);
  EXPECT_TRUE(back.ahead.empty());
}

TEST(StepMetadata, OtherTextsAreTheTrainers) {
  // The mark, but more runs than there are bytes.
  std::string odd = "text" + std::string(8, '\xff') + "SIRESID2" + std::string(8, '\1');
  for (const std::string& text : {std::string("SIRESID2"), std::string(24, 'x'), odd}) {
    EXPECT_EQ(split_metadata(text).client_metadata, text);
    EXPECT_FALSE(split_metadata(text).residual_step);
  }
}

}  // namespace
}  // namespace smartinf::engine
