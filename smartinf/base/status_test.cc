#include "smartinf/base/status.h"

#include <cerrno>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace smartinf::base {
namespace {

Result<int> half(int value) {
  if (value % 2 != 0) return Status(ErrorCode::kInvalidArgument, "odd");
  return value / 2;
}

Result<int> quarter(int value) {
  SI_ASSIGN_OR_RETURN(const int once, half(value));
  SI_ASSIGN_OR_RETURN(const int twice, half(once));
  return twice;
}

TEST(Status, SaysWhatWhereAndWhatToDo) {
  const Status status =
      errno_status(ENOSPC, "cannot write block", "/d/state", 4096, 512, "Free some space.");
  EXPECT_EQ(status.code(), ErrorCode::kNoSpace);
  EXPECT_EQ(status.to_string(),
            "cannot write block: /d/state at offset 4096, length 512: No space left on device. "
            "Free some space.");
}

TEST(Status, WhatSomebodyElseWroteIsShownWithinBoundsAndHasNoSayOverTheTerminal) {
  std::string what(1 << 20, 'a');
  what.push_back('z');
  const Status status(ErrorCode::kCorrupt, std::move(what), "Do \x1b[2J that.",
                      {"/p\x07", {}, {}, 0});
  const std::string text = status.to_string();
  EXPECT_LT(text.size(), 8192u);
  EXPECT_NE(text.find("bytes more"), std::string::npos);
  EXPECT_NE(text.find("Do \\x1b[2J that."), std::string::npos);
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
  EXPECT_EQ(text.find('\x07'), std::string::npos);
}

TEST(Status, WhereNoMoreFilesCanBeOpenTheLimitIsNamed) {
  const Status status = errno_status(EMFILE, "cannot open it", "/d", {}, {}, "Check the name.");
  EXPECT_NE(status.to_string().find("ulimit -n"), std::string::npos);
  EXPECT_EQ(status.to_string().find("Check the name"), std::string::npos);
}

TEST(Status, CopiesAreIndependentAndContextGoesInFront) {
  const Status first(ErrorCode::kIo, "short read");
  Status second = first;
  second = std::move(second).with_context("device ssd0");
  EXPECT_EQ(first.what(), "short read");
  EXPECT_EQ(second.what(), "device ssd0: short read");
  EXPECT_TRUE(Status().with_context("x").ok());
}

TEST(Result, CarriesValueOrFailure) {
  EXPECT_EQ(*quarter(8), 2);
  EXPECT_EQ(quarter(6).status().what(), "odd");
}

TEST(ResultDeathTest, ValueWithoutOneIsABug) {
  EXPECT_DEATH((void)half(1).value(), "without a value");
}

}  // namespace
}  // namespace smartinf::base
