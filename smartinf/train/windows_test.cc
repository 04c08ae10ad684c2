#include "smartinf/train/windows.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <span>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/test_scratch.h"
#include "smartinf/train/packing.h"
#include "smartinf/train/random.h"
#include "smartinf/train/test_token_files.h"
#include "smartinf/train/token_file.h"

namespace smartinf::train {
namespace {

using ::testing::ElementsAre;

TEST(Packing, TheLongestComesFirstAndGoesWhereTheLeastRoomIsLeft) {
  // 7 and 6 begin windows; 4 fits the second alone, 3 the first alone, 2 begins the third.
  EXPECT_THAT(pack(std::vector<uint32_t>{2, 3, 4, 6, 7}, 10), ElementsAre(2, 0, 1, 1, 0));
  // 1 would fit behind 8, too.
  EXPECT_THAT(pack(std::vector<uint32_t>{9, 8, 2, 1}, 10), ElementsAre(0, 1, 1, 0));
  EXPECT_TRUE(pack({}, 10).empty());
}

TEST(Packing, NoWindowIsFullerThanItsRoomAndNoneIsEmpty) {
  std::vector<uint32_t> lengths;
  for (uint64_t i = 0; i < 3000; ++i) {
    lengths.push_back(static_cast<uint32_t>(1 + random_bits(1, i) % 100));
  }
  const std::vector<uint64_t> window_of = pack(lengths, 100);
  std::map<uint64_t, uint64_t> filled;
  for (size_t i = 0; i < lengths.size(); ++i) filled[window_of[i]] += lengths[i];
  for (const auto& [window, tokens] : filled) EXPECT_LE(tokens, 100u);
  EXPECT_EQ(filled.rbegin()->first + 1, filled.size());
  const uint64_t total = std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
  EXPECT_LE(filled.size(), total / 100 * 101 / 100 + 1) << "one in a hundred is wasted at most";
  EXPECT_EQ(pack(lengths, 100), window_of);
}

class WindowsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kVocabulary = 60000;  // so that each token says its place

  Windows open(const std::vector<uint64_t>& lengths, uint32_t sequence, bool masked) {
    TestTokenFile::documents(lengths, kVocabulary, masked).write(path_);
    const TokenFile file = read_token_file(path_.string()).value();
    auto stream = std::make_shared<TokenStream>();
    stream->add(file.tokens);
    documents_.clear();
    for (size_t i = 0; i < lengths.size(); ++i) {
      documents_.push_back({file.document_starts[i], lengths[i]});
    }
    return Windows::of_documents(stream, documents_, sequence).value();
  }

  struct Row {
    std::vector<int64_t> tokens;
    std::vector<int64_t> targets;
    std::vector<int64_t> ends;
  };
  static Row read(const Windows& windows, uint64_t window, uint32_t sequence) {
    Row row{std::vector<int64_t>(sequence, -1), std::vector<int64_t>(sequence, -1), {}};
    const base::Status status =
        windows.read(std::span(&window, 1), kVocabulary, row.tokens, row.targets, row.ends);
    EXPECT_TRUE(status.ok()) << status.to_string();
    return row;
  }
  size_t document_of(int64_t token) const {
    const auto behind =
        std::ranges::upper_bound(documents_, static_cast<uint64_t>(token), {}, &Document::first);
    return static_cast<size_t>(behind - documents_.begin()) - 1;
  }

  const base::Scratch scratch_;
  const std::filesystem::path path_ = scratch_.path() / "a.safetensors";
  std::vector<Document> documents_;
};

TEST_F(WindowsTest, EveryTokenOfEveryDocumentIsReadOnceAndNoneIsMixed) {
  constexpr uint32_t kSequence = 32;
  std::vector<uint64_t> lengths;
  for (uint64_t i = 0; i < 400; ++i) lengths.push_back(1 + random_bits(2, i) % 120);
  const Windows windows = open(lengths, kSequence, /*masked=*/false);
  std::multiset<int64_t> read_tokens;
  std::multiset<int64_t> targets;
  uint64_t padding = 0;
  for (uint64_t w = 0; w < windows.count(); ++w) {
    const Row row = read(windows, w, kSequence);
    ASSERT_FALSE(row.ends.empty());
    EXPECT_EQ(row.ends.back(), kSequence);
    int64_t begin = 0;
    for (const int64_t end : row.ends) {
      ASSERT_LT(begin, end);
      if (row.targets[static_cast<size_t>(begin)] == kNoTarget) {  // what is left free
        EXPECT_EQ(end, kSequence);
        for (int64_t i = begin; i < end; ++i) {
          EXPECT_EQ(row.tokens[static_cast<size_t>(i)], 0);
          EXPECT_EQ(row.targets[static_cast<size_t>(i)], kNoTarget);
        }
        padding += static_cast<uint64_t>(end - begin);
      } else {
        const size_t document = document_of(row.tokens[static_cast<size_t>(begin)]);
        for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
          EXPECT_EQ(row.targets[i], row.tokens[i] + 1);
          EXPECT_EQ(document_of(row.targets[i]), document);
          read_tokens.insert(row.tokens[i]);
          targets.insert(row.targets[i]);
        }
      }
      begin = end;
    }
  }
  // All but a document's last token are read, all but its first are targets.
  std::multiset<int64_t> all_but_last;
  std::multiset<int64_t> all_but_first;
  for (const auto& [first, count] : documents_) {
    for (uint64_t i = 0; i + 1 < count; ++i) {
      all_but_last.insert(static_cast<int64_t>(first + i));
      all_but_first.insert(static_cast<int64_t>(first + i + 1));
    }
  }
  EXPECT_EQ(read_tokens, all_but_last);
  EXPECT_EQ(targets, all_but_first);
  EXPECT_EQ(windows.tokens(), read_tokens.size());
  EXPECT_LT(padding, windows.count() * kSequence / 20);
}

