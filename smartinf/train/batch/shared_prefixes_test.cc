#include "smartinf/train/batch/shared_prefixes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace smartinf::train {
namespace {

using ::testing::ElementsAre;
using Tokens = std::vector<int64_t>;

/// Parts of four tokens.
std::vector<uint64_t> shared(const std::vector<Tokens>& prompts,
                             const std::vector<Tokens>& kept = {}) {
  const std::vector<std::span<const int64_t>> all(prompts.begin(), prompts.end());
  const std::vector<std::span<const int64_t>> there(kept.begin(), kept.end());
  return shared_prefixes(all, there, 4);
}

/// So many tokens of a document, then others.
Tokens prompt(int64_t document, size_t tokens, const Tokens& behind) {
  Tokens all;
  for (size_t i = 0; i < tokens; ++i) all.push_back(100 * document + static_cast<int64_t>(i));
  all.insert(all.end(), behind.begin(), behind.end());
  return all;
}

TEST(SharedPrefixes, AreWholePartsBelowEachPrompt) {
  EXPECT_THAT(shared({}), ElementsAre());
  EXPECT_THAT(shared({prompt(1, 9, {})}), ElementsAre(0));
  EXPECT_THAT(shared({prompt(1, 3, {1}), prompt(1, 3, {2})}), ElementsAre(0, 0));
  EXPECT_THAT(shared({prompt(1, 9, {1}), prompt(2, 9, {1}), prompt(1, 9, {2})}),
              ElementsAre(8, 0, 8));
  // The last token of a prompt is computed for itself.
  EXPECT_THAT(shared({prompt(1, 8, {}), prompt(1, 8, {1})}), ElementsAre(4, 4));
  EXPECT_THAT(shared({prompt(1, 9, {}), prompt(1, 9, {})}), ElementsAre(8, 8));
}

TEST(SharedPrefixes, SaveAsMuchAsTheyCan) {
  const auto of = [](int64_t document, int64_t question) {
    Tokens all = prompt(0, 4, {});
    const Tokens behind = prompt(document, 8, {question});
    all.insert(all.end(), behind.begin(), behind.end());
    return all;
  };
  // Two documents behind one beginning; alone the third has the beginning only.
  EXPECT_THAT(shared({of(1, 1), of(2, 1), of(1, 2), of(2, 2), of(3, 1)}),
              ElementsAre(12, 12, 12, 12, 0));
  EXPECT_THAT(shared({of(1, 1), of(2, 1), of(3, 1)}), ElementsAre(4, 4, 4));
  // Four that share a part save more than two that share three.
  EXPECT_THAT(shared({of(1, 1), of(1, 2), of(2, 1), of(3, 1), of(4, 1)}),
              ElementsAre(4, 4, 4, 4, 4));
}

TEST(SharedPrefixes, TakeWhatIsThere) {
  const Tokens kept = prompt(1, 8, {});
  EXPECT_THAT(shared({prompt(1, 9, {1}), prompt(2, 9, {1})}, {kept}), ElementsAre(8, 0));
  // Twelve tokens once more are not worth what is there for both.
  EXPECT_THAT(shared({prompt(1, 13, {1}), prompt(1, 13, {2})}, {kept}), ElementsAre(8, 8));
  EXPECT_THAT(
      shared({prompt(1, 13, {1}), prompt(1, 13, {2}), prompt(1, 13, {3})}, {prompt(1, 4, {})}),
      ElementsAre(12, 12, 12));
  EXPECT_THAT(shared({prompt(1, 8, {})}, {kept}), ElementsAre(0)) << "a token behind it";
}

}  // namespace
}  // namespace smartinf::train
