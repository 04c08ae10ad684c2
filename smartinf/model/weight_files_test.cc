#include "smartinf/model/weight_files.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/model/folder_file.h"

namespace smartinf::model {
namespace {

namespace fs = std::filesystem;
using base::ErrorCode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::ordered_json;

struct Named {
  std::string name;
  std::vector<uint64_t> shape;
};

uint64_t bytes_of(const Named& tensor) {
  uint64_t bytes = 4;
  for (const uint64_t extent : tensor.shape) bytes *= extent;
  return bytes;
}

Json header_of(const std::vector<Named>& tensors) {
  Json header;
  uint64_t at = 0;
  for (const Named& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {at, at + bytes_of(tensor)}}};
    at += bytes_of(tensor);
  }
  return header;
}

void write_file(const fs::path& path, const Json& header, uint64_t bytes, float value = 1) {
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out << text;
  for (uint64_t i = 0; i < bytes / sizeof value; ++i) {
    out.write(reinterpret_cast<const char*>(&value), sizeof value);
  }
  out << std::string(bytes % sizeof value, 'x');
}

class WeightFilesTest : public ::testing::Test {
 protected:
  WeightFilesTest() {
    model_.layers = 1;
    model_.width = 4;
    model_.heads = model_.kv_heads = 2;
    model_.head_width = 2;
    model_.mlp_width = 3;
    model_.vocabulary = 5;
    model_.windows = {0};
    fs::create_directory(folder_);
    for (const Tensor& tensor : tensors_of(model_)) all_.push_back({tensor.name, tensor.shape});
  }

  void write(const std::string& file, const std::vector<Named>& tensors, float value = 1) {
    uint64_t bytes = 0;
    for (const Named& tensor : tensors) bytes += bytes_of(tensor);
    write_file(folder_ / file, header_of(tensors), bytes, value);
  }
  void write_index(const std::vector<std::pair<std::string, std::string>>& map) {
    Json json = {{"weight_map", Json::object()}};
    for (const auto& [tensor, file] : map) json["weight_map"][tensor] = file;
    std::ofstream(folder_ / "model.safetensors.index.json") << json.dump();
  }
  std::vector<std::pair<std::string, std::string>> all_in(const std::string& file) const {
    std::vector<std::pair<std::string, std::string>> map;
    for (const Named& tensor : all_) map.emplace_back(tensor.name, file);
    return map;
  }
  base::Status opened() const { return WeightFiles::open(folder_.string(), model_).status(); }
  std::string refusal() const { return opened().to_string(); }
  /// The first element of the embedding.
  float first() const {
    const auto files = WeightFiles::open(folder_.string(), model_);
    EXPECT_TRUE(files.ok()) << files.status().to_string();
    float value = -1;
    if (files.ok()) {
      EXPECT_TRUE(files->read(0, {&value, 1}).ok());
    }
    return value;
  }
  std::vector<Named> renamed(const std::string& from, const std::string& to) const {
    std::vector<Named> tensors = all_;
    for (Named& tensor : tensors) {
      if (tensor.name.starts_with(from)) tensor.name.replace(0, from.size(), to);
    }
    return tensors;
  }

  const base::Scratch scratch_;
  const fs::path folder_ = scratch_.path() / "m";
  Architecture model_;
  std::vector<Named> all_;
};

TEST_F(WeightFilesTest, TheSingleFileIsReadWhateverAnIndexSays) {
  write("model-00001-of-00001.safetensors", all_, 2);
  write_index(all_in("model-00001-of-00001.safetensors"));
  EXPECT_EQ(first(), 2);
  write("model.safetensors", all_, 3);
  EXPECT_EQ(first(), 3);
  fs::remove(folder_ / "model-00001-of-00001.safetensors");
  EXPECT_EQ(first(), 3);
  fs::remove(folder_ / "model.safetensors");
  EXPECT_THAT(refusal(), AllOf(HasSubstr("index"), HasSubstr("model-00001-of-00001.safetensors")));
}

TEST_F(WeightFilesTest, IndexAndFilesNameTheSameTensors) {
  write("a.safetensors", all_);
  auto map = all_in("a.safetensors");
  map.pop_back();
  write_index(map);
  EXPECT_THAT(refusal(), AllOf(HasSubstr(all_.back().name), HasSubstr("index")));
  map = all_in("a.safetensors");
  map.emplace_back("model.extra", "a.safetensors");
  write_index(map);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("model.extra"), HasSubstr("index")));
}

TEST_F(WeightFilesTest, OfTiedWeightsTheFilesMayHaveEither) {
  write("model.safetensors", renamed("model.embed_tokens.weight", "lm_head.weight"), 4);
  EXPECT_EQ(first(), 4);
  model_.tied_head = false;
  EXPECT_THAT(refusal(), HasSubstr("model.embed_tokens.weight is in none"));
}

TEST_F(WeightFilesTest, NamesOfTheModelWithoutItsHead) {
  write("model.safetensors", renamed("model.", ""), 5);
  EXPECT_EQ(first(), 5);
  model_.tied_head = false;
  EXPECT_THAT(refusal(), AllOf(HasSubstr("lm_head.weight is in none"), HasSubstr("head")));
}

