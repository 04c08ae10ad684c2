#include "smartinf/base/file.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/base/text.h"

namespace smartinf::base {
namespace {

namespace fs = std::filesystem;

class File : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return scratch_ / name; }

  const Scratch scratch_;
  const std::string folder_ = scratch_.path().string();
};

TEST_F(File, IsReadAndReplaced) {
  ASSERT_TRUE(write_text_file(path("a"), "one", "cannot write it").ok());
  ASSERT_TRUE(write_text_file(path("a"), "two", "cannot write it").ok());
  EXPECT_EQ(*read_text_file(path("a"), "cannot read it"), "two");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
  const auto too_long = read_text_file(path("a"), "cannot read it", 2);
  EXPECT_EQ(too_long.status().code(), ErrorCode::kInvalidArgument);
}

TEST_F(File, WhatIsMissingIsNamed) {
  const auto missing = read_text_file(path("none"), "cannot read the recipe");
  EXPECT_EQ(missing.status().code(), ErrorCode::kNotFound);
  EXPECT_NE(missing.status().to_string().find("cannot read the recipe: " + path("none")),
            std::string::npos);
}

TEST_F(File, OnlyRegularFilesAreOpenedAndNothingIsWaitedFor) {
  ASSERT_EQ(mkfifo(path("fifo").c_str(), 0600), 0);
  for (const int flags : {O_RDONLY, O_WRONLY, O_RDWR}) {
    const auto opened = open_regular_file(path("fifo"), flags, "cannot read it");
    ASSERT_FALSE(opened.ok());
    EXPECT_NE(opened.status().to_string().find("the path is a FIFO"), std::string::npos)
        << opened.status().to_string();
  }
  EXPECT_NE(read_text_file("/dev/null", "no").status().what().find("device node"),
            std::string::npos);
  EXPECT_FALSE(read_text_file(folder_, "no").ok());
}

TEST_F(File, WritingFollowsNoLinkAndLeavesTheOldContentsWhenItFails) {
  std::ofstream(path("victim")) << "precious";
  fs::create_symlink(path("victim"), path("a." + std::to_string(getpid()) + ".partial"));
  ASSERT_TRUE(write_text_file(path("a"), "new", "cannot write it").ok());
  fs::create_symlink(path("victim"), path("b"));
  ASSERT_TRUE(write_text_file(path("b"), "new", "cannot write it").ok());
  EXPECT_EQ(*read_text_file(path("victim"), "no"), "precious");
  EXPECT_EQ(*read_text_file(path("b"), "no"), "new");
  EXPECT_EQ(write_text_file(path("none/c"), "new", "cannot write it").code(), ErrorCode::kNotFound);
}

TEST(Text, DepthOfJsonIsBounded) {
  EXPECT_TRUE(json_depth_ok(R"({"a": [1, {"b": "[[[[ \" [[["}]})"));
  EXPECT_TRUE(json_depth_ok(std::string(kJsonDepthMax, '[')));
  EXPECT_FALSE(json_depth_ok(std::string(kJsonDepthMax + 1, '[')));
  EXPECT_FALSE(
      json_depth_ok(R"({"a": ")" + std::string(R"(\"", "b": )") + std::string(200'000, '[')));
  std::string wide;
  for (int i = 0; i < 1000; ++i) wide += "[{}],";
  EXPECT_TRUE(json_depth_ok(wide));
}

TEST(Text, KeysOfJsonAreCounted) {
  EXPECT_EQ(json_keys(R"({"a": 1, "b": {"c:d": "\": : ", "e": []}})"), 4u);
  EXPECT_EQ(json_keys(R"(["a:b", "\\", ":"])"), 0u);
}

TEST(Text, ControlCharactersAreNotPrintable) {
  EXPECT_TRUE(printable("model.layers.0.weight[0:12]"));
  EXPECT_TRUE(printable("größe"));
  EXPECT_FALSE(printable("a\x1b[2Jb"));
  EXPECT_FALSE(printable("a\nb"));
  EXPECT_FALSE(printable("a\x7f"));
  EXPECT_FALSE(
      printable("\xc2\x9b"
                "31m"));
  EXPECT_TRUE(printable("\xc2\xa7"));
}

}  // namespace
}  // namespace smartinf::base
