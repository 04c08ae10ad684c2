#include "smartinf/plan/parameter_space.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "smartinf/base/state_format.h"

namespace smartinf::plan {
namespace {

using base::ErrorCode;

ParameterSpace small_space() {
  ParameterSpace space;
  EXPECT_TRUE(space.add("embed", {16, 4}, 0).ok());
  EXPECT_TRUE(space.add("norm", {4}, 1).ok());
  EXPECT_TRUE(space.add("norm2", {4}, 1).ok());
  EXPECT_TRUE(space.add("head", {4, 16}, 0).ok());
  return space;
}

TEST(ParameterSpace, LaysRangesEndToEnd) {
  const ParameterSpace space = small_space();
  EXPECT_EQ(space.count(), 136u);
  EXPECT_EQ(space.group_count(), 2u);
  EXPECT_EQ(space.find("norm2")->first, 68u);
  EXPECT_EQ(space.find("absent"), nullptr);
  EXPECT_EQ(space.at(0).name, "embed");
  EXPECT_EQ(space.at(63).name, "embed");
  EXPECT_EQ(space.at(64).name, "norm");
  EXPECT_EQ(space.at(135).name, "head");
}

TEST(ParameterSpace, RefusesWhatIsNotAParameterAndStaysAsItWas) {
  ParameterSpace space = small_space();
  const uint64_t digest = space.digest();
  EXPECT_EQ(space.add("", {4}, 0).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(space.add("norm", {4}, 0).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(space.add("empty", {4, 0}, 0).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(space.add("huge", {1ull << 40, 1ull << 40}, 0).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(space.add("sum", {ParameterSpace::kElementsMax}, 0).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(space.digest(), digest);
  EXPECT_EQ(space.count(), 136u);
}

TEST(ParameterSpace, SpansJoinNeighboursOfOneGroup) {
  const ParameterSpace space = small_space();
  const auto all = space.spans(0, space.count());
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[1].first, 64u);
  EXPECT_EQ(all[1].count, 8u);
  EXPECT_EQ(all[1].group, 1u);
  const auto part = space.spans(66, 7);
  ASSERT_EQ(part.size(), 2u);
  EXPECT_EQ(part[0].count, 6u);
  EXPECT_EQ(part[1].first, 72u);
  EXPECT_EQ(part[1].count, 1u);
  EXPECT_TRUE(space.spans(136, 0).empty());
}

TEST(ParameterSpace, SubgroupsAreWholeBlocksButForTheLast) {
  ParameterSpace space;
  const uint64_t count = 3 * base::kBlockElements + 17;
  ASSERT_TRUE(space.add("w", {count}, 0).ok());
  for (const uint64_t elements : {uint64_t{1}, base::kBlockElements, base::kBlockElements + 1,
                                  2 * base::kBlockElements, uint64_t{1} << 60}) {
    const auto subgroups = space.subgroups(elements);
    uint64_t next = 0;
    for (size_t i = 0; i < subgroups.size(); ++i) {
      EXPECT_EQ(subgroups[i].id.value, i);
      EXPECT_EQ(subgroups[i].first, next);
      EXPECT_EQ(subgroups[i].first % base::kBlockElements, 0u);
      EXPECT_GT(subgroups[i].count, 0u);
      next += subgroups[i].count;
    }
    EXPECT_EQ(next, count);
  }
  EXPECT_EQ(space.subgroups(base::kBlockElements + 1).size(), 2u);
  EXPECT_TRUE(ParameterSpace().subgroups(1).empty());
}

TEST(ParameterSpace, TextFormComesBackEqual) {
  const ParameterSpace space = small_space();
  const auto back = ParameterSpace::from_json(space.to_json());
  ASSERT_TRUE(back.ok()) << back.status().to_string();
  EXPECT_EQ(back->digest(), space.digest());
  EXPECT_EQ(back->count(), space.count());
  EXPECT_EQ(ParameterSpace::first_difference(space, *back), "");
}

TEST(ParameterSpace, DamagedTextIsCorruptNotACrash) {
  for (const char* text :
       {"", "{", "[]", "{}", R"({"ranges":3})", R"({"ranges":[{"name":"a"}]})",
        R"({"ranges":[{"name":"a","shape":[-1],"group":0}]})",
        R"({"ranges":[{"name":"a","shape":["x"],"group":0}]})",
        R"({"ranges":[{"name":"a","shape":[1],"group":99999999999}]})",
        R"({"ranges":[{"name":"a","shape":[1],"group":0},{"name":"a","shape":[1],"group":0}]})"}) {
    EXPECT_EQ(ParameterSpace::from_json(text).status().code(), ErrorCode::kCorrupt) << text;
  }
}

TEST(ParameterSpace, DigestSeesEveryDifferenceAndTheMessageNamesTheFirst) {
  const ParameterSpace here = small_space();
  const auto changed = [&](size_t which, std::string name, std::vector<uint64_t> shape,
                           uint32_t group) {
    ParameterSpace space;
    for (size_t i = 0; i < here.ranges().size(); ++i) {
      const ParameterRange& range = here.ranges()[i];
      EXPECT_TRUE(i == which ? space.add(name, shape, group).ok()
                             : space.add(range.name, range.shape, range.group).ok());
    }
    EXPECT_NE(space.digest(), here.digest());
    const std::string difference = ParameterSpace::first_difference(here, space);
    return difference.empty() ? ParameterSpace::first_other_group(here, space) : difference;
  };
  EXPECT_EQ(changed(1, "norm", {2, 2}, 1), "norm: [4] here, [2, 2] on the device");
  EXPECT_EQ(changed(1, "other", {4}, 1), "parameter 1 is norm here, other on the device");
  EXPECT_EQ(changed(3, "head", {4, 16}, 1), "head: group 0 here, 1 on the device");
  EXPECT_EQ(ParameterSpace::first_other_group(here, here), "");
  EXPECT_EQ(ParameterSpace::first_difference(here, ParameterSpace()),
            "embed: here, but not on the device");
  EXPECT_EQ(ParameterSpace::first_difference(ParameterSpace(), here),
            "embed: on the device, but not here");
}

}  // namespace
}  // namespace smartinf::plan
