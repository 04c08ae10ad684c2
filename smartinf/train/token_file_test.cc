#include "smartinf/train/token_file.h"

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/train/test_token_files.h"

namespace smartinf::train {
namespace {

using base::ErrorCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TokenFileTest : public ::testing::Test {
 protected:
  base::Status opened(const std::string& header = {}) {
    header.empty() ? file_.write(path_) : file_.write(path_, header);
    return read_token_file(path_.string()).status();
  }
  void expect_corrupt(const base::Status& status, const std::string& says) {
    EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << says;
    EXPECT_THAT(status.to_string(), HasSubstr(says));
    EXPECT_THAT(status.to_string(), HasSubstr("a.safetensors"));
  }

  const base::Scratch scratch_;
  const std::filesystem::path path_ = scratch_.path() / "a.safetensors";
  TestTokenFile file_ = TestTokenFile::documents({3, 5, 2}, 100, /*masked=*/true);
};

TEST_F(TokenFileTest, TokensMaskDocumentsAndVocabularyAreRead) {
  file_.write(path_);
  const auto file = read_token_file(path_.string());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->vocabulary, 100u);
  EXPECT_THAT(file->document_starts, ElementsAre(0, 3, 8));
  TokenStream stream;
  stream.add(file->tokens);
  std::vector<int64_t> tokens(4);
  std::vector<uint8_t> mask(4);
  ASSERT_TRUE(stream.read(2, 100, tokens).ok());
  ASSERT_TRUE(stream.read_mask(2, mask).ok());
  EXPECT_THAT(tokens, ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(mask, ElementsAre(0, 0, 1, 0));
}

TEST_F(TokenFileTest, MaskDocumentsAndMetadataMayBeMissing) {
  file_ = TestTokenFile();
  file_.add("tokens", "U32", std::vector<uint32_t>{70000, 1});
  auto header = file_.header();
  header.erase("__metadata__");
  file_.write(path_, header.dump());
  const auto file = read_token_file(path_.string());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->vocabulary, 0u);
  EXPECT_TRUE(file->document_starts.empty());
  TokenStream stream;
  stream.add(file->tokens);
  EXPECT_FALSE(stream.masked());
}

TEST_F(TokenFileTest, ATruncatedFileAndOneThatIsTooLongAreCorrupt) {
  file_.write(path_);
  const uint64_t whole = std::filesystem::file_size(path_);
  for (const uint64_t bytes :
       {whole - 1, whole / 2, uint64_t{20}, uint64_t{8}, uint64_t{7}, uint64_t{0}, whole + 1}) {
    file_.write(path_);
    std::filesystem::resize_file(path_, bytes);
    const base::Status status = read_token_file(path_.string()).status();
    EXPECT_EQ(status.code(), ErrorCode::kCorrupt) << bytes << " of " << whole << " bytes";
  }
  file_.write(path_);
  std::filesystem::resize_file(path_, whole - 1);
  expect_corrupt(read_token_file(path_.string()).status(), "bytes are missing of loss_mask");
}

TEST_F(TokenFileTest, AHeaderThatPromisesMuchTakesNoMemory) {
  std::ofstream(path_, std::ios::binary) << std::string("\0\0\0\0\0\0\0\x7f{}", 10);
  expect_corrupt(read_token_file(path_.string()).status(), "header");
  std::ofstream(path_, std::ios::binary) << std::string("\0\0\0\x0c\0\0\0\0", 8) << "{";
  std::filesystem::resize_file(path_, uint64_t{1} << 32);
  expect_corrupt(read_token_file(path_.string()).status(), "longer than 100 MB");
}

TEST_F(TokenFileTest, WhatIsWrongInTheHeaderIsNamed) {
  expect_corrupt(opened("no json"), "not a JSON object");
  const auto changed = [&](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json header = file_.header();
    change(header);
    return opened(header.dump());
  };
  expect_corrupt(changed([](auto& h) { h.erase("tokens"); }), "bytes of no tensor lie before");
  expect_corrupt(changed([](auto& h) { h["tokens"]["shape"] = {11}; }),
                 "shape and byte range disagree of tokens");
  expect_corrupt(changed([](auto& h) { h["tokens"]["shape"] = {5, 2}; }), "tokens has 2 extents");
  expect_corrupt(changed([](auto& h) { h["tokens"]["shape"] = {-10}; }),
                 "no type, shape or byte range for tokens");
  expect_corrupt(changed([](auto& h) { h["tokens"]["dtype"] = "F16"; }), "tokens are F16");
  expect_corrupt(changed([](auto& h) { h["tokens"].erase("data_offsets"); }),
                 "no type, shape or byte range for tokens");
  expect_corrupt(changed([](auto& h) {
                   h["loss_mask"]["shape"] = {~uint64_t{0} - 44};
                   h["loss_mask"]["data_offsets"] = {44, ~uint64_t{0}};
                 }),
                 "bytes are missing of loss_mask");
  expect_corrupt(changed([](auto& h) {
                   h["loss_mask"]["data_offsets"] = {34, 44};  // over the last tokens
                 }),
                 "two tensors have the same bytes: loss_mask");
  expect_corrupt(changed([](auto& h) {
                   h["weights"] = h["loss_mask"];
                   h.erase("loss_mask");
                 }),
                 "a tensor \"weights\"");
  expect_corrupt(changed([](auto& h) { h["__metadata__"]["vocabulary"] = "many"; }), "vocabulary");
  const base::Status newer = changed([](auto& h) { h["__metadata__"]["token_file"] = "2"; });
  EXPECT_EQ(newer.code(), ErrorCode::kUnsupported);
}

TEST_F(TokenFileTest, TensorsThatDoNotFitTogetherAreCorrupt) {
  const auto with = [&](const char* name, TestTokenFile::Tensor tensor) {
    file_ = TestTokenFile::documents({3, 5, 2}, 100, true);
    for (TestTokenFile::Tensor& each : file_.tensors) {
      if (each.name == name) each = std::move(tensor);
    }
    return opened();
  };
  const auto tensor = [](const char* name, const char* type, auto values) {
    return TestTokenFile().add(name, type, values).tensors.front();
  };
  const auto starts = [&](std::vector<int64_t> values) {
    return with("document_starts", tensor("document_starts", "I64", values));
  };
  expect_corrupt(with("loss_mask", tensor("loss_mask", "U8", std::vector<uint8_t>(9))),
                 "loss_mask has 9 elements, but there are 10 tokens");
  expect_corrupt(with("tokens", tensor("tokens", "I64", std::vector<int64_t>(10))),
                 "tokens are I64");
  expect_corrupt(starts({}), "names no document");
  expect_corrupt(starts({1, 3}), "document 0 begins at token 1");
  expect_corrupt(starts({0, 3, 3}), "document 2 begins at token 3");
  expect_corrupt(starts({0, 5, 4}), "must ascend");
  expect_corrupt(starts({0, 3, 10}), "there are 10 tokens");
  expect_corrupt(starts({0, 3, -1}), "there are 10 tokens");
  EXPECT_TRUE(starts({0, 3, 9}).ok());
}

TEST_F(TokenFileTest, AMaskOfSomethingElseIsCorruptWithItsPlace) {
  file_.tensors[2].bytes[7] = 2;
  file_.write(path_);
  TokenStream stream;
  stream.add(read_token_file(path_.string()).value().tokens);
  std::vector<uint8_t> mask(10);
  expect_corrupt(stream.read_mask(0, mask), "loss_mask has 2 for token 7");
}

}  // namespace
}  // namespace smartinf::train