TEST_F(WeightFilesTest, NamesOfWrappersAreRefusedByTheirPrefix) {
  for (const auto& [prefix, advice] : std::vector<std::pair<std::string, std::string>>{
           {"_orig_mod.", "torch.compile"}, {"module.", "module"}, {"base_model.model.", "peft"}}) {
    write("model.safetensors", renamed("", prefix));
    EXPECT_THAT(refusal(), AllOf(HasSubstr("begin with " + prefix), HasSubstr(advice)));
  }
  write("model.safetensors", renamed("model.", "_orig_mod."));
  EXPECT_THAT(refusal(), HasSubstr("begin with _orig_mod."));
}

TEST_F(WeightFilesTest, WhatLiesInTheirPlaceIsNamed) {
  const auto says = [&](const std::string& text) {
    std::ofstream(folder_ / "model.safetensors") << text;
    return refusal();
  };
  EXPECT_THAT(says("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"),
              AllOf(HasSubstr("git lfs pull"), HasSubstr("m/model.safetensors")));
  EXPECT_THAT(says("Entry not found"), HasSubstr("server's answer"));
  EXPECT_THAT(says("<!doctype html>"), HasSubstr("server's answer"));
  EXPECT_THAT(says(""), HasSubstr("too short"));
  fs::remove(folder_ / "model.safetensors");
  ASSERT_EQ(::mkfifo((folder_ / "model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(refusal(), HasSubstr("a FIFO"));
  fs::remove(folder_ / "model.safetensors");
  write("model-00001-of-00002.safetensors", all_);
  EXPECT_THAT(refusal(), HasSubstr("model.safetensors.index.json"));
}

TEST_F(WeightFilesTest, LinksThatLeaveTheFolderAreRefused) {
  const fs::path link = folder_ / "model.safetensors";
  write("other.safetensors", all_, 6);
  fs::create_symlink("other.safetensors", link);
  EXPECT_EQ(first(), 6);
  fs::rename(folder_ / "other.safetensors", scratch_.path() / "outside.safetensors");
  EXPECT_THAT(refusal(),
              AllOf(HasSubstr("leads to what is not there"), HasSubstr("model.safetensors")));
  fs::remove(link);
  fs::create_symlink("../outside.safetensors", link);
  EXPECT_EQ(opened().code(), ErrorCode::kInvalidArgument);
  EXPECT_THAT(refusal(), AllOf(HasSubstr("model.safetensors"), HasSubstr("../outside")));
}

TEST_F(WeightFilesTest, LinksOfTheHubsCacheLeadToItsBlobs) {
  const fs::path repo = scratch_.path() / "models--a--b";
  const fs::path snapshot = repo / "snapshots" / "abc";
  fs::create_directories(snapshot);
  fs::create_directory(repo / "blobs");
  std::ofstream(repo / "blobs" / "1") << "x";
  std::ofstream(repo / "secret") << "x";
  fs::create_symlink("../../blobs/1", snapshot / "config.json");
  fs::create_symlink("../../secret", snapshot / "vocab.json");
  const auto found = find_folder_file(snapshot.string(), "config.json");
  ASSERT_TRUE(found.ok()) << found.status().to_string();
  EXPECT_TRUE(found->has_value());
  EXPECT_FALSE(find_folder_file(snapshot.string(), "vocab.json").ok());
  EXPECT_FALSE(find_folder_file(snapshot.string(), "nothing")->has_value());
}

TEST_F(WeightFilesTest, SafetensorsAsTheFormatHasThem) {
  const std::vector<Named> two{{"a", {2}}, {"b", {3}}};
  const auto says = [&](Json header, uint64_t bytes) {
    write_file(folder_ / "model.safetensors", header, bytes);
    const auto file = base::DataFile::open((folder_ / "model.safetensors").string());
    return SafetensorsHeader::read(*file).status().to_string();
  };
  const auto moved = [&](uint64_t begin, uint64_t end, uint64_t count) {
    Json header = header_of(two);
    header["b"]["data_offsets"] = {begin, end};
    header["b"]["shape"] = {count};
    return header;
  };
  EXPECT_THAT(says(moved(4, 16, 3), 16), HasSubstr("two tensors have the same bytes: b"));
  EXPECT_THAT(says(moved(0, 8, 2), 8), HasSubstr("two tensors have the same bytes"));
  EXPECT_THAT(says(moved(12, 24, 3), 24), HasSubstr("no tensor lie before b"));
  EXPECT_THAT(says(header_of(two), 21), HasSubstr("no tensor lie at the end"));
  EXPECT_THAT(says(header_of(two), 16), HasSubstr("bytes are missing of b"));
  EXPECT_THAT(says(moved(8, 20, 4), 20), HasSubstr("disagree of b"));
  Json metadata = header_of(two);
  metadata["__metadata__"] = {{"a", 1}};
  EXPECT_THAT(says(metadata, 20), HasSubstr("metadata"));
  EXPECT_TRUE(SafetensorsHeader::read(
                  *base::DataFile::open(
                      (write_file(folder_ / "good", header_of({{"e", {0}}, {"a", {2}}}), 8),
                       folder_ / "good")
                          .string()))
                  .ok());
}

}  // namespace
}  // namespace smartinf::model