TEST_F(WindowsTest, OnlyADocumentThatNoWindowHoldsIsCut) {
  const Windows windows = open({5, 9, 10, 3}, 8, /*masked=*/false);
  // 9 tokens are 8 that are read and a target behind them; 10 are 8 and 1.
  ASSERT_EQ(windows.count(), 3u);
  EXPECT_THAT(read(windows, 0, 8).tokens, ElementsAre(5, 6, 7, 8, 9, 10, 11, 12));
  EXPECT_THAT(read(windows, 1, 8).tokens, ElementsAre(14, 15, 16, 17, 18, 19, 20, 21));
  const Row row = read(windows, 2, 8);
  EXPECT_THAT(row.tokens, ElementsAre(0, 1, 2, 3, 22, 24, 25, 0));
  EXPECT_THAT(row.targets, ElementsAre(1, 2, 3, 4, 23, 25, 26, kNoTarget));
  EXPECT_THAT(row.ends, ElementsAre(4, 5, 7, 8));
}

TEST_F(WindowsTest, AMaskTakesTargetsAway) {
  const Windows windows = open({4, 3}, 8, /*masked=*/true);
  const Row row = read(windows, 0, 8);
  EXPECT_THAT(row.tokens, ElementsAre(0, 1, 2, 4, 5, 0, 0, 0));
  EXPECT_THAT(row.targets,
              ElementsAre(1, kNoTarget, kNoTarget, 5, kNoTarget, kNoTarget, kNoTarget, kNoTarget));
  EXPECT_THAT(row.ends, ElementsAre(3, 5, 8));
  EXPECT_EQ(windows.targets(), 2u);
}

TEST_F(WindowsTest, EndsOfDocumentsAreThoseOfAllRowsTogether) {
  const Windows windows = open({9, 5, 4}, 8, /*masked=*/false);
  const std::vector<uint64_t> rows = {1, 0, 1};
  std::vector<int64_t> tokens(24);
  std::vector<int64_t> targets(24);
  std::vector<int64_t> ends;
  ASSERT_TRUE(windows.read(rows, kVocabulary, tokens, targets, ends).ok());
  EXPECT_THAT(ends, ElementsAre(4, 7, 8, 16, 20, 23, 24));
  EXPECT_EQ(tokens[8], 0);
  EXPECT_EQ(tokens[16], 9);
}

TEST_F(WindowsTest, PiecesWithoutATargetThatCountsAreLeftOut) {
  // Targets of a document of 6 in pieces of 1 are 1 to 5, of which 1 and 4 count.
  const Windows windows = open({6, 1}, 1, /*masked=*/true);
  EXPECT_EQ(windows.count(), 2u);
  EXPECT_EQ(windows.left_out(), 3u);
  EXPECT_THAT(read(windows, 0, 1).targets, ElementsAre(1));
  EXPECT_THAT(read(windows, 1, 1).targets, ElementsAre(4));
}

TEST_F(WindowsTest, AStreamIsCutAtEverySequence) {
  TestTokenFile file;
  file.add("tokens", "U16", std::vector<uint16_t>{9, 8, 7, 6, 5, 4, 3, 2});
  file.add("loss_mask", "U8", std::vector<uint8_t>{1, 0, 1, 1, 0, 1, 1, 1});
  file.write(path_);
  auto stream = std::make_shared<TokenStream>();
  stream->add(read_token_file(path_.string()).value().tokens);
  const Windows windows(stream, 3);
  ASSERT_EQ(windows.count(), 2u);
  const Row row = read(windows, 1, 3);
  EXPECT_THAT(row.tokens, ElementsAre(6, 5, 4));
  EXPECT_THAT(row.targets, ElementsAre(kNoTarget, 4, 3));
  EXPECT_THAT(row.ends, ElementsAre());
}

}  // namespace
}  // namespace smartinf::train
