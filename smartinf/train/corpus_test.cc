#include "smartinf/train/corpus.h"

#include <filesystem>
#include <fstream>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/train/test_token_files.h"

namespace smartinf::train {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class CorpusTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        fs::path(::testing::TempDir()) /
        ("corpus_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    options_.paths = {folder_.string()};
    options_.sequence = 4;
    options_.validation_share = 0;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& text) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  template <typename Token>
  std::string write_tokens(const std::string& name, int32_t magic, int32_t version,
                           const std::vector<Token>& tokens, int32_t count) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = count;
    std::string text(reinterpret_cast<const char*>(header.data()), header.size() * 4);
    text.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
    return write(name, text);
  }
  std::string open_error() { return Corpus::open(options_).status().to_string(); }

  fs::path folder_;
  DataOptions options_;
};

std::vector<int64_t> all(const TokenStream& stream) {
  std::vector<int64_t> tokens(stream.count());
  EXPECT_TRUE(stream.read(0, 1u << 30, tokens).ok());
  return tokens;
}

TEST_F(CorpusTest, FilesComeInTheOrderOfTheirNamesWithSeparators) {
  write("b/x.txt", "BB");
  write("a.txt", "AA");
  write("binary", std::string("\0\1\2", 3));
  write("site-packages/p.txt", "PP");
  const auto corpus = Corpus::open(options_);
  ASSERT_TRUE(corpus.ok()) << corpus.status().to_string();
  EXPECT_EQ(all(corpus.value().training().stream()),
            (std::vector<int64_t>{'A', 'A', 255, 'B', 'B', 255}));
  EXPECT_EQ(corpus.value().vocabulary(), 256u);
}

TEST_F(CorpusTest, SuffixesChooseFiles) {
  write("a.txt", "AAAA");
  write("b.py", "BBBB");
  options_.suffixes = {".py"};
  EXPECT_EQ(all(Corpus::open(options_).value().training().stream()).front(), 'B');
  options_.suffixes = {".c"};
  EXPECT_THAT(open_error(), HasSubstr("data.suffixes"));
}

TEST_F(CorpusTest, TheDigestSeesContentAndNames) {
  write("a.txt", "AAAA");
  const uint64_t digest = Corpus::open(options_).value().digest();
  EXPECT_EQ(Corpus::open(options_).value().digest(), digest);
  write("a.txt", "AAAB");
  EXPECT_NE(Corpus::open(options_).value().digest(), digest);
}

TEST_F(CorpusTest, OneFileIsSplitAtItsEnd) {
  write("a.txt", std::string(90, 'A') + std::string(9, 'Z'));
  options_.validation_share = 0.1;
  const auto corpus = Corpus::open(options_);
  ASSERT_TRUE(corpus.ok());
  EXPECT_EQ(corpus.value().training().stream().count(), 90u);
  EXPECT_EQ(all(corpus.value().validation().stream()).front(), 'Z');
}

TEST_F(CorpusTest, ManyFilesAreHeldOutWhole) {
  for (int i = 0; i < 200; ++i) {
    write(std::to_string(i) + ".txt", std::string(100, static_cast<char>('A' + i % 20)));
  }
  options_.validation_share = 0.2;
  const auto corpus = Corpus::open(options_);
  ASSERT_TRUE(corpus.ok());
  const uint64_t held = corpus.value().validation().stream().count();
  EXPECT_EQ(held % 101, 0u);
  EXPECT_GT(held, 20u * 101);
  EXPECT_LT(held, 60u * 101);
  EXPECT_EQ(held + corpus.value().training().stream().count(), 200u * 101);
}

TEST_F(CorpusTest, TokenFilesOfBothWidths) {
  std::vector<uint16_t> narrow(20);
  std::iota(narrow.begin(), narrow.end(), uint16_t{1000});
  std::vector<uint32_t> wide(20, 100000);
  options_.paths = {write_tokens("a.bin", 20240520, 1, narrow, 20),
                    write_tokens("b.bin", 20240801, 7, wide, 20)};
  const auto corpus = Corpus::open(options_);
  ASSERT_TRUE(corpus.ok()) << corpus.status().to_string();
  std::vector<int64_t> tokens(4);
  ASSERT_TRUE(corpus.value().training().stream().read(18, 200000, tokens).ok());
  EXPECT_EQ(tokens, (std::vector<int64_t>{1018, 1019, 100000, 100000}));
  const std::string error = corpus.value().training().stream().read(18, 50257, tokens).to_string();
  EXPECT_THAT(error, HasSubstr("model.vocabulary"));
  EXPECT_THAT(error, HasSubstr("b.bin"));
}

TEST_F(CorpusTest, SpoiltTokenFilesAreRefused) {
  const std::vector<uint16_t> tokens(20);
  options_.paths = {write_tokens("a.bin", 20240520, 1, tokens, 21)};
  EXPECT_THAT(open_error(), HasSubstr("header says 21 tokens"));
  options_.paths = {write_tokens("a.bin", 12345, 1, tokens, 20)};
  EXPECT_THAT(open_error(), HasSubstr("not a token file"));
  options_.paths = {write("short.bin", "short")};
  EXPECT_THAT(open_error(), HasSubstr("shorter than its header"));
}

