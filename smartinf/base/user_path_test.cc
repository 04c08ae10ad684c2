#include "smartinf/base/user_path.h"

#include <cstdlib>
#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"

namespace smartinf::base {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

TEST(UserPath, HomeIsExpandedAndNothingElseChanges) {
  const char* home = std::getenv("HOME");
  const std::string before = home == nullptr ? "" : home;
  ASSERT_EQ(setenv("HOME", "/home of/me", 1), 0);
  EXPECT_EQ(*user_path("~"), "/home of/me");
  EXPECT_EQ(*user_path("~/runs/a"), "/home of/me/runs/a");
  EXPECT_THAT(*user_path("~root/x"), StartsWith("/"));
  for (const char* path : {"", "a", "./~/b", "/a/~b", "grpc://h:1/d", "a,b=c", "cash$", "5$/1"}) {
    EXPECT_EQ(*user_path(path), path);
  }
  ASSERT_EQ(setenv("HOME", before.c_str(), 1), 0);
}

TEST(UserPath, AnotherUsersHomeAndVariablesAreErrors) {
  EXPECT_THAT(user_path("~nobody-of-this-name/x").status().to_string(),
              HasSubstr("no home folder"));
  for (const char* path : {"$HOME/x", "/a/${RUN}/b", "/a/$_x"}) {
    EXPECT_THAT(user_path(path).status().to_string(), HasSubstr("expanded by shells only"));
  }
}

TEST(UserPath, WhatExistsByThatNameIsMeant) {
  const Scratch scratch;
  const std::string path = scratch / "$RECYCLE";
  EXPECT_FALSE(user_path(path).ok());
  std::filesystem::create_directory(path);
  EXPECT_EQ(*user_path(path), path);
}

}  // namespace
}  // namespace smartinf::base