TEST_F(CorpusTest, ATokenFileThatBecomesShorterIsAnError) {
  const std::vector<uint16_t> tokens(20'000, 7);
  options_.paths = {write_tokens("a.bin", 20240520, 1, tokens, 20'000)};
  const auto corpus = Corpus::open(options_);
  ASSERT_TRUE(corpus.ok());
  std::vector<int64_t> window(100);
  ASSERT_TRUE(corpus->training().stream().read(19'000, 50257, window).ok());
  EXPECT_EQ(window[99], 7);
  fs::resize_file(options_.paths[0], 2000);
  const auto status = corpus->training().stream().read(19'000, 50257, window);
  EXPECT_EQ(status.code(), base::ErrorCode::kCorrupt);
  EXPECT_THAT(status.to_string(), HasSubstr("has become shorter"));
  EXPECT_THAT(status.to_string(), HasSubstr("a.bin"));
}

TEST_F(CorpusTest, DocumentsAreHeldOutWholeAndStayWhereTheyAre) {
  TestTokenFile::documents(std::vector<uint64_t>(200, 5), 1000, false)
      .write(folder_ / "a.safetensors");
  TestTokenFile::documents(std::vector<uint64_t>(10, 5), 500, false)
      .write(folder_ / "b.safetensors");
  options_.validation_share = 0.2;
  options_.paths = {folder_ / "a.safetensors"};
  const auto one = Corpus::open(options_);
  ASSERT_TRUE(one.ok()) << one.status().to_string();
  EXPECT_EQ(one->vocabulary(), 1000u);
  const uint64_t held = one->validation().tokens();
  EXPECT_GT(held, 20u * 4);
  EXPECT_LT(held, 60u * 4);
  EXPECT_EQ(held + one->training().tokens(), 200u * 4);
  options_.paths.push_back(folder_ / "b.safetensors");
  const auto both = Corpus::open(options_);
  ASSERT_TRUE(both.ok()) << both.status().to_string();
  EXPECT_GE(both->validation().tokens(), held);
  EXPECT_LE(both->validation().tokens(), held + 10 * 4);
  EXPECT_NE(both->digest(), one->digest());
  std::swap(options_.paths[0], options_.paths[1]);
  EXPECT_EQ(Corpus::open(options_)->validation().tokens(), both->validation().tokens());
}

TEST_F(CorpusTest, TheDigestSeesTheBordersOfDocuments) {
  options_.paths = {folder_ / "a.safetensors"};
  TestTokenFile::documents({10, 20}, 100, false).write(folder_ / "a.safetensors");
  const uint64_t digest = Corpus::open(options_).value().digest();
  TestTokenFile::documents({20, 10}, 100, false).write(folder_ / "a.safetensors");
  EXPECT_NE(Corpus::open(options_).value().digest(), digest);
}

TEST_F(CorpusTest, EvaluationHasNamesOfItsOwnAndIsNotInTheDigest) {
  const std::vector<uint16_t> tokens(50, 7);
  options_.paths = {write_tokens("a.bin", 20240520, 1, tokens, 50)};
  const uint64_t digest = Corpus::open(options_).value().digest();
  TestTokenFile::documents({9, 9}, 100, true).write(folder_ / "chat.safetensors");
  options_.evaluation = {"chat = " + (folder_ / "chat.safetensors").string(),
                         "plain = " + options_.paths[0]};
  const auto corpus = Corpus::open(options_);
  ASSERT_TRUE(corpus.ok()) << corpus.status().to_string();
  ASSERT_EQ(corpus->evaluation().size(), 2u);
  EXPECT_EQ(corpus->evaluation()[0].name, "chat");
  EXPECT_TRUE(corpus->evaluation()[0].windows.has_documents());
  EXPECT_FALSE(corpus->evaluation()[1].windows.has_documents());
  EXPECT_EQ(corpus->digest(), digest);
  options_.evaluation = {"text = " + write("a.txt", "abcdefgh")};
  EXPECT_THAT(open_error(), HasSubstr("data.evaluation names text"));
}

TEST_F(CorpusTest, DocumentsThatCannotBeLearntFromAreRefused) {
  options_.paths = {folder_ / "a.safetensors"};
  TestTokenFile::documents({1, 1, 1}, 100, false).write(folder_ / "a.safetensors");
  EXPECT_THAT(open_error(), HasSubstr("no token of the documents for training counts"));
  TestTokenFile file = TestTokenFile::documents({5, 5}, 100, true);
  file.tensors[2].bytes.assign(10, 0);
  file.write(folder_ / "a.safetensors");
  EXPECT_THAT(open_error(), HasSubstr("no token of the documents for training counts"));
  TestTokenFile::documents({5}, 100, false).write(folder_ / "a.safetensors");
  options_.validation_share = 0.1;
  EXPECT_THAT(open_error(), HasSubstr("data.validation_share"));
  const std::vector<uint16_t> tokens(50, 7);
  options_.paths.push_back(write_tokens("b.bin", 20240520, 1, tokens, 50));
  EXPECT_THAT(open_error(), HasSubstr("with documents and without"));
}

TEST_F(CorpusTest, WhatCannotBeLearntFromIsRefused) {
  options_.paths = {folder_.string() + "/none"};
  EXPECT_THAT(open_error(), HasSubstr("/none"));
  options_.paths = {folder_.string()};
  EXPECT_THAT(open_error(), HasSubstr("there is no text"));
  write("a.txt", "");
  EXPECT_THAT(open_error(), HasSubstr("there is no text"));
  write("a.txt", "abc");
  EXPECT_THAT(open_error(), HasSubstr("data.sequence"));
  write("a.txt", "abcdefghijkl");
  options_.validation_share = 0.1;
  EXPECT_THAT(open_error(), HasSubstr("data.validation_share"));
  options_.paths = {folder_.string(), "x.bin"};
  EXPECT_THAT(open_error(), HasSubstr("mixes"));
}

}  // namespace
}  // namespace smartinf::train
